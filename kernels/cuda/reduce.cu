// Sums in a fixed order over flat fp32 or bf16, sums of squares, digest. Each reads its
// operands once; memory-bound. The tree over the pieces is unrolled at compile time.

#include "kernels/cuda/device_math.cuh"
#include "kernels/cuda/kernel_table.h"
#include "kernels/scalar/digest.h"

namespace ravel::kernels::cuda {
namespace {

__device__ inline int64_t ThreadIndex() {
  return int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
}

__device__ inline int64_t ThreadCount() {
  return int64_t{gridDim.x} * blockDim.x;
}

__device__ inline bool IsNonFinite(float x) {
  return (__float_as_uint(x) & 0x7F800000u) == 0x7F800000u;
}

template <int kWidth>
struct Values {
  float x[kWidth];
};

// Pieces [kFirst, kFirst + kCount) at elements [i, i + kWidth).
template <typename T, int kFirst, int kCount, int kWidth>
__device__ inline Values<kWidth> TreeOf(const ReduceAddParams& p, int64_t i) {
  if constexpr (kCount == 1) {
    Values<kWidth> leaf;
    Load<T, kWidth>(static_cast<const T*>(p.pieces[kFirst]) + i, leaf.x);
    return leaf;
  } else {
    Values<kWidth> sum = TreeOf<T, kFirst, kCount / 2, kWidth>(p, i);
    const Values<kWidth> right = TreeOf<T, kFirst + kCount / 2, kCount / 2, kWidth>(p, i);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      sum.x[j] += right.x[j];
    }
    return sum;
  }
}

struct Statistics {
  double squares = 0.0;
  int non_finite = 0;
};

template <typename T, int kCount, bool kStatistics, int kWidth>
__device__ inline void ReduceVectors(const ReduceAddParams& p,
                                     int64_t begin,
                                     int64_t end,
                                     Statistics& statistics) {
  for (int64_t i = begin + ThreadIndex() * kWidth; i < end; i += ThreadCount() * kWidth) {
    Values<kWidth> sum = TreeOf<T, 0, kCount, kWidth>(p, i);
    if (p.accumulate != 0) {
      Values<kWidth> old;
      Load<float, kWidth>(p.out + i, old.x);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        sum.x[j] = old.x[j] + sum.x[j];
      }
    }
    Store<float, kWidth>(p.out + i, sum.x);
    if constexpr (kStatistics) {
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        const double value = static_cast<double>(sum.x[j]);
        statistics.squares += value * value;
        statistics.non_finite += IsNonFinite(sum.x[j]) ? 1 : 0;
      }
    }
  }
}

__device__ inline double SumOfBlock(double x, double* shared) {
  shared[threadIdx.x] = x;
  for (unsigned width = blockDim.x / 2; width > 0; width /= 2) {
    __syncthreads();
    if (threadIdx.x < width) {
      shared[threadIdx.x] += shared[threadIdx.x + width];
    }
  }
  __syncthreads();
  return shared[0];
}

template <typename T, int kCount, bool kStatistics>
__global__ void __launch_bounds__(kFlatThreads, 1)
    ReduceKernel(const __grid_constant__ ReduceAddParams p) {
  Statistics statistics;
  const int64_t whole = p.aligned != 0 ? p.elements / 4 * 4 : 0;
  ReduceVectors<T, kCount, kStatistics, 4>(p, 0, whole, statistics);
  ReduceVectors<T, kCount, kStatistics, 1>(p, whole, p.elements, statistics);
  if constexpr (kStatistics) {
    __shared__ double shared[kFlatThreads];
    if (p.partials != nullptr) {
      const double sum = SumOfBlock(statistics.squares, shared);
      if (threadIdx.x == 0) {
        p.partials[blockIdx.x] = sum;
      }
    }
    if (p.non_finite != nullptr && statistics.non_finite != 0) {
      atomicAdd(reinterpret_cast<unsigned long long*>(p.non_finite),  // exact in any order
                static_cast<unsigned long long>(statistics.non_finite));
    }
  }
}

__global__ void __launch_bounds__(kFlatThreads)
    SumDoublesKernel(const __grid_constant__ SumDoublesParams p) {
  __shared__ double shared[kFlatThreads];
  double sum = 0.0;
  for (int64_t i = threadIdx.x; i < p.count; i += blockDim.x) {
    sum += p.values[i];
  }
  sum = SumOfBlock(sum, shared);
  if (threadIdx.x == 0) {
    *p.out = sum;
  }
}

template <int kWidth>
__global__ void __launch_bounds__(kFlatThreads)
    TreeAddKernel(const __grid_constant__ TreeAddParams p) {
  for (int64_t i = ThreadIndex() * kWidth; i < p.elements; i += ThreadCount() * kWidth) {
    float a[kWidth];
    float b[kWidth];
    Load<float, kWidth>(p.a + i, a);
    Load<float, kWidth>(p.b + i, b);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      a[j] += b[j];
    }
    Store<float, kWidth>(p.out + i, a);
  }
}

// One warp per row. Lane l holds strands 4l to 4l + 3, so the tree of adjacent pairs is two levels
// within the lane and five across lanes.
template <int kWidth>
__global__ void __launch_bounds__(kFlatThreads)
    RowSumSquaresKernel(const __grid_constant__ RowSumSquaresParams p) {
  constexpr int kStrands = 128;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t step = ThreadCount() / 32;
  for (int64_t row = ThreadIndex() / 32; row < p.rows; row += step) {
    const float* x = p.x + row * p.stride;
    float strands[4] = {};
    int non_finite = 0;
    for (int64_t begin = 4 * lane; begin < p.columns; begin += kStrands) {
#pragma unroll
      for (int j = 0; j < 4; j += kWidth) {
        float value[kWidth] = {};
        if (begin + j < p.columns) {
          Load<float, kWidth>(x + begin + j, value);
        }
#pragma unroll
        for (int k = 0; k < kWidth; ++k) {
          strands[j + k] = fmaf(value[k], value[k], strands[j + k]);
          non_finite += IsNonFinite(value[k]) ? 1 : 0;
        }
      }
    }
    float sum = (strands[0] + strands[1]) + (strands[2] + strands[3]);
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      sum += __shfl_xor_sync(0xFFFFFFFFu, sum, distance);
    }
    if (lane == 0) {
      p.sums[row] = sum;
    }
    if (p.non_finite != nullptr && non_finite != 0) {
      atomicAdd(reinterpret_cast<unsigned long long*>(p.non_finite),
                static_cast<unsigned long long>(non_finite));
    }
  }
}

template <typename Word>
__global__ void __launch_bounds__(kFlatThreads)
    DigestKernel(const __grid_constant__ DigestParams p) {
  uint64_t sum = 0;
  for (int64_t i = ThreadIndex(); i < p.elements; i += ThreadCount()) {
    sum += scalar::DigestElement(p.first_index + static_cast<uint64_t>(i),
                                 static_cast<const Word*>(p.data)[i]);
  }
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    sum += __shfl_xor_sync(0xFFFFFFFFu, sum, distance);
  }
  if (threadIdx.x % 32 == 0) {
    atomicAdd(reinterpret_cast<unsigned long long*>(p.sum),  // modulo 2^64: exact in any order
              static_cast<unsigned long long>(sum));
  }
}

template <typename T, bool kStatistics>
void AddReductions(Kernel kernel, int32_t first, std::vector<KernelEntry>& entries) {
  entries.push_back(EntryOf(kernel, first, ReduceKernel<T, 1, kStatistics>));
  entries.push_back(EntryOf(kernel, first + 1, ReduceKernel<T, 2, kStatistics>));
  entries.push_back(EntryOf(kernel, first + 2, ReduceKernel<T, 4, kStatistics>));
  entries.push_back(EntryOf(kernel, first + 3, ReduceKernel<T, 8, kStatistics>));
  entries.push_back(EntryOf(kernel, first + 4, ReduceKernel<T, 16, kStatistics>));
  entries.push_back(EntryOf(kernel, first + 5, ReduceKernel<T, 32, kStatistics>));
  entries.push_back(EntryOf(kernel, first + 6, ReduceKernel<T, 64, kStatistics>));
}

}  // namespace

std::vector<KernelEntry> ReduceKernels() {
  std::vector<KernelEntry> entries = {
      EntryOf(Kernel::kTreeAdd, kF32Scalar, TreeAddKernel<1>),
      EntryOf(Kernel::kTreeAdd, kF32Vector, TreeAddKernel<4>),
      EntryOf(Kernel::kSumDoubles, 0, SumDoublesKernel),
      EntryOf(Kernel::kRowSumSquares, kF32Scalar, RowSumSquaresKernel<1>),
      EntryOf(Kernel::kRowSumSquares, kF32Vector, RowSumSquaresKernel<4>),
      // By the logarithm of the bytes of an element.
      EntryOf(Kernel::kDigest, 0, DigestKernel<uint8_t>),
      EntryOf(Kernel::kDigest, 1, DigestKernel<uint16_t>),
      EntryOf(Kernel::kDigest, 2, DigestKernel<uint32_t>),
      EntryOf(Kernel::kDigest, 3, DigestKernel<uint64_t>)};
  AddReductions<float, false>(Kernel::kTreeSum, 0, entries);
  AddReductions<float, true>(Kernel::kReduceAdd, 0, entries);
  AddReductions<Bf16, false>(Kernel::kTreeSum, kBf16Sums, entries);
  AddReductions<Bf16, true>(Kernel::kReduceAdd, kBf16Sums, entries);
  return entries;
}

}  // namespace ravel::kernels::cuda
