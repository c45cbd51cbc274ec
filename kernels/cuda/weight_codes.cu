// Amaxes, codes and decoded values of weights. Amaxes: a warp takes 128 columns of at most 32 rows,
// none of which crosses a block, and adds its result by an atomic maximum, exact in any order: 4
// bytes read per element. Codes: a thread takes 8 elements of one block: 5 bytes per element
// (4.5 of fp4). Decoding: 3 bytes (2.5). All are bound by memory; scales are computed anew by each
// thread, which hides behind it.

#include "kernels/cuda/code_schemes.cuh"
#include "kernels/cuda/kernel_table.h"

namespace ravel::kernels::cuda {
namespace {

constexpr int kAmaxPerLane = kAmaxColumns / kWarpThreads;

// The largest magnitude of up to kAmaxPerLane elements at `from`.
template <bool kVectors>
__device__ inline uint32_t AmaxOfPart(const float* from, int64_t elements) {
  uint32_t amax = 0;
  if (kVectors && elements >= kAmaxPerLane) {
    float x[kAmaxPerLane];
    Load<float, kAmaxPerLane>(from, x);
#pragma unroll
    for (int i = 0; i < kAmaxPerLane; ++i) {
      amax = MaxOf(amax, scalar::MagnitudeBits(x[i]));
    }
    return amax;
  }
#pragma unroll
  for (int i = 0; i < kAmaxPerLane; ++i) {
    amax = i < elements ? MaxOf(amax, scalar::MagnitudeBits(from[i])) : amax;
  }
  return amax;
}

// In each lane: the largest of the lanes that share its block.
__device__ inline uint32_t AmaxOfBlock(uint32_t amax, int64_t edge) {
  if (edge == 16) {
    return AmaxOfLanes<16 / kAmaxPerLane>(amax);
  }
  if (edge == 32) {
    return AmaxOfLanes<32 / kAmaxPerLane>(amax);
  }
  return AmaxOfLanes<kWarpThreads>(amax);
}

template <bool kVectors>
__global__ void __launch_bounds__(kFlatThreads)
    BlockAmaxKernel(const __grid_constant__ BlockAmaxParams p) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpThreads;
  const int64_t chunk_rows = p.edge == 16 ? 16 : kAmaxRows;
  const int64_t strips = (p.columns + kAmaxColumns - 1) / kAmaxColumns;
  const int64_t first_chunk = p.first_row / chunk_rows;
  const int64_t end_row = p.first_row + p.rows;
  const int64_t chunks = (end_row + chunk_rows - 1) / chunk_rows - first_chunk;
  const int64_t warps = int64_t{gridDim.x} * (kFlatThreads / kWarpThreads);
  for (int64_t i = int64_t{blockIdx.x} * (kFlatThreads / kWarpThreads) +
                   static_cast<int>(threadIdx.x) / kWarpThreads;
       i < chunks * strips;
       i += warps) {
    const int64_t chunk = first_chunk + i / strips;
    const int64_t column = i % strips * kAmaxColumns + lane * kAmaxPerLane;
    const int64_t begin = max(chunk * chunk_rows, p.first_row);
    const int64_t end = min((chunk + 1) * chunk_rows, end_row);
    uint32_t amax = 0;
    for (int64_t row = begin; row < end && column < p.columns; ++row) {
      const float* from = p.from + (row - p.first_row) * p.columns + column;
      amax = MaxOf(amax, AmaxOfPart<kVectors>(from, p.columns - column));
    }
    amax = MaxOf(AmaxOfBlock(amax, p.edge), p.least);
    const bool leads = p.edge == 0 ? lane == 0 : column % p.edge == 0;
    if (leads && column < p.columns) {
      const int64_t at = p.edge == 0 ? 0 : begin / p.edge * p.grid_columns + column / p.edge;
      atomicMax(p.amax + at, amax);
    }
  }
}

template <typename S>
__device__ inline scalar::Scales TensorScalesOf(const WeightScaleParams& p) {
  if constexpr (S::kRecipe == plan::Recipe::kNvFp4) {
    return scalar::NvFp4TensorScales(*p.domain_amax);
  } else if constexpr (S::kEdge == 0) {
    if (p.encode != nullptr) {
      const float encode = *p.encode == 0.0f ? 1.0f : *p.encode;
      return {encode, 1.0f / encode};
    }
    return scalar::TensorScales(S::kRecipe, *p.amax, scalar::kLargestE4M3Value);
  } else {
    return {};
  }
}

template <typename S>
__device__ inline scalar::Scales ScalesAt(const WeightScaleParams& p,
                                          float tensor,
                                          int64_t row,
                                          int64_t column) {
  if constexpr (S::kEdge == 0) {
    return {tensor, 1.0f};
  } else {
    const uint32_t amax = p.amax[row / S::kEdge * p.grid_columns + column / S::kEdge];
    return S::OfBlock(amax, tensor, scalar::kLargestF32Bits);
  }
}

// kWidth elements of a row at a time: those of a vector, or of one byte of codes.
template <typename S, int kWidth>
__global__ void __launch_bounds__(kFlatThreads)
    QuantizeWeightKernel(const __grid_constant__ QuantizeWeightParams p) {
  using Codes = typename S::Codes;
  constexpr int kBytes = kWidth / Codes::kPerByte;
  if (p.unless != nullptr && *p.unless != 0.0f) {
    return;
  }
  const float tensor = TensorScalesOf<S>(p.scales).encode;
  const int64_t per_row = p.columns / kWidth;
  const int64_t step = int64_t{gridDim.x} * kFlatThreads;
  for (int64_t i = int64_t{blockIdx.x} * kFlatThreads + threadIdx.x; i < p.rows * per_row;
       i += step) {
    const int64_t row = i / per_row;
    const int64_t column = i % per_row * kWidth;
    const float encode = ScalesAt<S>(p.scales, tensor, p.first_row + row, column).encode;
    float x[kWidth];
    Pack<uint8_t, kBytes> bytes;
    if constexpr (kWidth == kQuantizeWidth) {
      Load<float, kWidth>(p.from + i * kWidth, x);  // at a multiple of 32 bytes
    } else {
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        x[j] = p.from[i * kWidth + j];
      }
    }
#pragma unroll
    for (int j = 0; j < kBytes; ++j) {
      uint32_t code = Codes::Code(x[j * Codes::kPerByte] * encode, 0);
      if constexpr (Codes::kPerByte == 2) {
        code |= Codes::Code(x[2 * j + 1] * encode, 0) << 4;
      }
      bytes.elements[j] = static_cast<uint8_t>(code);
    }
    *reinterpret_cast<Pack<uint8_t, kBytes>*>(p.codes + i * kBytes) = bytes;
  }
}

template <typename S, int kWidth>
__global__ void __launch_bounds__(kFlatThreads)
    DecodeWeightKernel(const __grid_constant__ DecodeWeightParams p) {
  using Codes = typename S::Codes;
  constexpr int kBytes = kWidth / Codes::kPerByte;
  const scalar::Scales tensor = TensorScalesOf<S>(p.scales);
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    *p.scale = tensor.decode;
  }
  const int64_t per_row = p.columns / kWidth;
  const int64_t step = int64_t{gridDim.x} * kFlatThreads;
  for (int64_t i = int64_t{blockIdx.x} * kFlatThreads + threadIdx.x; i < p.rows * per_row;
       i += step) {
    const int64_t row = i / per_row;
    const int64_t column = i % per_row * kWidth;
    const float decode = ScalesAt<S>(p.scales, tensor.encode, row, column).decode;
    const auto bytes = *reinterpret_cast<const Pack<uint8_t, kBytes>*>(p.codes + i * kBytes);
    float x[kWidth];
#pragma unroll
    for (int j = 0; j < kBytes; ++j) {
      const uint32_t code = bytes.elements[j];
      if constexpr (Codes::kPerByte == 2) {
        x[2 * j] = Codes::Value(code & 0xFu) * decode;
        x[2 * j + 1] = Codes::Value(code >> 4) * decode;
      } else {
        x[j] = Codes::Value(code) * decode;
      }
    }
    Store<Bf16, kWidth>(static_cast<Bf16*>(p.to) + i * kWidth, x);
  }
}

template <typename S>
void AddEntries(int32_t scheme, std::vector<KernelEntry>& entries) {
  constexpr int kByte = S::Codes::kPerByte;
  constexpr int kVector = kQuantizeWidth;
  const int32_t bytes = QuantizeVariant(scheme, false);
  const int32_t vectors = QuantizeVariant(scheme, true);
  entries.push_back(EntryOf(Kernel::kQuantizeWeight, bytes, QuantizeWeightKernel<S, kByte>));
  entries.push_back(EntryOf(Kernel::kQuantizeWeight, vectors, QuantizeWeightKernel<S, kVector>));
  entries.push_back(EntryOf(Kernel::kDecodeWeight, bytes, DecodeWeightKernel<S, kByte>));
  entries.push_back(EntryOf(Kernel::kDecodeWeight, vectors, DecodeWeightKernel<S, kVector>));
}

}  // namespace

std::vector<KernelEntry> WeightCodeKernels() {
  std::vector<KernelEntry> entries = {
      EntryOf(Kernel::kBlockAmax, kF32Scalar, BlockAmaxKernel<false>),
      EntryOf(Kernel::kBlockAmax, kF32Vector, BlockAmaxKernel<true>)};
  AddEntries<TensorE4M3Scheme>(kTensorE4M3, entries);
  AddEntries<Float8BlockScheme>(kBlocksOf128, entries);
  AddEntries<MxFp8Scheme>(kBlocksOf32, entries);
  AddEntries<NvFp4Scheme>(kBlocksOfFp4, entries);
  return entries;
}

}  // namespace ravel::kernels::cuda
