#pragma once

// Rules K7 and K9.

#include "common/plan/check/program_facts.h"
#include "common/status.h"

namespace ravel::plan {

// K7, K9: each gradient is staged, summed and used once.
absl::Status CheckGradients(const ProgramFacts& facts);

}  // namespace ravel::plan
