// Cross-entropy of rows of logits, one block per token: the largest logit and the sum of
// exponentials in one pass, then (for the gradient) softmax - one-hot in place. Logits come from
// the gemm before and mostly still lie in the second-level cache. Memory-bound. The loss scale of
// fp16, a power of two, rounds nothing.

#include "kernels/cuda/float_variants.cuh"
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
      const float widen = LossScaleOf(p);
      for (int64_t j = int64_t{threadIdx.x} * kWidth; j < p.vocabulary; j += blockDim.x * kWidth) {
        float x[kWidth];
        Load<T, kWidth>(row + j, x);
#pragma unroll
        for (int i = 0; i < kWidth; ++i) {
          const float shifted = x[i] - softmax.max;
          x[i] = target < 0 || shifted < kSoftmaxFloor ? 0.0f : expf(shifted) * scale;
          x[i] = (x[i] - (j + i == target ? 1.0f : 0.0f)) * widen;
        }
        Store<T, kWidth>(row + j, x);
      }
    }
  }
}

template <typename T>
void AddLoss(std::vector<KernelEntry>& entries) {
  AddPair<T>(Kernel::kCrossEntropyLoss,
             CrossEntropyKernel<T, 1, false>,
             CrossEntropyKernel<T, kVectorOf<T>, false>,
             entries);
  AddPair<T>(Kernel::kCrossEntropyGradient,
             CrossEntropyKernel<T, 1, true>,
             CrossEntropyKernel<T, kVectorOf<T>, true>,
             entries);
}

}  // namespace

std::vector<KernelEntry> LossKernels() {
  std::vector<KernelEntry> entries;
  ForEachFloat([&](auto type) { AddLoss<decltype(type)>(entries); });
  return entries;
}

}  // namespace ravel::kernels::cuda
