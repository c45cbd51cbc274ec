// Matrix product without tensor cores: what runs where cuBLASLt is not installed or sums are
// scaled, and what it is compared with. 64 x 64 tiles, 4 x 4 results per thread, fp32 sums over k
// in order. Bound by fp32 arithmetic, at some ten percent of what tensor cores give for bf16 and
// fp16. Beside it, the factors of a gemm whose operands have a scale beside those of their blocks.

#include "kernels/cuda/device_math.cuh"
#include "kernels/cuda/kernel_table.h"

namespace ravel::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kPerThread = 4;
constexpr int kThreadsPerRow = kGemmTile / kPerThread;

struct Tiles {
  float a[kGemmDepth][kGemmTile + 1];
  float b[kGemmDepth][kGemmTile + 1];
};

// Elements beyond the matrices are zeros.
template <typename T>
__device__ inline void LoadTiles(
    const GemmParams& p, int64_t row, int64_t column, int64_t depth, Tiles& tiles) {
  const T* a = static_cast<const T*>(p.a);
  const T* b = static_cast<const T*>(p.b);
#pragma unroll
  for (int i = static_cast<int>(threadIdx.x); i < kGemmTile * kGemmDepth; i += kThreads) {
    // Neighbouring threads take neighbouring elements of memory.
    const int a_row = p.a_column == 1 ? i / kGemmDepth : i % kGemmTile;
    const int a_depth = p.a_column == 1 ? i % kGemmDepth : i / kGemmTile;
    const bool a_inside = row + a_row < p.m && depth + a_depth < p.k;
    tiles.a[a_depth][a_row] =
        a_inside ? ToFloat(a[(row + a_row) * p.a_row + (depth + a_depth) * p.a_column]) : 0.0f;
    const int b_column = p.b_column == 1 ? i % kGemmTile : i / kGemmDepth;
    const int b_depth = p.b_column == 1 ? i / kGemmTile : i % kGemmDepth;
    const bool b_inside = column + b_column < p.n && depth + b_depth < p.k;
    tiles.b[b_depth][b_column] =
        b_inside ? ToFloat(b[(depth + b_depth) * p.b_row + (column + b_column) * p.b_column])
                 : 0.0f;
  }
}

// Times the product of the scales, where one is present.
__device__ inline void ScaleSums(const GemmParams& p, float (&sums)[kPerThread][kPerThread]) {
  if (p.scale_a == nullptr && p.scale_b == nullptr) {
    return;
  }
  const float scale =
      (p.scale_a != nullptr ? *p.scale_a : 1.0f) * (p.scale_b != nullptr ? *p.scale_b : 1.0f);
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
#pragma unroll
    for (int j = 0; j < kPerThread; ++j) {
      sums[i][j] *= scale;
    }
  }
}

template <typename T, typename C>
__global__ void __launch_bounds__(kThreads) GemmKernel(const __grid_constant__ GemmParams p) {
  __shared__ Tiles tiles;
  const int64_t row = int64_t{blockIdx.y} * kGemmTile;
  const int64_t column = int64_t{blockIdx.x} * kGemmTile;
  const int thread_row = static_cast<int>(threadIdx.x) / kThreadsPerRow * kPerThread;
  const int thread_column = static_cast<int>(threadIdx.x) % kThreadsPerRow * kPerThread;
  float sums[kPerThread][kPerThread] = {};
  for (int64_t depth = 0; depth < p.k; depth += kGemmDepth) {
    LoadTiles<T>(p, row, column, depth, tiles);
    __syncthreads();
#pragma unroll
    for (int d = 0; d < kGemmDepth; ++d) {
#pragma unroll
      for (int i = 0; i < kPerThread; ++i) {
#pragma unroll
        for (int j = 0; j < kPerThread; ++j) {
          sums[i][j] = fmaf(tiles.a[d][thread_row + i], tiles.b[d][thread_column + j], sums[i][j]);
        }
      }
    }
    __syncthreads();
  }
  ScaleSums(p, sums);
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
#pragma unroll
    for (int j = 0; j < kPerThread; ++j) {
      const int64_t r = row + thread_row + i;
      const int64_t c = column + thread_column + j;
      if (r < p.m && c < p.n) {
        C* to = static_cast<C*>(p.c) + r * p.c_stride + c;
        *to = FromFloat<C>(p.accumulate != 0 ? ToFloat(*to) + sums[i][j] : sums[i][j]);
      }
    }
  }
}

__global__ void GemmFactorsKernel(const __grid_constant__ GemmFactorsParams p) {
  if (threadIdx.x == 0) {
    p.to[0] = *p.a * *p.b;
    p.to[1] = p.beta;
  }
}

}  // namespace

std::vector<KernelEntry> GemmKernels() {
  return {EntryOf(Kernel::kGemmFactors, 0, GemmFactorsKernel),
          EntryOf(Kernel::kGemm, kF32Scalar, GemmKernel<float, float>),
          EntryOf(Kernel::kGemm, kBf16Scalar, GemmKernel<Bf16, Bf16>),
          EntryOf(Kernel::kGemm, kMixedScalar, GemmKernel<Bf16, float>),
          EntryOf(Kernel::kGemm, kFp16Scalar, GemmKernel<Fp16, Fp16>),
          EntryOf(Kernel::kGemm, kFp16MixedScalar, GemmKernel<Fp16, float>)};
}

}  // namespace ravel::kernels::cuda
