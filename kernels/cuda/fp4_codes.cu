// NVFP4 for gemms of codes: activations to E2M1 codes, two to a byte, with an E4M3 scale for each
// 16, and the transposition of packed codes. The amax of the tensor comes first (quantize.cu).
// Blocks along columns: a warp takes 256 elements of a row, two lanes a block. Blocks along rows: a
// block of threads takes 128 rows of 64 columns; a thread takes 16 rows of a column, which are at
// once a block and what the Hadamard transform mixes, so that the transform stays in registers.
// Codes go through shared memory, to be written transposed, and so do the random bits: a draw is of
// 16 columns of a row. 2 bytes read and 0.56 written of an element; bound by memory.

#include "common/gemm_scales.h"
#include "kernels/cuda/activation_cast.cuh"
#include "kernels/cuda/kernel_table.h"
#include "kernels/scalar/hadamard.h"

namespace ravel::kernels::cuda {
namespace {

constexpr int kWidth = kQuantizeWidth;
constexpr int kQuad = 4;
constexpr int kWarps = kFlatThreads / kWarpThreads;
constexpr int kEdge = NvFp4Scheme::kEdge;
constexpr int kCodesOfWord = 8;
constexpr ScaleForm kForm = ScaleForm::kBlocks16;
static_assert(kEdge == scalar::kHadamardSize);

// Writes the scale of a block of that amax, and returns what its elements are multiplied by.
__device__ inline float PlaceScale(const Fp4CodesParams& p,
                                   uint32_t amax,
                                   float tensor,
                                   int64_t index) {
  p.scales[index] = static_cast<uint8_t>(scalar::NvFp4BlockCode(amax, tensor));
  return scalar::NvFp4BlockScales(amax, tensor).encode;
}

template <typename S>
__global__ void __launch_bounds__(kFlatThreads)
    Fp4CodesAlongColumnsKernel(const __grid_constant__ Fp4CodesParams params) {
  const QuantizeActivationParams& p = params.cast;
  constexpr int kLanes = kEdge / kWidth;
  const float tensor = BeginTensor<S>(p);
  const int lane = static_cast<int>(threadIdx.x) % kWarpThreads;
  const int64_t strips = (p.columns + kQuantizeColumns - 1) / kQuantizeColumns;
  const int64_t blocks = p.columns / kEdge;
  for (int64_t i = int64_t{blockIdx.x} * kWarps + static_cast<int>(threadIdx.x) / kWarpThreads;
       i < p.rows * strips;
       i += int64_t{gridDim.x} * kWarps) {
    const int64_t row = i / strips;
    const int64_t column = i % strips * kQuantizeColumns + lane * kWidth;
    const bool inside = column < p.columns;
    float x[kWidth] = {};
    if (inside) {
      const Bf16* from = static_cast<const Bf16*>(p.from) + row * p.from_stride + column;
      LoadWidth(from, x);
    }
    const uint32_t amax = AmaxOfLanes<kLanes>(AmaxOf(x));
    if (!inside) {
      continue;
    }
    const float encode =
        lane % kLanes == 0
            ? PlaceScale(
                  params, amax, tensor, ScaleIndex(kForm, row, column / kEdge, p.rows, blocks))
            : scalar::NvFp4BlockScales(amax, tensor).encode;
    const HalfDraw draw = DrawHalf<S>(p, row, column);
    uint32_t word = 0;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      const uint32_t random8 = draw.words[j / 4] >> (8 * (j % 4)) & 0xFFu;
      word |= S::Codes::Code(x[j] * encode, random8) << (4 * j);
    }
    *reinterpret_cast<uint32_t*>(params.codes + (row * p.columns + column) / 2) = word;
  }
}

constexpr int kBlocksOfTile = kBlockRows / kEdge;
constexpr int kDrawsOfTileRow = kBlockColumns / 16;
constexpr int kWordsOfColumn = kBlockRows / kCodesOfWord;

// A column of codes is a word longer than the tile's, against bank conflicts.
struct Fp4Tile {
  uint32_t codes[kBlockColumns][kWordsOfColumn + 1];
};
struct Fp4Draws {
  uint32_t words[kBlockRows][kDrawsOfTileRow][4];
};

// A word stands in their place where codes are not drawn.
template <bool kDraws>
struct DrawsOf {
  using Type = uint32_t;
};
template <>
struct DrawsOf<true> {
  using Type = Fp4Draws;
};

// Columns are whole draws, and a tile begins with one.
__device__ inline void MakeDraws(const QuantizeActivationParams& p,
                                 int64_t row,
                                 int64_t column,
                                 Fp4Draws& draws) {
  for (int i = static_cast<int>(threadIdx.x); i < kBlockRows * kDrawsOfTileRow; i += kFlatThreads) {
    const int r = i / kDrawsOfTileRow;
    const int of = i % kDrawsOfTileRow;
    if (row + r < p.rows && column + of * 16 < p.columns) {
      const auto block = static_cast<uint64_t>(IndexOf(p, row + r, column) / 16 + of);
      const scalar::PhiloxWords words = DrawAt(p, row + r, block);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        draws.words[r][of][j] = words[static_cast<size_t>(j)];
      }
    }
  }
}

// The transform of 16 rows of a column, as bf16 has it.
__device__ inline void LoadTransformed(const QuantizeActivationParams& p,
                                       int64_t row,
                                       int64_t column,
                                       float (&x)[kEdge]) {
  const Bf16* from = static_cast<const Bf16*>(p.from) + row * p.from_stride + column;
#pragma unroll
  for (int j = 0; j < kEdge; ++j) {
    x[j] = ToFloat(from[j * p.from_stride]);
  }
  scalar::Hadamard16(x);
#pragma unroll
  for (int j = 0; j < kEdge; ++j) {
    x[j] = ToFloat(FromFloat<Bf16>(x[j]));
  }
}

// The tile's columns as rows of the transposed codes.
__device__ inline void StoreColumns(const Fp4Tile& tile,
                                    uint8_t* codes,
                                    int64_t rows,
                                    int64_t columns,
                                    int64_t row,
                                    int64_t column) {
  for (int i = static_cast<int>(threadIdx.x); i < kBlockColumns * kWordsOfColumn;
       i += kFlatThreads) {
    const int word = i % kWordsOfColumn;
    const int of = i / kWordsOfColumn;
    if (row + word * kCodesOfWord < rows && column + of < columns) {
      *reinterpret_cast<uint32_t*>(codes + ((column + of) * rows + row) / 2 + word * kQuad) =
          tile.codes[of][word];
    }
  }
}

template <typename S>
__global__ void __launch_bounds__(kFlatThreads)
    Fp4CodesAlongRowsKernel(const __grid_constant__ Fp4CodesParams params) {
  __shared__ Fp4Tile tile;
  __shared__ typename DrawsOf<S::Codes::kDraws>::Type draws;
  const QuantizeActivationParams& p = params.cast;
  const float tensor = BeginTensor<S>(p);
  const int64_t across = (p.columns + kBlockColumns - 1) / kBlockColumns;
  const int64_t tiles = (p.rows + kBlockRows - 1) / kBlockRows * across;
  const int64_t blocks = p.rows / kEdge;
  for (int64_t t = blockIdx.x; t < tiles; t += gridDim.x) {
    const int64_t row = t / across * kBlockRows;
    const int64_t column = t % across * kBlockColumns;
    if constexpr (S::Codes::kDraws) {
      MakeDraws(p, row, column, draws);
      __syncthreads();
    }
    for (int i = static_cast<int>(threadIdx.x); i < kBlocksOfTile * kBlockColumns;
         i += kFlatThreads) {
      const int of = i % kBlockColumns;
      const int first = i / kBlockColumns * kEdge;
      if (row + first >= p.rows || column + of >= p.columns) {
        continue;
      }
      float x[kEdge];
      LoadTransformed(p, row + first, column + of, x);
      uint32_t amax = 0;
#pragma unroll
      for (int j = 0; j < kEdge; ++j) {
        amax = MaxOf(amax, scalar::MagnitudeBits(x[j]));
      }
      const float encode =
          PlaceScale(params,
                     amax,
                     tensor,
                     ScaleIndex(kForm, column + of, (row + first) / kEdge, p.columns, blocks));
      uint32_t words[2] = {0, 0};
#pragma unroll
      for (int j = 0; j < kEdge; ++j) {
        uint32_t random8 = 0;
        if constexpr (S::Codes::kDraws) {
          random8 = draws.words[first + j][of / 16][of % 16 / 4] >> (8 * (of % 4)) & 0xFFu;
        }
        words[j / kCodesOfWord] |= S::Codes::Code(x[j] * encode, random8)
                                   << (4 * (j % kCodesOfWord));
      }
      tile.codes[of][first / kCodesOfWord] = words[0];
      tile.codes[of][first / kCodesOfWord + 1] = words[1];
    }
    __syncthreads();
    StoreColumns(tile, params.codes, p.rows, p.columns, row, column);
    __syncthreads();
  }
}

constexpr int kTile = kCodesTile;
constexpr int kWordsOfTile = kTile / kCodesOfWord;

// A word of packed codes is 8 columns of a row, and becomes 8 rows of a column.
__global__ void __launch_bounds__(kFlatThreads)
    TransposeFp4CodesKernel(const __grid_constant__ TransposeCodesParams p) {
  __shared__ uint32_t tile[kTile][kWordsOfTile + 1];
  const TransposedCodes& to = p.to;
  const int64_t across = (to.columns + kTile - 1) / kTile;
  const int64_t tiles = (to.rows + kTile - 1) / kTile * across;
  for (int64_t t = blockIdx.x; t < tiles; t += gridDim.x) {
    const int64_t row = t / across * kTile;
    const int64_t column = t % across * kTile;
    for (int i = static_cast<int>(threadIdx.x); i < kTile * kWordsOfTile; i += kFlatThreads) {
      const int r = i / kWordsOfTile;
      const int word = i % kWordsOfTile;
      if (row + r < to.rows && column + word * kCodesOfWord < to.columns) {
        tile[r][word] = *reinterpret_cast<const uint32_t*>(
            p.from + ((row + r) * to.columns + column) / 2 + word * kQuad);
      }
    }
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.x); i < kTile * kWordsOfTile; i += kFlatThreads) {
      const int first = i % kWordsOfTile * kCodesOfWord;
      const int of = i / kWordsOfTile;
      if (row + first < to.rows && column + of < to.columns) {
        uint32_t word = 0;
#pragma unroll
        for (int j = 0; j < kCodesOfWord; ++j) {
          const uint32_t code =
              tile[first + j][of / kCodesOfWord] >> (4 * (of % kCodesOfWord)) & 0xFu;
          word |= code << (4 * j);
        }
        *reinterpret_cast<uint32_t*>(to.codes + (column + of) * to.stride + (row + first) / 2) =
            word;
      }
    }
    __syncthreads();
  }
}

}  // namespace

std::vector<KernelEntry> Fp4CodesKernels() {
  return {
      EntryOf(Kernel::kFp4CodesAlongColumns, kBlocksOfFp4, Fp4CodesAlongColumnsKernel<NvFp4Scheme>),
      EntryOf(Kernel::kFp4CodesAlongColumns,
              kBlocksOfFp4Stochastic,
              Fp4CodesAlongColumnsKernel<NvFp4StochasticScheme>),
      EntryOf(Kernel::kFp4CodesAlongRows, kBlocksOfFp4, Fp4CodesAlongRowsKernel<NvFp4Scheme>),
      EntryOf(Kernel::kFp4CodesAlongRows,
              kBlocksOfFp4Stochastic,
              Fp4CodesAlongRowsKernel<NvFp4StochasticScheme>),
      EntryOf(Kernel::kTransposeCodes, kTwoToAByte, TransposeFp4CodesKernel)};
}

}  // namespace ravel::kernels::cuda
