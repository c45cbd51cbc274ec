// Updates over a table of pieces, AdamW in fp32 and every rule in mixed types: one launch for all
// tensors of a group, one read and one write of every byte, 28 bytes per element in fp32 (20 with
// bf16 states and remainder), memory-bound. Blocks take pieces of at most kBlockElements in turns;
// a piece's record is 32 bytes beside 80 KiB of elements or more. 16-byte accesses; one division
// and one root per element hide behind memory.

#include "kernels/cuda/kernel_table.h"
#include "kernels/cuda/update_pieces.cuh"
#include "kernels/scalar/philox.h"
#include "kernels/scalar/update_rules.h"

namespace ravel::kernels::cuda {
namespace {

template <int kWidth>
__device__ inline void UpdatePack(const AdamWParams& p,
                                  const DeviceUpdateScalars& scalars,
                                  int64_t i) {
  float weight[kWidth];
  float g[kWidth];
  float m[kWidth];
  float v[kWidth];
  Load<float, kWidth>(p.p + i, weight);
  Load<float, kWidth>(p.g + i, g);
  Load<float, kWidth>(p.m + i, m);
  Load<float, kWidth>(p.v + i, v);
#pragma unroll
  for (int j = 0; j < kWidth; ++j) {
    const scalar::AdamWElement next = scalar::AdamWStep(scalars, {weight[j], m[j], v[j]}, g[j]);
    weight[j] = next.p;
    m[j] = next.m;
    v[j] = next.v;
  }
  Store<float, kWidth>(p.p + i, weight);
  Store<float, kWidth>(p.m + i, m);
  Store<float, kWidth>(p.v + i, v);
}

// kWidth above 1: the ranges begin at 16 bytes. Pieces that do not, and ends, go one by one.
template <int kWidth>
__global__ void __launch_bounds__(kFlatThreads) AdamWKernel(const __grid_constant__ AdamWParams p) {
  if (p.apply != nullptr && *p.apply == 0) {
    return;
  }
  const DeviceUpdateScalars of_step = p.device_scalars != nullptr ? *p.device_scalars : p.scalars;
  for (int64_t index = blockIdx.x; index < p.pieces.count; index += gridDim.x) {
    const DeviceUpdatePiece piece = PieceAt(p.pieces, index);
    const DeviceUpdateScalars scalars = ScalarsFor(piece, of_step);
    const bool packs = kWidth > 1 && piece.offset % kWidth == 0;
    const int64_t packed = packs ? piece.elements / kWidth * kWidth : 0;
    const int64_t step = int64_t{blockDim.x} * kWidth;
    for (int64_t i = int64_t{threadIdx.x} * kWidth; i < packed; i += step) {
      UpdatePack<kWidth>(p, scalars, piece.offset + i);
    }
    for (int64_t i = packed + threadIdx.x; i < piece.elements; i += blockDim.x) {
      UpdatePack<1>(p, scalars, piece.offset + i);
    }
  }
}

// 16 random bits of element `lane` of a group: halves 4 to 7 round v.
__device__ inline uint32_t HalfFor(const scalar::PhiloxWords& words, int lane) {
  const uint32_t word = lane < 2 ? words[2] : words[3];
  return (lane & 1) != 0 ? word >> 16 : word & 0xFFFFu;
}

// G: type of the gradient, S: of the states.
template <typename Rule, typename G, typename S>
__device__ inline void UpdateElement(const ElementUpdateParams& p,
                                     const DeviceUpdateScalars& scalars,
                                     int64_t i,
                                     uint32_t random16) {
  constexpr bool kTwo = Rule::kStates > 1;
  S* m = static_cast<S*>(p.m) + i;
  S* v = static_cast<S*>(p.v) + (kTwo ? i : 0);
  const scalar::AdamWElement next =
      Rule::Step(scalars,
                 {MainWeightAt(p, i), ToFloat(*m), kTwo ? ToFloat(*v) : 0.0f},
                 ToFloat(static_cast<const G*>(p.g)[i]));
  StoreMainWeight(p, i, next.p);
  if constexpr (sizeof(S) == sizeof(float)) {
    *m = next.m;
    if constexpr (kTwo) {
      *v = next.v;
    }
  } else {
    m->bits = scalar::Bf16Nearest(next.m);
    if constexpr (kTwo) {
      v->bits = scalar::Bf16Stochastic(next.v, random16);
    }
  }
}

// Elements [4q, 4q + 4) of the tensor share one draw, so a thread takes those; `before` of them are
// before the piece in its first group.
template <typename Rule, typename G, typename S>
__device__ inline void UpdateElements(const ElementUpdateParams& p,
                                      const DeviceUpdateScalars& scalars,
                                      const DeviceUpdatePiece& piece,
                                      uint32_t key) {
  const int64_t before = piece.first_index % 4;
  const int64_t groups = (before + piece.elements + 3) / 4;
  for (int64_t k = threadIdx.x; k < groups; k += blockDim.x) {
    scalar::PhiloxWords words = {};
    if constexpr (sizeof(S) != sizeof(float)) {
      words = scalar::Philox4x32(
          p.seed,
          scalar::PhiloxCounter({.block = static_cast<uint64_t>(piece.first_index / 4 + k),
                                 .step = key,
                                 .site = piece.site,
                                 .purpose = scalar::PhiloxPurpose::kOptimizerState}));
    }
#pragma unroll
    for (int lane = 0; lane < 4; ++lane) {
      const int64_t i = 4 * k - before + lane;
      if (i >= 0 && i < piece.elements) {
        UpdateElement<Rule, G, S>(p, scalars, piece.offset + i, HalfFor(words, lane));
      }
    }
  }
}

template <typename Rule, typename G, typename S>
__global__ void __launch_bounds__(kFlatThreads)
    ElementUpdateKernel(const __grid_constant__ ElementUpdateParams p) {
  if (p.apply != nullptr && *p.apply == 0) {
    return;
  }
  const DeviceUpdateScalars of_step = p.device_scalars != nullptr ? *p.device_scalars : p.scalars;
  const uint32_t key = p.device_step != nullptr ? static_cast<uint32_t>(*p.device_step) : p.step;
  for (int64_t index = blockIdx.x; index < p.pieces.count; index += gridDim.x) {
    const DeviceUpdatePiece piece = PieceAt(p.pieces, index);
    UpdateElements<Rule, G, S>(p, ScalarsFor(piece, of_step), piece, key);
  }
}

template <typename Rule>
void AddRule(std::vector<KernelEntry>& entries) {
  static_assert(scalar::VariantOf<Rule>(true, Rule::kNarrowStates) < kKernelVariants);
  const auto add = [&](bool bf16_gradient, bool bf16_states, auto* kernel) {
    const int variant = scalar::VariantOf<Rule>(bf16_gradient, bf16_states);
    entries.push_back(EntryOf(Kernel::kElementUpdate, variant, kernel));
  };
  add(false, false, ElementUpdateKernel<Rule, float, float>);
  add(true, false, ElementUpdateKernel<Rule, Bf16, float>);
  if constexpr (Rule::kNarrowStates) {
    add(false, true, ElementUpdateKernel<Rule, float, Bf16>);
    add(true, true, ElementUpdateKernel<Rule, Bf16, Bf16>);
  }
}

}  // namespace

std::vector<KernelEntry> AdamWKernels() {
  std::vector<KernelEntry> entries = {
      EntryOf(Kernel::kAdamW, kF32Scalar, AdamWKernel<1>),
      EntryOf(Kernel::kAdamW, kF32Vector, AdamWKernel<kVectorOf<float>>)};
  scalar::ForEachRule([&](auto rule) { AddRule<decltype(rule)>(entries); });
  return entries;
}

}  // namespace ravel::kernels::cuda
