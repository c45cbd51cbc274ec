#pragma once

#include <cstdint>

#include "common/tensor_view.h"
#include "kernels/stream.h"

namespace ravel::kernels {

// Scalars of one update, all fp32; how they are made (beta powers in fp64 and so on): precision
// rules, section 6.1.
struct AdamWScalars {
  float beta1 = 0.9f;
  float beta2 = 0.95f;
  float one_minus_beta1 = 0.1f;
  float one_minus_beta2 = 0.05f;
  float inverse_correction1 = 1.0f;  // 1 / (1 - beta1^t)
  float inverse_correction2 = 1.0f;
  float epsilon = 1e-8f;
  float learning_rate = 0.0f;
  float weight_decay = 0.0f;
  float gradient_scale = 1.0f;  // clip coefficient / denominator
};

// t: updates applied so far + 1. The powers are taken in fp64 by binary exponentiation.
struct AdamWHyper {
  double beta1 = 0.9;
  double beta2 = 0.95;
  double epsilon = 1e-8;
  double weight_decay = 0.0;
  double learning_rate = 0.0;
};
AdamWScalars MakeAdamWScalars(const AdamWHyper& hyper, int64_t t, float gradient_scale);

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
  AdamWScalars scalars = {};
  // Memory of the stream's device, read when the op runs: `device_scalars` takes the place of
  // `scalars`; where *apply is 0, nothing changes.
  const AdamWScalars* device_scalars = nullptr;
  const int32_t* apply = nullptr;
};
void AdamWUpdate(Stream& stream, const AdamWArgs& args);

}  // namespace ravel::kernels
