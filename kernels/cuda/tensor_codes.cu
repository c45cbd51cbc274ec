// Codes as gemms of codes read them, of a tensor that has one scale: an activation is cast and
// written as it lies, transposed, or both; codes of a weight are transposed. A block takes tiles of
// 64 x 64; a thread reads and writes four elements at a time, and what is transposed goes through
// shared memory. 2 bytes are read of an element and 1 is written for each result; bound by memory.

#include "kernels/cuda/code_schemes.cuh"
#include "kernels/cuda/kernel_table.h"

namespace ravel::kernels::cuda {
namespace {

constexpr int kTile = kCodesTile;
constexpr int kQuad = 4;
constexpr int kQuadsOfRow = kTile / kQuad;
// A row of shared memory is a word longer than the tile's, against bank conflicts.
constexpr int kSharedRow = kTile + kQuad;

struct Tile {
  uint8_t codes[kTile][kSharedRow];
};

// Writes quads of the tile's columns, as rows of the transposed codes, for rows [row, row + 64) and
// columns [column, column + 64) of a matrix of so many rows and columns.
__device__ inline void StoreTransposed(const Tile& tile,
                                       const TransposedCodes& to,
                                       int64_t row,
                                       int64_t column) {
  for (int i = static_cast<int>(threadIdx.x); i < kTile * kQuadsOfRow; i += kFlatThreads) {
    const int quad = i % kQuadsOfRow * kQuad;
    const int of = i / kQuadsOfRow;
    if (row + quad < to.rows && column + of < to.columns) {
      uint32_t word = 0;
#pragma unroll
      for (int j = 0; j < kQuad; ++j) {
        word |= uint32_t{tile.codes[quad + j][of]} << (8 * j);
      }
      *reinterpret_cast<uint32_t*>(to.codes + (column + of) * to.stride + row + quad) = word;
    }
  }
}

// The tensor's scales, in every thread. One thread of the grid writes what is known of the tensor.
template <typename S>
__device__ inline float EncodeOf(const TensorCodesParams& p) {
  const uint32_t amax = *p.amax;
  const float given = p.encode != nullptr ? *p.encode : 0.0f;
  const scalar::Scales scales = given != 0.0f
                                    ? scalar::Scales{given, 1.0f / given}
                                    : scalar::TensorScales(S::kRecipe, amax, S::Codes::kLargest);
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    *p.scale = scales.decode;
    if (p.staged != nullptr) {
      *p.staged = MaxOf(*p.staged, amax);
    }
    if (p.non_finite != nullptr && amax >= scalar::kInfinityBits) {
      atomicOr(p.non_finite, 1u);
    }
  }
  return scales.encode;
}

template <typename S>
__global__ void __launch_bounds__(kFlatThreads)
    TensorCodesKernel(const __grid_constant__ TensorCodesParams p) {
  __shared__ Tile tile;
  const float encode = EncodeOf<S>(p);
  const int64_t across = (p.to.columns + kTile - 1) / kTile;
  const int64_t tiles = (p.to.rows + kTile - 1) / kTile * across;
  for (int64_t t = blockIdx.x; t < tiles; t += gridDim.x) {
    const int64_t row = t / across * kTile;
    const int64_t column = t % across * kTile;
    for (int i = static_cast<int>(threadIdx.x); i < kTile * kQuadsOfRow; i += kFlatThreads) {
      const int r = i / kQuadsOfRow;
      const int c = i % kQuadsOfRow * kQuad;
      if (row + r < p.to.rows && column + c < p.to.columns) {
        float x[kQuad];
        Load<Bf16, kQuad>(static_cast<const Bf16*>(p.from) + (row + r) * p.from_stride + column + c,
                          x);
        uint32_t word = 0;
#pragma unroll
        for (int j = 0; j < kQuad; ++j) {
          word |= S::Codes::Code(x[j] * encode, 0) << (8 * j);
        }
        if (p.codes != nullptr) {
          *reinterpret_cast<uint32_t*>(p.codes + (row + r) * p.codes_stride + column + c) = word;
        }
        *reinterpret_cast<uint32_t*>(&tile.codes[r][c]) = word;
      }
    }
    if (p.to.codes != nullptr) {
      __syncthreads();
      StoreTransposed(tile, p.to, row, column);
      __syncthreads();
    }
  }
}

__global__ void __launch_bounds__(kFlatThreads)
    TransposeCodesKernel(const __grid_constant__ TransposeCodesParams p) {
  __shared__ Tile tile;
  const int64_t across = (p.to.columns + kTile - 1) / kTile;
  const int64_t tiles = (p.to.rows + kTile - 1) / kTile * across;
  for (int64_t t = blockIdx.x; t < tiles; t += gridDim.x) {
    const int64_t row = t / across * kTile;
    const int64_t column = t % across * kTile;
    for (int i = static_cast<int>(threadIdx.x); i < kTile * kQuadsOfRow; i += kFlatThreads) {
      const int r = i / kQuadsOfRow;
      const int c = i % kQuadsOfRow * kQuad;
      if (row + r < p.to.rows && column + c < p.to.columns) {
        *reinterpret_cast<uint32_t*>(&tile.codes[r][c]) =
            *reinterpret_cast<const uint32_t*>(p.from + (row + r) * p.to.columns + column + c);
      }
    }
    __syncthreads();
    StoreTransposed(tile, p.to, row, column);
    __syncthreads();
  }
}

}  // namespace

std::vector<KernelEntry> TensorCodesKernels() {
  return {EntryOf(Kernel::kTensorCodes, kTensorE4M3, TensorCodesKernel<TensorE4M3Scheme>),
          EntryOf(Kernel::kTensorCodes, kTensorE5M2, TensorCodesKernel<TensorE5M2Scheme>),
          EntryOf(Kernel::kTransposeCodes, kOneToAByte, TransposeCodesKernel)};
}

}  // namespace ravel::kernels::cuda
