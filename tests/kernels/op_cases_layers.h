#pragma once

#include <vector>

#include "tests/kernels/op_case.h"

namespace ravel::kernels::testing {

// LayerNorm, RMSNorm per head, GELU, biases, learned positions.
void AddLayerCases(std::vector<OpCase>& cases);

}  // namespace ravel::kernels::testing
