#pragma once

#include <cstdint>

#include "common/tensor_view.h"
#include "kernels/stream.h"

namespace ravel::kernels {

// Normal(0, std) values of global elements [first_index, first_index + n) of a tensor:
// Philox4x32-10 keyed by `seed`, counter from (global index, step 0, site, purpose 0); Box-Muller
// in double, rounded once. Any partition of a tensor gives the same values. `site` is the ordinal
// of the canonical tensor in the sorted inventory.
struct InitNormalArgs {
  TensorView out;  // flat fp32
  uint64_t seed = 0;
  uint32_t site = 0;
  int64_t first_index = 0;
  float standard_deviation = 0.02f;
};
void InitNormal(Stream& stream, const InitNormalArgs& args);

}  // namespace ravel::kernels
