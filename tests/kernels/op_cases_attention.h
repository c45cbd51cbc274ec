#pragma once

#include <vector>

#include "tests/kernels/op_case.h"

namespace ravel::kernels::testing {

// Causal attention: one head and many, grouped, ragged against the tile sizes, odd head sizes,
// several sequences.
void AddAttentionCases(std::vector<OpCase>& cases);

}  // namespace ravel::kernels::testing
