#pragma once

#include <vector>

#include "common/model/model_inventory.h"

namespace ravel::model {

// theta^(-2j / head_dim) for j in [0, head_dim / 2), with Llama 3's scaling of long wavelengths
// where the configuration asks for it [Hugging Face `rope_type: llama3`]; computed in double,
// rounded once.
std::vector<float> InverseFrequencies(const plan::ModelConfig& config);

}  // namespace ravel::model
