#pragma once

#include "kernels/weight_update.h"

namespace ravel::kernels::cpu {

// The ops that the contract names, one after another: what a fused kernel is compared with. Shapes
// are checked.
void WeightUpdate(const WeightUpdateArgs& args);

}  // namespace ravel::kernels::cpu
