#pragma once

#include <cstdint>

#include "common/plan/job_spec.h"
#include "common/plan/model_inventory.h"

namespace ravel::plan {

// Of an element of model weights, gathered weights and activations: 4 or 2.
int64_t WeightElementBytes(ComputeType compute);
// ProgramOptions::main_element_bytes and state_element_bytes.
int64_t MainElementBytes(MainWeightForm form);
int64_t StateElementBytes(StateType type);

// Activations in bf16, but for what kernels keep in fp32: row statistics, softmax sums, losses,
// rotary tables and attention's scratch.
void UseBf16Activations(ModelInventory& inventory);

}  // namespace ravel::plan
