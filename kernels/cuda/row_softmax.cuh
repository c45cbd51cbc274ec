#pragma once

// The largest element of a row and the sum of exponentials beside it, by one block.

#include "kernels/cuda/device_math.cuh"

namespace ravel::kernels::cuda {

// Below this a term cannot be seen beside the row's 1 (kSoftmaxFloor of cpu/simd_math.h).
inline constexpr float kSoftmaxFloor = -69.0f;

// The factor of the gradients of logits.
template <typename Params>
__device__ inline float LossScaleOf(const Params& p) {
  return p.device_loss_scale != nullptr ? *p.device_loss_scale : p.loss_scale;
}

struct RowSoftmax {
  float max;
  float sum;  // of e^(x - max)
};

// In every thread of the block. Each thread keeps a running maximum and rescales its sum.
template <typename T, int kWidth>
__device__ inline RowSoftmax SoftmaxOf(const T* row, int64_t vocabulary, float* shared) {
  float max = -INFINITY;
  float sum = 0.0f;
  for (int64_t j = int64_t{threadIdx.x} * kWidth; j < vocabulary; j += blockDim.x * kWidth) {
    float x[kWidth];
    Load<T, kWidth>(row + j, x);
    float largest = x[0];
#pragma unroll
    for (int i = 1; i < kWidth; ++i) {
      largest = fmaxf(largest, x[i]);
    }
    if (largest > max) {
      sum *= expf(max - largest);
      max = largest;
    }
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      sum += x[i] == max ? 1.0f : expf(x[i] - max);
    }
  }
  const float all = MaxOfBlock(max, shared);
  const float share = max == -INFINITY ? 0.0f : sum * expf(max - all);
  return {all, SumOfBlock(share, shared)};
}

}  // namespace ravel::kernels::cuda
