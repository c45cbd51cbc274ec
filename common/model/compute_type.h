#pragma once

#include "common/dtype.h"
#include "common/model/job_spec.h"
#include "common/model/model_inventory.h"

namespace ravel::plan {

// As job files say it.
const char* ComputeName(ComputeType compute);
// The compute of a plan with this weight_type.
const char* ComputeName(DType weight_type);
// ProgramOptions::weight_type, main_type and state_types.
DType WeightTypeOf(ComputeType compute);
DType MainTypeOf(MainWeightForm form);

// Activations in `type`, bf16 or fp16, but for what kernels keep in fp32: row statistics, softmax
// sums, losses, rotary tables and attention's scratch. fp32: nothing changes.
void NarrowActivations(DType type, ModelInventory& inventory);

}  // namespace ravel::plan
