#pragma once

#include "common/plan/model_inventory.h"

namespace ravel::plan {

// Activations in bf16, but for what kernels keep in fp32: row statistics, softmax sums, logits,
// losses, rotary tables and attention's scratch.
void UseBf16Activations(ModelInventory& inventory);

}  // namespace ravel::plan
