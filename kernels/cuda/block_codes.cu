// Codes with a scale for each block, and these scales where gemms of codes read them. Blocks along
// columns: a warp takes 256 elements of a row, a block is neighbouring lanes. Blocks along rows: a
// block of threads takes 128 rows of 64 columns, whose amaxes meet in shared memory, and so do the
// codes, which are written transposed. An element is read once and kept in registers: 2 bytes read
// and 1 written, and a scale for each block. Bound by memory.

#include "common/gemm_scales.h"
#include "kernels/cuda/code_schemes.cuh"
#include "kernels/cuda/kernel_table.h"

namespace ravel::kernels::cuda {
namespace {

constexpr int kWidth = kQuantizeWidth;
constexpr int kQuad = 4;
constexpr int kWarps = kFlatThreads / kWarpThreads;
constexpr int kQuadsOfTileRow = kBlockColumns / kQuad;
constexpr int kRowsAtOnce = kFlatThreads / kQuadsOfTileRow;
constexpr int kRowsOfThread = kBlockRows / kRowsAtOnce;
constexpr int kQuadsOfTileColumn = kBlockRows / kQuad;

// Codes and scales of kFloat8Block; a scale is written as four of 32 codes each, which lie in one
// word.
struct BlockAsMxFp8Scheme : Float8BlockScheme {};

// Where a scheme's scales lie: those of activations, and of weights.
template <typename S>
struct Forms;
template <>
struct Forms<Float8BlockScheme> {
  static constexpr ScaleForm kActivation = ScaleForm::kBlocks128;
  static constexpr ScaleForm kWeight = ScaleForm::kSquares128;
};
template <>
struct Forms<MxFp8Scheme> {
  static constexpr ScaleForm kActivation = ScaleForm::kBlocks32;
  static constexpr ScaleForm kWeight = ScaleForm::kBlocks32;
};
template <>
struct Forms<NvFp4Scheme> {
  static constexpr ScaleForm kWeight = ScaleForm::kBlocks16;
};
template <>
struct Forms<BlockAsMxFp8Scheme> {
  static constexpr ScaleForm kActivation = ScaleForm::kBlocks32;
  static constexpr ScaleForm kWeight = ScaleForm::kBlocks32;
};
// The number of scales that a block has.
template <typename S>
constexpr int64_t kScalesOfBlock = S::kEdge / CodesOfScale(Forms<S>::kWeight);

// Writes the scale of a block of that amax, and returns what its elements are multiplied by. `left`
// are the scales from there to the row's end. `tensor` is the encode of the whole tensor, where the
// recipe has one.
template <typename S>
__device__ inline float PlaceScale(
    uint32_t amax, uint32_t big, int64_t index, int64_t left, void* to, float tensor = 1.0f) {
  if constexpr (kScalesOfBlock<S> == 4) {
    const scalar::Scales scales = S::OfBlock(amax, 1.0f, big);
    const uint32_t four = scalar::E8M0OfPowerOfTwo(scales.decode) * 0x01010101u;
    const int past = left < 4 ? static_cast<int>(4 - left) : 0;
    *reinterpret_cast<uint32_t*>(static_cast<uint8_t*>(to) + index) = four >> (8 * past);
    return scales.encode;
  } else if constexpr (S::kRecipe == plan::Recipe::kMxFp8) {
    const uint8_t code = scalar::MxFp8BlockCode(amax);
    static_cast<uint8_t*>(to)[index] = code;
    return scalar::E8M0Multiplier(code);
  } else if constexpr (S::kRecipe == plan::Recipe::kNvFp4) {
    static_cast<uint8_t*>(to)[index] = static_cast<uint8_t>(scalar::NvFp4BlockCode(amax, tensor));
    return S::OfBlock(amax, tensor, big).encode;
  } else {
    const scalar::Scales scales = S::OfBlock(amax, 1.0f, big);
    static_cast<float*>(to)[index] = scales.decode;
    return scales.encode;
  }
}

__device__ inline void NoteAmax(uint32_t amax, uint32_t* non_finite) {
  if (non_finite != nullptr && amax >= scalar::kInfinityBits) {
    atomicOr(non_finite, 1u);
  }
}

template <typename S>
__global__ void __launch_bounds__(kFlatThreads)
    BlockCodesAlongColumnsKernel(const __grid_constant__ BlockCodesParams p) {
  constexpr ScaleForm kForm = Forms<S>::kActivation;
  constexpr int kLanes = S::kEdge / kWidth;
  const int lane = static_cast<int>(threadIdx.x) % kWarpThreads;
  const int64_t strips = (p.columns + kQuantizeColumns - 1) / kQuantizeColumns;
  const int64_t blocks = ScaleBlocks(kForm, p.columns);
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
    const uint32_t amax = MaxOf(AmaxOfLanes<kLanes>(AmaxOf(x)), p.least);
    if (!inside) {
      continue;
    }
    float encode = 0;
    if (lane % kLanes == 0) {
      const int64_t block = column / S::kEdge * kScalesOfBlock<S>;
      const int64_t index = ScaleIndex(kForm, row, block, p.rows, blocks);
      encode = PlaceScale<S>(amax, scalar::kLargestBf16Bits, index, blocks - block, p.scales);
      NoteAmax(amax, p.non_finite);
    } else {
      encode = S::OfBlock(amax, 1.0f, scalar::kLargestBf16Bits).encode;
    }
    Pack<uint8_t, kWidth> codes;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      codes.elements[j] = static_cast<uint8_t>(S::Codes::Code(x[j] * encode, 0));
    }
    *reinterpret_cast<Pack<uint8_t, kWidth>*>(p.codes + row * p.columns + column) = codes;
  }
}

// A row of codes is a word longer than the tile's, against bank conflicts.
template <typename S>
struct BlockTile {
  static constexpr int kBlocks = kBlockRows / S::kEdge;
  uint32_t amax[kBlocks][kBlockColumns];
  float encode[kBlocks][kBlockColumns];
  uint8_t codes[kBlockRows][kBlockColumns + kQuad];
};

// The tile's columns as rows of the transposed codes.
template <typename S>
__device__ inline void StoreColumns(const BlockTile<S>& tile,
                                    const BlockCodesParams& p,
                                    int64_t row,
                                    int64_t column) {
  for (int i = static_cast<int>(threadIdx.x); i < kBlockColumns * kQuadsOfTileColumn;
       i += kFlatThreads) {
    const int quad = i % kQuadsOfTileColumn * kQuad;
    const int of = i / kQuadsOfTileColumn;
    if (row + quad < p.rows && column + of < p.columns) {
      uint32_t word = 0;
#pragma unroll
      for (int j = 0; j < kQuad; ++j) {
        word |= uint32_t{tile.codes[quad + j][of]} << (8 * j);
      }
      *reinterpret_cast<uint32_t*>(p.codes + (column + of) * p.rows + row + quad) = word;
    }
  }
}

// Scales of the tile's blocks, from their amaxes.
template <typename S>
__device__ inline void PlaceTile(BlockTile<S>& tile,
                                 const BlockCodesParams& p,
                                 int64_t row,
                                 int64_t column) {
  constexpr ScaleForm kForm = Forms<S>::kActivation;
  const int64_t blocks = ScaleBlocks(kForm, p.rows);
  for (int i = static_cast<int>(threadIdx.x); i < BlockTile<S>::kBlocks * kBlockColumns;
       i += kFlatThreads) {
    const int of = i % kBlockColumns;
    const int64_t block = (row / S::kEdge + i / kBlockColumns) * kScalesOfBlock<S>;
    if (column + of < p.columns && block < blocks) {
      const uint32_t amax = tile.amax[i / kBlockColumns][of];
      tile.encode[i / kBlockColumns][of] =
          PlaceScale<S>(amax,
                        scalar::kLargestBf16Bits,
                        ScaleIndex(kForm, column + of, block, p.columns, blocks),
                        blocks - block,
                        p.scales);
      NoteAmax(amax, p.non_finite);
    }
  }
}

template <typename S>
__global__ void __launch_bounds__(kFlatThreads)
    BlockCodesAlongRowsKernel(const __grid_constant__ BlockCodesParams p) {
  __shared__ BlockTile<S> tile;
  const int first = static_cast<int>(threadIdx.x) / kQuadsOfTileRow;
  const int c = static_cast<int>(threadIdx.x) % kQuadsOfTileRow * kQuad;
  const int64_t across = (p.columns + kBlockColumns - 1) / kBlockColumns;
  const int64_t tiles = (p.rows + kBlockRows - 1) / kBlockRows * across;
  for (int64_t t = blockIdx.x; t < tiles; t += gridDim.x) {
    const int64_t row = t / across * kBlockRows;
    const int64_t column = t % across * kBlockColumns;
    for (int i = static_cast<int>(threadIdx.x); i < BlockTile<S>::kBlocks * kBlockColumns;
         i += kFlatThreads) {
      tile.amax[i / kBlockColumns][i % kBlockColumns] = p.least;
    }
    __syncthreads();
    float x[kRowsOfThread][kQuad] = {};
#pragma unroll
    for (int k = 0; k < kRowsOfThread; ++k) {
      const int r = first + k * kRowsAtOnce;
      if (row + r < p.rows && column + c < p.columns) {
        Load<Bf16, kQuad>(static_cast<const Bf16*>(p.from) + (row + r) * p.from_stride + column + c,
                          x[k]);
#pragma unroll
        for (int j = 0; j < kQuad; ++j) {
          atomicMax(&tile.amax[r / S::kEdge][c + j], scalar::MagnitudeBits(x[k][j]));
        }
      }
    }
    __syncthreads();
    PlaceTile(tile, p, row, column);
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kRowsOfThread; ++k) {
      const int r = first + k * kRowsAtOnce;
      if (row + r < p.rows && column + c < p.columns) {
        uint32_t word = 0;
#pragma unroll
        for (int j = 0; j < kQuad; ++j) {
          word |= S::Codes::Code(x[k][j] * tile.encode[r / S::kEdge][c + j], 0) << (8 * j);
        }
        *reinterpret_cast<uint32_t*>(&tile.codes[r][c]) = word;
      }
    }
    __syncthreads();
    StoreColumns(tile, p, row, column);
    __syncthreads();
  }
}

// A thread takes a scale: of a square, or of a row's block.
template <typename S>
__global__ void __launch_bounds__(kFlatThreads)
    PlaceScalesKernel(const __grid_constant__ PlaceScalesParams p) {
  constexpr ScaleForm kForm = Forms<S>::kWeight;
  constexpr int64_t kRows = kForm == ScaleForm::kSquares128 ? S::kEdge : 1;
  const bool turned = p.turned != 0;
  const int64_t rows = (turned ? p.columns : p.rows) / kRows;
  const int64_t blocks = (turned ? p.rows : p.columns) / S::kEdge;
  const int64_t outer = turned ? p.columns : p.all_rows;
  const int64_t all_blocks = (turned ? p.all_rows : p.columns) / S::kEdge * kScalesOfBlock<S>;
  const float tensor =
      p.domain_amax != nullptr ? scalar::NvFp4TensorScales(*p.domain_amax).encode : 1.0f;
  const int64_t step = int64_t{gridDim.x} * kFlatThreads;
  for (int64_t i = int64_t{blockIdx.x} * kFlatThreads + threadIdx.x; i < rows * blocks; i += step) {
    const int64_t row = i / blocks * kRows;
    const int64_t block = i % blocks;
    const int64_t square = row / S::kEdge;
    const uint32_t amax =
        p.amax[turned ? block * p.grid_columns + square : square * p.grid_columns + block];
    const int64_t first = (turned ? p.first_row / S::kEdge + block : block) * kScalesOfBlock<S>;
    const int64_t index =
        ScaleIndex(kForm, turned ? row : p.first_row + row, first, outer, all_blocks);
    PlaceScale<S>(amax, scalar::kLargestF32Bits, index, all_blocks - first, p.to, tensor);
  }
}

// Activations of kNvFp4 are those of fp4_codes.cu.
template <typename S>
void AddEntries(int32_t scheme, std::vector<KernelEntry>& entries) {
  entries.push_back(
      EntryOf(Kernel::kBlockCodesAlongColumns, scheme, BlockCodesAlongColumnsKernel<S>));
  entries.push_back(EntryOf(Kernel::kBlockCodesAlongRows, scheme, BlockCodesAlongRowsKernel<S>));
  entries.push_back(EntryOf(Kernel::kPlaceScales, scheme, PlaceScalesKernel<S>));
}

}  // namespace

std::vector<KernelEntry> BlockCodesKernels() {
  std::vector<KernelEntry> entries = {
      EntryOf(Kernel::kPlaceScales, kBlocksOfFp4, PlaceScalesKernel<NvFp4Scheme>)};
  AddEntries<Float8BlockScheme>(kBlocksOf128, entries);
  AddEntries<MxFp8Scheme>(kBlocksOf32, entries);
  AddEntries<BlockAsMxFp8Scheme>(kBlocksOf128AsMxFp8, entries);
  return entries;
}

}  // namespace ravel::kernels::cuda
