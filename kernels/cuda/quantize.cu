// Activations to decoded codes, and the scale of delayed scaling. Where the tensor has a scale, its
// amax comes first: an atomic maximum over warps, exact in any order; 2 bytes per element, or 4
// where the Hadamard transform is written. Blocks along columns: a warp takes 256 elements of a
// row, a block is neighbouring lanes; 4 bytes per element. Blocks along rows: a lane takes a column
// of the block and reads it twice, the second time from a cache; 4 bytes of memory per element.
// Bound by memory, but stochastic rounding along columns, where two lanes make one draw each of 16.
// A thread reads what it will overwrite before anyone writes it, so results may replace sources.

#include "kernels/cuda/activation_cast.cuh"
#include "kernels/cuda/kernel_table.h"
#include "kernels/scalar/hadamard.h"

namespace ravel::kernels::cuda {
namespace {

constexpr int kWidth = kQuantizeWidth;
constexpr int kWarps = kFlatThreads / kWarpThreads;
constexpr int kHadamard = scalar::kHadamardSize;

__device__ inline int LaneOfThread() {
  return static_cast<int>(threadIdx.x) % kWarpThreads;
}
__device__ inline int WarpOfThread() {
  return static_cast<int>(threadIdx.x) / kWarpThreads;
}

// The maximum of all threads of the grid that call it, which are whole warps.
__device__ inline void AddAmax(uint32_t amax, uint32_t* to) {
  amax = AmaxOfLanes<kWarpThreads>(amax);
  if (LaneOfThread() == 0 && amax != 0) {
    atomicMax(to, amax);
  }
}

// At most kWidth elements; those beyond are zeros.
template <bool kVectors>
__device__ inline void LoadSome(const Bf16* from, int64_t elements, float (&x)[kWidth]) {
  if constexpr (kVectors) {
    if (elements >= kWidth) {
      Load<Bf16, kWidth>(from, x);
      return;
    }
  }
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    x[i] = i < elements ? ToFloat(from[i]) : 0.0f;
  }
}
template <bool kVectors>
__device__ inline void StoreSome(Bf16* to, int64_t elements, const float (&x)[kWidth]) {
  if constexpr (kVectors) {
    if (elements >= kWidth) {
      Store<Bf16, kWidth>(to, x);
      return;
    }
  }
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    if (i < elements) {
      to[i] = FromFloat<Bf16>(x[i]);
    }
  }
}

template <bool kVectors>
__global__ void __launch_bounds__(kFlatThreads)
    ActivationAmaxKernel(const __grid_constant__ ActivationAmaxParams p) {
  const int64_t per_row = (p.columns + kWidth - 1) / kWidth;
  const int64_t step = int64_t{gridDim.x} * kFlatThreads;
  uint32_t amax = p.least;
  for (int64_t i = int64_t{blockIdx.x} * kFlatThreads + threadIdx.x; i < p.rows * per_row;
       i += step) {
    const int64_t column = i % per_row * kWidth;
    float x[kWidth];
    LoadSome<kVectors>(static_cast<const Bf16*>(p.from) + i / per_row * p.from_stride + column,
                       p.columns - column,
                       x);
    amax = MaxOf(amax, AmaxOf(x));
  }
  AddAmax(amax, p.amax);
}

// A thread transforms 16 rows of a column. Where `to` is absent the amax alone is wanted.
__global__ void __launch_bounds__(kFlatThreads)
    TransformAmaxKernel(const __grid_constant__ ActivationAmaxParams p) {
  const int64_t step = int64_t{gridDim.x} * kFlatThreads;
  const int64_t columns = p.rows / kHadamard * p.columns;
  uint32_t amax = 0;
  for (int64_t i = int64_t{blockIdx.x} * kFlatThreads + threadIdx.x; i < columns; i += step) {
    const int64_t row = i / p.columns * kHadamard;
    const int64_t column = i % p.columns;
    const Bf16* from = static_cast<const Bf16*>(p.from) + row * p.from_stride + column;
    Bf16* to = static_cast<Bf16*>(p.to) + row * p.to_stride + column;
    float x[kHadamard];
#pragma unroll
    for (int j = 0; j < kHadamard; ++j) {
      x[j] = ToFloat(from[j * p.from_stride]);
    }
    scalar::Hadamard16(x);
#pragma unroll
    for (int j = 0; j < kHadamard; ++j) {
      const Bf16 rounded = FromFloat<Bf16>(x[j]);
      if (p.to != nullptr) {
        to[j * p.to_stride] = rounded;
      }
      amax = MaxOf(amax, scalar::MagnitudeBits(ToFloat(rounded)));
    }
  }
  AddAmax(amax, p.amax);
}

template <typename S>
__device__ inline scalar::Scales OfBlock(const QuantizeActivationParams& p,
                                         uint32_t amax,
                                         float tensor) {
  if (S::kEdge > 0 && p.non_finite != nullptr && amax >= scalar::kInfinityBits) {
    atomicOr(p.non_finite, 1u);
  }
  return S::OfBlock(amax, tensor, scalar::kLargestBf16Bits);
}

template <typename S, bool kVectors>
__global__ void __launch_bounds__(kFlatThreads)
    QuantizeAlongColumnsKernel(const __grid_constant__ QuantizeActivationParams p) {
  using Codes = typename S::Codes;
  constexpr int kLanes = S::kEdge == 0 ? 1 : S::kEdge / kWidth;
  const float tensor = BeginTensor<S>(p);
  const int64_t strips = (p.columns + kQuantizeColumns - 1) / kQuantizeColumns;
  for (int64_t i = int64_t{blockIdx.x} * kWarps + WarpOfThread(); i < p.rows * strips;
       i += int64_t{gridDim.x} * kWarps) {
    const int64_t row = i / strips;
    const int64_t column = i % strips * kQuantizeColumns + LaneOfThread() * kWidth;
    const int64_t elements = p.columns - column;
    float x[kWidth];
    LoadSome<kVectors>(
        static_cast<const Bf16*>(p.from) + row * p.from_stride + column, elements, x);
    const uint32_t amax = S::kEdge == 0 ? 0 : MaxOf(AmaxOfLanes<kLanes>(AmaxOf(x)), p.least);
    const scalar::Scales scales = OfBlock<S>(p, amax, tensor);
    const HalfDraw draw = DrawHalf<S>(p, row, column);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      const uint32_t random8 = draw.words[j / 4] >> (8 * (j % 4)) & 0xFFu;
      x[j] = Codes::Value(Codes::Code(x[j] * scales.encode, random8)) * scales.decode;
    }
    StoreSome<kVectors>(static_cast<Bf16*>(p.to) + row * p.to_stride + column, elements, x);
  }
}

// Draws of 16 rows by the 32 columns of a warp, which begin and end inside a draw if rows are not
// whole ones.
constexpr int kDrawsOfRow = 3;
struct WarpDraws {
  uint32_t words[kHadamard][kDrawsOfRow][4];
};

__device__ inline void MakeDraws(const QuantizeActivationParams& p,
                                 int64_t row,
                                 int64_t column,
                                 WarpDraws& draws) {
  for (int i = LaneOfThread(); i < kHadamard * kDrawsOfRow; i += kWarpThreads) {
    const int64_t at = row + i / kDrawsOfRow;
    const auto block = static_cast<uint64_t>(IndexOf(p, at, column) / 16 + i % kDrawsOfRow);
    const scalar::PhiloxWords words = DrawAt(p, at, block);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      draws.words[i / kDrawsOfRow][i % kDrawsOfRow][j] = words[static_cast<size_t>(j)];
    }
  }
}

// The byte of (row + j, column + lane).
__device__ inline uint32_t ByteOf(
    const QuantizeActivationParams& p, int64_t row, int64_t column, int j, const WarpDraws& draws) {
  const int at = static_cast<int>(IndexOf(p, row + j, column) % 16) + LaneOfThread();
  return draws.words[j][at / 16][at % 16 / 4] >> (8 * (at % 4)) & 0xFFu;
}

template <typename S>
__global__ void __launch_bounds__(kFlatThreads)
    QuantizeAlongRowsKernel(const __grid_constant__ QuantizeActivationParams p) {
  using Codes = typename S::Codes;
  __shared__ WarpDraws draws[Codes::kDraws ? kWarps : 1];
  const float tensor = BeginTensor<S>(p);
  const int64_t tiles = (p.columns + kWarpThreads - 1) / kWarpThreads;
  const int64_t blocks = (p.rows + S::kEdge - 1) / S::kEdge;
  for (int64_t i = int64_t{blockIdx.x} * kWarps + WarpOfThread(); i < blocks * tiles;
       i += int64_t{gridDim.x} * kWarps) {
    const int64_t row = i / tiles * S::kEdge;
    const int64_t first = i % tiles * kWarpThreads;
    const int64_t column = first + LaneOfThread();
    const int rows = static_cast<int>(min(int64_t{S::kEdge}, p.rows - row));
    const bool inside = column < p.columns;
    const Bf16* from = static_cast<const Bf16*>(p.from) + row * p.from_stride + column;
    Bf16* to = static_cast<Bf16*>(p.to) + row * p.to_stride + column;
    uint32_t amax = p.least;
#pragma unroll 8
    for (int j = 0; j < rows; ++j) {
      amax = inside ? MaxOf(amax, scalar::MagnitudeBits(ToFloat(from[j * p.from_stride]))) : 0;
    }
    const scalar::Scales scales = OfBlock<S>(p, amax, tensor);
    if constexpr (Codes::kDraws) {
      MakeDraws(p, row, first, draws[WarpOfThread()]);
      __syncwarp();
    }
#pragma unroll 4
    for (int j = 0; j < rows; ++j) {
      uint32_t random8 = 0;
      if constexpr (Codes::kDraws) {
        random8 = ByteOf(p, row, first, j, draws[WarpOfThread()]);
      }
      if (inside) {
        const float x = ToFloat(from[j * p.from_stride]) * scales.encode;
        to[j * p.to_stride] =
            FromFloat<Bf16>(Codes::Value(Codes::Code(x, random8)) * scales.decode);
      }
    }
    if constexpr (Codes::kDraws) {
      __syncwarp();
    }
  }
}

// A block per slot. Each round moves as many entries as there are threads, which all have read
// theirs before one is written.
__global__ void __launch_bounds__(kFlatThreads)
    DelayedScalesKernel(const __grid_constant__ DelayedScalesParams p) {
  __shared__ uint32_t largest[kWarps];
  const int64_t domain = int64_t{blockIdx.x} / kSlotsOfDomain;
  const int of = static_cast<int>(blockIdx.x % kSlotsOfDomain);
  float* history = p.histories + int64_t{blockIdx.x} * p.length;
  float* scales = p.scales + kWordsOfSlot * int64_t{blockIdx.x};
  uint32_t* activation =
      p.weight_amax != nullptr && of != 0 ? p.activation_amax + 2 * domain + of - 1 : nullptr;
  uint32_t staged = 0;
  if (p.weight_amax != nullptr) {
    staged = of == 0 ? p.weight_amax[domain] : *activation;
  }
  const bool applies = p.weight_amax != nullptr && (p.apply == nullptr || *p.apply != 0);
  const int shift = staged != 0 && applies ? 1 : 0;
  uint32_t amax = 0;
  for (int64_t first = 0; first < p.length; first += kFlatThreads) {
    const int64_t i = first + threadIdx.x;
    float entry = 0;
    if (i < p.length) {
      entry = i + shift < p.length ? history[i + shift] : __uint_as_float(staged);
    }
    __syncthreads();
    if (i < p.length && shift != 0) {
      history[i] = entry;
    }
    __syncthreads();
    const bool counts = (p.choices & kNewestAmax) == 0 || i == p.length - 1;
    amax = counts ? MaxOf(amax, scalar::MagnitudeBits(entry)) : amax;
  }
  amax = AmaxOfLanes<kWarpThreads>(amax);
  if (LaneOfThread() == 0) {
    largest[WarpOfThread()] = amax;
  }
  __syncthreads();
  if (threadIdx.x != 0) {
    return;
  }
  for (int i = 0; i < kWarps; ++i) {
    amax = MaxOf(amax, largest[i]);
  }
  const bool ones = (p.choices & kOnesFirst) != 0;
  scales[2] = of == 0 && (!applies || scales[1] != 0.0f) ? 1.0f : 0.0f;
  if (applies && of == 0) {
    const float first =
        ones ? 1.0f : scalar::ScaleOf({.largest = scalar::kLargestE4M3Value}, staged);
    scales[0] = scales[1] != 0.0f ? scales[1] : first;
  }
  const float code = (of == 2 ? scalar::kLargestE5M2Value : scalar::kLargestE4M3Value) * p.room;
  const bool usable = amax != 0 && amax < scalar::kInfinityBits;
  scales[1] = usable ? scalar::ScaleOf({.largest = code}, amax) : ones ? 1.0f : 0.0f;
  if (activation != nullptr) {
    *activation = 0;
  }
}

__global__ void __launch_bounds__(kFlatThreads)
    LargestWordsKernel(const __grid_constant__ LargestWordsParams p) {
  const int64_t step = int64_t{gridDim.x} * kFlatThreads;
  for (int64_t i = int64_t{blockIdx.x} * kFlatThreads + threadIdx.x; i < p.words; i += step) {
    uint32_t largest = p.accumulate != 0 ? p.out[i] : 0;
    for (int piece = 0; piece < p.count; ++piece) {
      largest = MaxOf(largest, p.pieces[piece][i]);
    }
    p.out[i] = largest;
  }
}

template <typename S>
void AddAlongColumns(int32_t scheme, std::vector<KernelEntry>& entries) {
  entries.push_back(EntryOf(Kernel::kQuantizeAlongColumns,
                            QuantizeVariant(scheme, false),
                            QuantizeAlongColumnsKernel<S, false>));
  entries.push_back(EntryOf(Kernel::kQuantizeAlongColumns,
                            QuantizeVariant(scheme, true),
                            QuantizeAlongColumnsKernel<S, true>));
}
template <typename S>
KernelEntry AlongRows(int32_t scheme) {
  return EntryOf(
      Kernel::kQuantizeAlongRows, QuantizeVariant(scheme, false), QuantizeAlongRowsKernel<S>);
}

}  // namespace

std::vector<KernelEntry> QuantizeKernels() {
  std::vector<KernelEntry> entries = {
      EntryOf(Kernel::kActivationAmax, kAmaxScalar, ActivationAmaxKernel<false>),
      EntryOf(Kernel::kActivationAmax, kAmaxVector, ActivationAmaxKernel<true>),
      EntryOf(Kernel::kActivationAmax, kAmaxTransform, TransformAmaxKernel),
      EntryOf(Kernel::kDelayedScales, 0, DelayedScalesKernel),
      EntryOf(Kernel::kLargestWords, 0, LargestWordsKernel),
      AlongRows<Float8BlockScheme>(kBlocksOf128),
      AlongRows<MxFp8Scheme>(kBlocksOf32),
      AlongRows<NvFp4Scheme>(kBlocksOfFp4),
      AlongRows<NvFp4StochasticScheme>(kBlocksOfFp4Stochastic)};
  AddAlongColumns<TensorE4M3Scheme>(kTensorE4M3, entries);
  AddAlongColumns<TensorE5M2Scheme>(kTensorE5M2, entries);
  AddAlongColumns<Float8BlockScheme>(kBlocksOf128, entries);
  AddAlongColumns<MxFp8Scheme>(kBlocksOf32, entries);
  AddAlongColumns<NvFp4Scheme>(kBlocksOfFp4, entries);
  AddAlongColumns<NvFp4StochasticScheme>(kBlocksOfFp4Stochastic, entries);
  return entries;
}

}  // namespace ravel::kernels::cuda
