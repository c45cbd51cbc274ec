#pragma once

#include <cstdint>

#include "common/tensor_view.h"
#include "kernels/stream.h"
#include "kernels/update.h"

namespace ravel::kernels {

// One fused decoupled-decay Adam update [Loshchilov and Hutter 2019] over equal flat fp32 ranges,
// in place:
//   g' = g*s; m = fma(1-b1, g', b1*m); v = fma((1-b2)*g', g', b2*v);
//   u = (m*r1) / (sqrt(v*r2) + eps); u = fma(decay, p, u) unless decay is 0; p = fma(-lr, u, p)
// The order is the specification: reference, AVX2 and device give the same bits. 28 bytes moved per
// element.
struct AdamWArgs {
  TensorView p;
  TensorView g;
  TensorView m;
  TensorView v;
  UpdateScalars scalars = {};
  // Memory of the stream's device, read when the op runs: `device_scalars` takes the place of
  // `scalars`; where *apply is 0, nothing changes.
  const UpdateScalars* device_scalars = nullptr;
  const int32_t* apply = nullptr;
  PieceTable table = {};
};
void AdamWUpdate(Stream& stream, const AdamWArgs& args);

}  // namespace ravel::kernels
