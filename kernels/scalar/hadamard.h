#pragma once

// The Hadamard transform with signs that NVFP4 puts before blocks along rows:
// y_j = 1/4 * sum over i of s_i x_i (-1)^popcount(i & j), for 16 values. It is orthogonal, so a
// matrix product that sums over these 16 keeps its value if both operands are transformed.

#include <cstdint>

namespace ravel::kernels::scalar {

inline constexpr int kHadamardSize = 16;
inline constexpr float kHadamardSigns[kHadamardSize] = {
    1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1};
inline constexpr float kHadamardFactor = 0.25f;

// In this order: signs, stages of strides 1, 2, 4, 8, the factor. Every operation rounds once.
constexpr void Hadamard16(float (&x)[kHadamardSize]) {
  for (int i = 0; i < kHadamardSize; ++i) {
    x[i] *= kHadamardSigns[i];
  }
  for (int stride = 1; stride < kHadamardSize; stride *= 2) {
    for (int i = 0; i < kHadamardSize; ++i) {
      if ((i & stride) == 0) {
        const float sum = x[i] + x[i + stride];
        const float difference = x[i] - x[i + stride];
        x[i] = sum;
        x[i + stride] = difference;
      }
    }
  }
  for (float& value : x) {
    value *= kHadamardFactor;
  }
}

}  // namespace ravel::kernels::scalar
