#pragma once

#include <string>

#include "common/plan/job_spec.h"
#include "common/status.h"

namespace ravel::checkpoint {

// The config.json of a model: verbatim where it came from a file, else written from the fields,
// with RoPE in both forms.
std::string HuggingFaceConfigJson(const plan::ModelConfig& config);

}  // namespace ravel::checkpoint
