#pragma once

#include <vector>

#include "tests/kernels/op_case.h"

namespace ravel::kernels::testing {

// Sums of partial products, and the loss over a vocabulary in blocks, the last of them short or
// empty.
void AddPartCases(std::vector<OpCase>& cases);

}  // namespace ravel::kernels::testing
