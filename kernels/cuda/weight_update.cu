// The update of a quantized matrix with its amaxes and codes, in tiles of 128 columns and of as
// many rows as a block of the recipe has, 32 at least. A warp takes a row of a tile at a time,
// which is a group of the states; amaxes of blocks meet in shared memory. Codes are made of the new
// weights, which each thread reads again where it wrote them: tiles that are under way take 64 KiB
// each at most, so the second level of caches has them. 29 bytes per element with fp32 states and
// codes, as the update alone has with a byte of codes, memory-bound.

#include "kernels/cuda/code_schemes.cuh"
#include "kernels/cuda/kernel_table.h"
#include "kernels/cuda/update_states.cuh"
#include "kernels/scalar/update_rules.h"

namespace ravel::kernels::cuda {
namespace {

constexpr int kLaneWidth = kGroupWidth;
constexpr int kTileColumns = kWarpThreads * kLaneWidth;
constexpr int kTileRows = 32;  // at least
constexpr int kWarps = kFlatThreads / kWarpThreads;
// Blocks of edge 16, the most that a tile has.
constexpr int kMostBlocks = (kTileRows / 16) * (kTileColumns / 16);

using Bytes = Pack<uint8_t, kLaneWidth>;

__device__ inline void ReadStates(const StateAt& state,
                                  int64_t i,
                                  uint8_t scale,
                                  float (&x)[kLaneWidth]) {
  if (state.form == StateForm::kF32) {
    Load<float, kLaneWidth>(static_cast<const float*>(state.values) + i, x);
  } else if (state.form == StateForm::kBf16) {
    Load<Bf16, kLaneWidth>(static_cast<const Bf16*>(state.values) + i, x);
  } else {
    const auto codes =
        *reinterpret_cast<const Bytes*>(static_cast<const uint8_t*>(state.values) + i);
#pragma unroll
    for (int j = 0; j < kLaneWidth; ++j) {
      const uint8_t code = codes.elements[j];
      x[j] = state.square ? scalar::DecodeSquare(code, scale) : scalar::DecodeMean(code, scale);
    }
  }
}

// `halves`: 16 random bits for each element.
__device__ inline void WriteStates(
    const StateAt& state, int64_t i, uint8_t scale, uint64_t halves, const float (&x)[kLaneWidth]) {
  if (state.form == StateForm::kF32) {
    Store<float, kLaneWidth>(static_cast<float*>(state.values) + i, x);
    return;
  }
  if (state.form == StateForm::kBf16) {
    Pack<uint16_t, kLaneWidth> pack;
#pragma unroll
    for (int j = 0; j < kLaneWidth; ++j) {
      pack.elements[j] = state.square ? scalar::Bf16Stochastic(x[j], HalfAt(halves, j))
                                      : scalar::Bf16Nearest(x[j]);
    }
    *reinterpret_cast<Pack<uint16_t, kLaneWidth>*>(static_cast<uint16_t*>(state.values) + i) = pack;
    return;
  }
  Bytes codes;
#pragma unroll
  for (int j = 0; j < kLaneWidth; ++j) {
    const uint32_t random16 = HalfAt(halves, j);
    codes.elements[j] = state.square ? scalar::EncodeSquare(x[j], scale, random16)
                                     : scalar::EncodeMean(x[j], scale, random16);
  }
  *reinterpret_cast<Bytes*>(static_cast<uint8_t*>(state.values) + i) = codes;
}

__device__ inline uint32_t AmaxOfLane(const float (&x)[kLaneWidth]) {
  uint32_t amax = 0;
#pragma unroll
  for (int j = 0; j < kLaneWidth; ++j) {
    amax = MaxOf(amax, scalar::MagnitudeBits(x[j]));
  }
  return amax;
}

// The values that a step has for all elements.
struct OfStep {
  DeviceUpdateScalars scalars;
  uint32_t key;
  bool applies;
};

// A lane's elements of a row, from `column` on, of which there are some where `here`; all lanes of
// a warp call it. Returns the amax of their new weights.
template <typename Rule>
__device__ inline uint32_t UpdateRow(
    const WeightUpdateParams& p, const OfStep& step, int64_t row, int64_t column, bool here) {
  constexpr bool kTwo = Rule::kStates > 1;
  const ElementUpdateParams& update = p.grouped.update;
  const StateAt mean = {update.m, p.grouped.m_form, false};
  const StateAt square = {update.v, p.grouped.v_form, true};
  const bool m_scaled = mean.form == StateForm::kFp8;
  const bool v_scaled = kTwo && square.form == StateForm::kFp8;
  const int64_t i = row * p.columns + column;
  const int64_t groups = (p.columns + kTileColumns - 1) / kTileColumns;
  const int64_t scale = row * groups + column / kTileColumns;
  float weight[kLaneWidth] = {};
  float m[kLaneWidth] = {};
  float v[kLaneWidth] = {};
  if (here) {
    float g[kLaneWidth];
    Load<float, kLaneWidth>(update.main_weight + i, weight);
    if (p.bf16_gradient != 0) {
      Load<Bf16, kLaneWidth>(static_cast<const Bf16*>(update.g) + i, g);
    } else {
      Load<float, kLaneWidth>(static_cast<const float*>(update.g) + i, g);
    }
    ReadStates(mean, i, m_scaled ? p.grouped.m_scales[scale] : uint8_t{0}, m);
    if constexpr (kTwo) {
      ReadStates(square, i, v_scaled ? p.grouped.v_scales[scale] : uint8_t{0}, v);
    }
#pragma unroll
    for (int j = 0; j < kLaneWidth; ++j) {
      const scalar::AdamWElement next = Rule::Step(step.scalars, {weight[j], m[j], v[j]}, g[j]);
      weight[j] = next.p;
      m[j] = next.m;
      v[j] = next.v;
    }
    Store<float, kLaneWidth>(update.main_weight + i, weight);
  }
  const uint8_t m_scale = m_scaled ? scalar::ScaleOfMeans(AmaxOfWarp(AmaxOfLane(m))) : uint8_t{0};
  const uint8_t v_scale = v_scaled ? scalar::ScaleOfSquares(AmaxOfWarp(AmaxOfLane(v))) : uint8_t{0};
  if (here) {
    uint64_t halves = 0;
    if (mean.form != StateForm::kF32 || (kTwo && square.form != StateForm::kF32)) {
      const int64_t index = update.pieces.first_index + row * p.row_step + column;
      halves = DrawsAt(update.seed, update.pieces.site, step.key, index);
    }
    WriteStates(mean, i, m_scale, scalar::ExchangeBytes(halves), m);
    if constexpr (kTwo) {
      WriteStates(square, i, v_scale, halves, v);
    }
  }
  if (column % kTileColumns == 0 && m_scaled) {
    p.grouped.m_scales[scale] = m_scale;
  }
  if (column % kTileColumns == 0 && v_scaled) {
    p.grouped.v_scales[scale] = v_scale;
  }
  return AmaxOfLane(weight);
}

// In each lane: the largest of the lanes that share its block.
__device__ inline uint32_t AmaxOfBlock(uint32_t amax, int edge) {
  if (edge == 16) {
    return AmaxOfLanes<16 / kLaneWidth>(amax);
  }
  if (edge == 32) {
    return AmaxOfLanes<32 / kLaneWidth>(amax);
  }
  return AmaxOfLanes<kWarpThreads>(amax);
}

// The place of an element's block among those of its tile.
__device__ inline int BlockOf(int edge, int64_t row_in_tile, int64_t column_in_tile) {
  if (edge == 0) {
    return 0;
  }
  const auto down = static_cast<int>(row_in_tile) / edge;
  return down * (kTileColumns / edge) + static_cast<int>(column_in_tile) / edge;
}

// The factor of the codes of a block of 128 or of 32.
__device__ inline float EncodeOf(int edge, uint32_t amax) {
  return edge == Float8BlockScheme::kEdge
             ? Float8BlockScheme::OfBlock(amax, 1.0f, scalar::kLargestF32Bits).encode
             : MxFp8Scheme::OfBlock(amax, 1.0f, scalar::kLargestF32Bits).encode;
}

// Rows [begin, end) of the matrix, 128 columns. Blocks are counted from row `origin`.
struct Tile {
  int64_t origin;
  int64_t begin;
  int64_t end;
  int64_t column;
};

// Amaxes of the tile's blocks, of new weights or, in a step that is not applied, of old ones.
template <typename Rule>
__device__ inline void UpdateTile(const WeightUpdateParams& p,
                                  const Tile& tile,
                                  const OfStep& step,
                                  uint32_t* amaxes) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpThreads;
  const int64_t column = tile.column + lane * kLaneWidth;
  const bool here = column < p.columns;
  const bool leads = here && (p.edge == 0 ? lane == 0 : column % p.edge == 0);
  for (int64_t row = tile.begin + static_cast<int>(threadIdx.x) / kWarpThreads; row < tile.end;
       row += kWarps) {
    uint32_t amax = 0;
    if (step.applies) {
      amax = UpdateRow<Rule>(p, step, row - p.first_row, column, here);
    } else if (here) {
      float x[kLaneWidth];
      Load<float, kLaneWidth>(
          p.grouped.update.main_weight + (row - p.first_row) * p.columns + column, x);
      amax = AmaxOfLane(x);
    }
    amax = AmaxOfBlock(amax, p.edge);
    if (leads) {
      atomicMax(amaxes + BlockOf(p.edge, row - tile.origin, column - tile.column), amax);
    }
  }
}

__device__ inline void EncodeTile(const WeightUpdateParams& p,
                                  const Tile& tile,
                                  const uint32_t* amaxes,
                                  float encode) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpThreads;
  const int64_t column = tile.column + lane * kLaneWidth;
  if (column >= p.columns) {
    return;
  }
  if (p.encode == nullptr) {
    encode = EncodeOf(p.edge, MaxOf(amaxes[BlockOf(p.edge, 0, column - tile.column)], p.least));
  }
  const float* weights = p.grouped.update.main_weight;
  for (int64_t row = tile.begin + static_cast<int>(threadIdx.x) / kWarpThreads; row < tile.end;
       row += kWarps) {
    const int64_t i = (row - p.first_row) * p.columns + column;
    float x[kLaneWidth];
    Load<float, kLaneWidth>(weights + i, x);
    Bytes codes;
#pragma unroll
    for (int j = 0; j < kLaneWidth; ++j) {
      codes.elements[j] = static_cast<uint8_t>(E4M3Codes::Code(x[j] * encode, 0));
    }
    *reinterpret_cast<Bytes*>(p.codes + i) = codes;
  }
}

// The first threads of a block raise the grid, each for one block of the tile.
__device__ inline void RaiseAmaxes(const WeightUpdateParams& p,
                                   const Tile& tile,
                                   const uint32_t* amaxes) {
  const int block = static_cast<int>(threadIdx.x);
  if (p.edge == 0) {
    if (block == 0) {
      atomicMax(p.amax, MaxOf(amaxes[0], p.least));
    }
    return;
  }
  const int across = kTileColumns / p.edge;
  const int64_t row = tile.origin / p.edge + block / across;
  const int64_t column = tile.column / p.edge + block % across;
  const bool has_rows = row * p.edge < tile.end && (row + 1) * p.edge > tile.begin;
  if (block < kMostBlocks && has_rows && column * p.edge < p.columns) {
    atomicMax(p.amax + row * p.grid_columns + column, MaxOf(amaxes[block], p.least));
    if (p.whole_amax != nullptr) {
      atomicMax(p.whole_amax, amaxes[block]);
    }
  }
}

__device__ inline OfStep StepOf(const WeightUpdateParams& p) {
  const ElementUpdateParams& update = p.grouped.update;
  OfStep step = {
      update.device_scalars != nullptr ? *update.device_scalars : update.scalars,
      update.device_step != nullptr ? static_cast<uint32_t>(*update.device_step) : update.step,
      update.apply == nullptr || *update.apply != 0};
  if (p.decays == 0) {
    step.scalars.weight_decay = 0.0f;
  }
  return step;
}

template <typename Rule>
__global__ void __launch_bounds__(kFlatThreads, 2)
    WeightUpdateKernel(const __grid_constant__ WeightUpdateParams p) {
  __shared__ uint32_t amaxes[kMostBlocks];
  const OfStep step = StepOf(p);
  const bool of_blocks = p.encode == nullptr;
  const float encode = of_blocks ? 1.0f : *p.encode;
  const bool encodes = p.codes != nullptr && (of_blocks || (step.applies && encode != 0.0f));
  const int64_t tile_rows = p.edge > kTileRows ? p.edge : kTileRows;
  const int64_t strips = (p.columns + kTileColumns - 1) / kTileColumns;
  const int64_t first_chunk = p.first_row / tile_rows;
  const int64_t end_row = p.first_row + p.rows;
  const int64_t chunks = (end_row + tile_rows - 1) / tile_rows - first_chunk;
  for (int64_t index = blockIdx.x; index < chunks * strips; index += gridDim.x) {
    const int64_t origin = (first_chunk + index / strips) * tile_rows;
    const Tile tile = {origin,
                       max(origin, p.first_row),
                       min(origin + tile_rows, end_row),
                       index % strips * kTileColumns};
    if (threadIdx.x < kMostBlocks) {
      amaxes[threadIdx.x] = 0;
    }
    __syncthreads();
    UpdateTile<Rule>(p, tile, step, amaxes);
    __syncthreads();
    RaiseAmaxes(p, tile, amaxes);
    if (encodes && (!of_blocks || tile.end - tile.begin == tile_rows)) {
      EncodeTile(p, tile, amaxes, encode);
    }
    __syncthreads();
  }
}

template <typename Rule>
void AddRule(std::vector<KernelEntry>& entries) {
  constexpr auto kVariant = static_cast<int32_t>(Rule::kRule);
  static_assert(kVariant < kKernelVariants);
  entries.push_back(EntryOf(Kernel::kWeightUpdate, kVariant, WeightUpdateKernel<Rule>));
}

}  // namespace

std::vector<KernelEntry> WeightUpdateKernels() {
  std::vector<KernelEntry> entries;
  scalar::ForEachRule([&](auto rule) { AddRule<decltype(rule)>(entries); });
  return entries;
}

}  // namespace ravel::kernels::cuda
