// Casts, transposition, zeros: one read and one write of every byte, memory-bound. The
// transposition turns 32 x 32 tiles in shared memory, so that both sides are read and written along
// rows.

#include "kernels/cuda/float_variants.cuh"
#include "kernels/scalar/bfloat16.h"

namespace ravel::kernels::cuda {
namespace {

template <typename From, typename To, int kWidth>
__global__ void __launch_bounds__(kFlatThreads) CastKernel(const __grid_constant__ CastParams p) {
  const From* from = static_cast<const From*>(p.from);
  To* to = static_cast<To*>(p.to);
  const int64_t step = int64_t{gridDim.x} * blockDim.x * kWidth;
  for (int64_t i = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) * kWidth; i < p.elements;
       i += step) {
    float x[kWidth];
    Load<From, kWidth>(from + i, x);
    if (p.half_away != 0) {
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        x[j] = scalar::Bf16Value(scalar::Bf16HalfAway(x[j]));
      }
    }
    Store<To, kWidth>(to + i, x);
  }
}

template <typename Word>
__global__ void __launch_bounds__(kTransposeTile* kTransposeRows)
    TransposeKernel(const __grid_constant__ TransposeParams p) {
  __shared__ Word tile[kTransposeTile][kTransposeTile + 1];
  const Word* from = static_cast<const Word*>(p.from);
  Word* to = static_cast<Word*>(p.to);
  const int x = static_cast<int>(threadIdx.x) % kTransposeTile;
  const int y = static_cast<int>(threadIdx.x) / kTransposeTile;
  const int64_t column = int64_t{blockIdx.x} * kTransposeTile;
  for (int64_t row = int64_t{blockIdx.y} * kTransposeTile; row < p.rows;
       row += int64_t{gridDim.y} * kTransposeTile) {
#pragma unroll
    for (int i = y; i < kTransposeTile; i += kTransposeRows) {
      if (row + i < p.rows && column + x < p.columns) {
        tile[i][x] = from[(row + i) * p.from_stride + column + x];
      }
    }
    __syncthreads();
#pragma unroll
    for (int i = y; i < kTransposeTile; i += kTransposeRows) {
      if (column + i < p.columns && row + x < p.rows) {
        to[(column + i) * p.to_stride + row + x] = tile[x][i];
      }
    }
    __syncthreads();
  }
}

template <typename Word>
__global__ void __launch_bounds__(kFlatThreads) FillKernel(const __grid_constant__ FillParams p) {
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t row = blockIdx.y; row < p.rows; row += gridDim.y) {
    for (int64_t j = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; j < p.columns; j += step) {
      static_cast<Word*>(p.to)[row * p.stride + j] = Word{0};
    }
  }
}

// fp32 to T, and back.
template <typename T>
void AddCasts(std::vector<KernelEntry>& entries) {
  constexpr int kWidth = kVectorOf<float>;
  AddPair<T>(Kernel::kCast, CastKernel<float, T, 1>, CastKernel<float, T, kWidth>, entries);
  AddWidePair<T>(Kernel::kCast, CastKernel<T, float, 1>, CastKernel<T, float, kWidth>, entries);
}

}  // namespace

std::vector<KernelEntry> CastKernels() {
  std::vector<KernelEntry> entries = {
      EntryOf(Kernel::kTranspose, kF32Scalar, TransposeKernel<uint32_t>),
      EntryOf(Kernel::kTranspose, kBf16Scalar, TransposeKernel<uint16_t>),
      EntryOf(Kernel::kFill, kF32Scalar, FillKernel<uint32_t>),
      EntryOf(Kernel::kFill, kBf16Scalar, FillKernel<uint16_t>)};
  AddCasts<Bf16>(entries);
  AddCasts<Fp16>(entries);
  return entries;
}

}  // namespace ravel::kernels::cuda
