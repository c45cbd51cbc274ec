// Cross-entropy of rows of logits, one block per token: the largest logit and the sum of
// exponentials in one pass, then (for the gradient) softmax - one-hot in place. Logits come from
// the gemm before and mostly still lie in the second-level cache. Memory-bound.

#include "kernels/cuda/device_math.cuh"
#include "kernels/cuda/kernel_table.h"
#include "kernels/cuda/row_softmax.cuh"

namespace ravel::kernels::cuda {
namespace {

template <typename T, int kWidth, bool kGradient>
__global__ void __launch_bounds__(1024)
    CrossEntropyKernel(const __grid_constant__ CrossEntropyParams p) {
  __shared__ float shared[32];
  for (int64_t token = blockIdx.x; token < p.tokens; token += gridDim.x) {
    T* row = static_cast<T*>(p.logits) + token * p.logits_stride;
    const int32_t target = p.targets[token];
    if (target >= p.vocabulary) {
      __trap();
    }
    RowSoftmax softmax = {0.0f, 1.0f};
    float target_logit = 0.0f;
    if (target >= 0) {  // the same for the whole block
      softmax = SoftmaxOf<T, kWidth>(row, p.vocabulary, shared);
      target_logit = ToFloat(row[target]);
    }
    if (threadIdx.x == 0) {
      p.loss[token] = target < 0 ? 0.0f
                                 : static_cast<float>(static_cast<double>(softmax.max) +
                                                      log(static_cast<double>(softmax.sum))) -
                                       target_logit;
    }
    if constexpr (kGradient) {
      __syncthreads();  // everyone has read the target's logit
      const float scale = 1.0f / softmax.sum;
      for (int64_t j = int64_t{threadIdx.x} * kWidth; j < p.vocabulary; j += blockDim.x * kWidth) {
        float x[kWidth];
        Load<T, kWidth>(row + j, x);
#pragma unroll
        for (int i = 0; i < kWidth; ++i) {
          const float shifted = x[i] - softmax.max;
          x[i] = target < 0 || shifted < kSoftmaxFloor ? 0.0f : expf(shifted) * scale;
          x[i] -= j + i == target ? 1.0f : 0.0f;
        }
        Store<T, kWidth>(row + j, x);
      }
    }
  }
}

}  // namespace

std::vector<KernelEntry> LossKernels() {
  constexpr Kernel kLoss = Kernel::kCrossEntropyLoss;
  constexpr Kernel kGradient = Kernel::kCrossEntropyGradient;
  return {EntryOf(kLoss, kF32Scalar, CrossEntropyKernel<float, 1, false>),
          EntryOf(kLoss, kF32Vector, CrossEntropyKernel<float, kVectorOf<float>, false>),
          EntryOf(kLoss, kBf16Scalar, CrossEntropyKernel<Bf16, 1, false>),
          EntryOf(kLoss, kBf16Vector, CrossEntropyKernel<Bf16, kVectorOf<Bf16>, false>),
          EntryOf(kGradient, kF32Scalar, CrossEntropyKernel<float, 1, true>),
          EntryOf(kGradient, kF32Vector, CrossEntropyKernel<float, kVectorOf<float>, true>),
          EntryOf(kGradient, kBf16Scalar, CrossEntropyKernel<Bf16, 1, true>),
          EntryOf(kGradient, kBf16Vector, CrossEntropyKernel<Bf16, kVectorOf<Bf16>, true>)};
}

}  // namespace ravel::kernels::cuda
