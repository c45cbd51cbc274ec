#pragma once

#include "common/dtype.h"
#include "common/model/job_spec.h"
#include "common/model/model_inventory.h"

namespace ravel::plan {

// ProgramOptions::weight_type, main_type and state_types.
DType WeightTypeOf(ComputeType compute);
DType MainTypeOf(MainWeightForm form);

// Activations in bf16, but for what kernels keep in fp32: row statistics, softmax sums, losses,
// rotary tables and attention's scratch.
void UseBf16Activations(ModelInventory& inventory);

}  // namespace ravel::plan
