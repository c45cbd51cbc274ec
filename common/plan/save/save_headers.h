#pragma once

// A SavePlan as files: the safetensors header of each, and a hash of the whole that two sides can
// compare.

#include <vector>

#include "common/ckpt/safetensors.h"
#include "common/crypto.h"
#include "common/plan/save/save_plan.h"

namespace ravel::plan {

// The entries of a file's header, in the order of its chunks, placed one after another.
std::vector<ckpt::SafetensorsEntry> FileEntries(const SavePlan& plan, const SaveFile& file);

// SHA-256 over tensors, files and chunks: equal plans write equal files.
Sha256Digest SavePlanHash(const SavePlan& plan);

}  // namespace ravel::plan
