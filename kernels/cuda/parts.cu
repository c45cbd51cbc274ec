// Ends of computations in parts: sums of partial products with residual and bias, rounded once, and
// the loss over blocks of a vocabulary, whose numbers meet per token. Memory-bound: each operand is
// read once, but logits twice.

#include "kernels/cuda/float_variants.cuh"
#include "kernels/cuda/row_softmax.cuh"

namespace ravel::kernels::cuda {
namespace {

// fp32 in accesses of at most 16 bytes.
template <int kWidth>
__device__ inline void LoadFloats(const float* from, float (&to)[kWidth]) {
  constexpr int kAccess = kWidth < 4 ? kWidth : 4;
#pragma unroll
  for (int first = 0; first < kWidth; first += kAccess) {
    float some[kAccess];
    Load<float, kAccess>(from + first, some);
#pragma unroll
    for (int i = 0; i < kAccess; ++i) {
      to[first + i] = some[i];
    }
  }
}

// The sum of 2^kLog pieces from `first` on as a tree of adjacent pairs.
template <int kLog, int kWidth>
__device__ inline void TreeOf(const SumPartsParams& p,
                              int first,
                              int64_t at,
                              float (&sum)[kWidth]) {
  if constexpr (kLog == 0) {
    LoadFloats<kWidth>(p.pieces[first] + at, sum);
  } else {
    float right[kWidth];
    TreeOf<kLog - 1, kWidth>(p, first, at, sum);
    TreeOf<kLog - 1, kWidth>(p, first + (1 << (kLog - 1)), at, right);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      sum[i] += right[i];
    }
  }
}

template <typename T, int kWidth>
__device__ inline void AddTo(const void* base, int64_t at, float (&sum)[kWidth]) {
  float x[kWidth];
  Load<T, kWidth>(static_cast<const T*>(base) + at, x);
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    sum[i] = x[i] + sum[i];
  }
}

template <typename T, int kWidth, int kLog>
__device__ inline void SumPartsOf(const SumPartsParams& p) {
  const int64_t step = int64_t{gridDim.x} * blockDim.x * kWidth;
  const int64_t first = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) * kWidth;
  for (int64_t row = blockIdx.y; row < p.rows; row += gridDim.y) {
#pragma unroll 1  // else the pieces' addresses do not fit into the registers
    for (int64_t column = first; column < p.columns; column += step) {
      float sum[kWidth];
      TreeOf<kLog, kWidth>(p, 0, row * p.piece_stride + column, sum);
      if (p.residual != nullptr && p.bias != nullptr) {
        float base[kWidth];
        Load<T, kWidth>(static_cast<const T*>(p.bias) + column, base);
        AddTo<T, kWidth>(p.residual, row * p.residual_stride + column, base);
#pragma unroll
        for (int i = 0; i < kWidth; ++i) {
          sum[i] = base[i] + sum[i];
        }
      } else if (p.residual != nullptr) {
        AddTo<T, kWidth>(p.residual, row * p.residual_stride + column, sum);
      } else if (p.bias != nullptr) {
        AddTo<T, kWidth>(p.bias, column, sum);
      }
      Store<T, kWidth>(static_cast<T*>(p.out) + row * p.out_stride + column, sum);
    }
  }
}

template <typename T, int kWidth>
__global__ void __launch_bounds__(kFlatThreads)
    SumPartsKernel(const __grid_constant__ SumPartsParams p) {
  switch (p.pieces_log) {
    case 0:
      return SumPartsOf<T, kWidth, 0>(p);
    case 1:
      return SumPartsOf<T, kWidth, 1>(p);
    case 2:
      return SumPartsOf<T, kWidth, 2>(p);
    case 3:
      return SumPartsOf<T, kWidth, 3>(p);
    default:
      return SumPartsOf<T, kWidth, 4>(p);
  }
}

// One block per token. Logits stay as they are: the gradient makes the exponentials again.
template <typename T, int kWidth>
__global__ void __launch_bounds__(1024)
    VocabularyStatisticsKernel(const __grid_constant__ VocabularyBlockParams p) {
  __shared__ float shared[32];
  for (int64_t token = blockIdx.x; token < p.tokens; token += gridDim.x) {
    const T* row = static_cast<const T*>(p.logits) + token * p.logits_stride;
    const int32_t target = p.targets[token];
    RowSoftmax softmax = {-INFINITY, 0.0f};
    if (target >= 0 && p.columns > 0) {  // the same for the whole block
      softmax = SoftmaxOf<T, kWidth>(row, p.columns, shared);
    }
    if (threadIdx.x == 0) {
      const int64_t hit = int64_t{target} - p.first_id;
      const bool here = target >= 0 && hit >= 0 && hit < p.columns;
      p.statistics[token] = softmax.max;
      p.statistics[p.statistics_stride + token] = softmax.sum;
      p.statistics[2 * p.statistics_stride + token] = here ? ToFloat(row[hit]) : -0.0f;
    }
  }
}

__device__ inline float ShareOf(float block_max, float max) {
  const float shifted = block_max - max;
  return shifted < kSoftmaxFloor ? 0.0f : expf(shifted);
}

// The sums of 2^kLog blocks from `first` on, as trees: of exponentials beside M, of targets'
// logits.
template <int kLog>
__device__ inline void SumsOfBlocks(const VocabularyLossParams& p,
                                    int64_t first,
                                    int64_t token,
                                    float max,
                                    float& sum,
                                    float& target) {
  if constexpr (kLog == 0) {
    const float* at = p.statistics + 3 * first * p.statistics_stride + token;
    sum = at[p.statistics_stride] * ShareOf(at[0], max);
    target = at[2 * p.statistics_stride];
  } else {
    float right_sum;
    float right_target;
    SumsOfBlocks<kLog - 1>(p, first, token, max, sum, target);
    SumsOfBlocks<kLog - 1>(p, first + (1 << (kLog - 1)), token, max, right_sum, right_target);
    sum += right_sum;
    target += right_target;
  }
}

__global__ void __launch_bounds__(kFlatThreads)
    VocabularyLossKernel(const __grid_constant__ VocabularyLossParams p) {
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  const int64_t blocks = int64_t{1} << p.blocks_log;
  for (int64_t token = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; token < p.tokens;
       token += step) {
    if (p.targets[token] >= p.vocabulary) {
      __trap();
    }
    if (p.targets[token] < 0) {
      p.loss[token] = 0.0f;
      continue;
    }
    float max = -INFINITY;
    for (int64_t block = 0; block < blocks; ++block) {
      max = fmaxf(max, p.statistics[3 * block * p.statistics_stride + token]);
    }
    float sum = 0.0f;
    float target = 0.0f;
    switch (p.blocks_log) {
      case 0:
        SumsOfBlocks<0>(p, 0, token, max, sum, target);
        break;
      case 1:
        SumsOfBlocks<1>(p, 0, token, max, sum, target);
        break;
      case 2:
        SumsOfBlocks<2>(p, 0, token, max, sum, target);
        break;
      case 3:
        SumsOfBlocks<3>(p, 0, token, max, sum, target);
        break;
      default:
        SumsOfBlocks<4>(p, 0, token, max, sum, target);
    }
    p.loss[token] =
        static_cast<float>(static_cast<double>(max) + log(static_cast<double>(sum))) - target;
    const float scale = 1.0f / sum;
    for (int64_t block = 0; block < blocks; ++block) {
      float* at = p.statistics + 3 * block * p.statistics_stride + token;
      at[p.statistics_stride] = ShareOf(at[0], max) * scale;
    }
  }
}

template <typename T, int kWidth>
__global__ void __launch_bounds__(1024)
    VocabularyGradientKernel(const __grid_constant__ VocabularyBlockParams p) {
  const float widen = LossScaleOf(p);
  for (int64_t token = blockIdx.x; token < p.tokens; token += gridDim.x) {
    T* row = static_cast<T*>(p.logits) + token * p.logits_stride;
    const int32_t target = p.targets[token];
    const int64_t hit = int64_t{target} - p.first_id;
    const float max = p.statistics[token];
    const float factor = p.statistics[p.statistics_stride + token];
    for (int64_t j = int64_t{threadIdx.x} * kWidth; j < p.columns; j += blockDim.x * kWidth) {
      float x[kWidth];
      Load<T, kWidth>(row + j, x);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        const float shifted = x[i] - max;
        x[i] = target < 0 || shifted < kSoftmaxFloor ? 0.0f : expf(shifted) * factor;
        x[i] = (x[i] - (target >= 0 && j + i == hit ? 1.0f : 0.0f)) * widen;
      }
      Store<T, kWidth>(row + j, x);
    }
  }
}

template <typename T>
void AddParts(std::vector<KernelEntry>& entries) {
  AddPair<T>(Kernel::kSumParts, SumPartsKernel<T, 1>, SumPartsKernel<T, kVectorOf<T>>, entries);
  AddPair<T>(Kernel::kVocabularyStatistics,
             VocabularyStatisticsKernel<T, 1>,
             VocabularyStatisticsKernel<T, kVectorOf<T>>,
             entries);
  AddPair<T>(Kernel::kVocabularyGradient,
             VocabularyGradientKernel<T, 1>,
             VocabularyGradientKernel<T, kVectorOf<T>>,
             entries);
}

}  // namespace

std::vector<KernelEntry> PartKernels() {
  std::vector<KernelEntry> entries = {
      EntryOf(Kernel::kVocabularyLoss, kF32Scalar, VocabularyLossKernel)};
  ForEachFloat([&](auto type) { AddParts<decltype(type)>(entries); });
  return entries;
}

}  // namespace ravel::kernels::cuda
