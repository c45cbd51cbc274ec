// AdamW over flat ranges: one read and one write of every byte, 28 bytes per element in fp32 (20
// with bf16 states and remainder), memory-bound. The trick is that there is none: 16-byte accesses,
// one division and one root per element hide behind memory.

#include "kernels/cuda/device_math.cuh"
#include "kernels/cuda/kernel_table.h"
#include "kernels/scalar/adamw.h"
#include "kernels/scalar/bfloat16.h"
#include "kernels/scalar/philox.h"

namespace ravel::kernels::cuda {
namespace {

template <int kWidth>
__global__ void __launch_bounds__(kFlatThreads) AdamWKernel(const __grid_constant__ AdamWParams p) {
  if (p.apply != nullptr && *p.apply == 0) {
    return;
  }
  const DeviceAdamWScalars scalars = p.device_scalars != nullptr ? *p.device_scalars : p.scalars;
  const int64_t step = int64_t{gridDim.x} * blockDim.x * kWidth;
  for (int64_t i = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) * kWidth; i < p.elements;
       i += step) {
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
}

// Elements [4q, 4q + 4) of the tensor share one draw, so a thread takes those: `begin` of them are
// before the range in the first group.
struct Group {
  int64_t first;  // index within the range of the group's element 0; may be negative
  uint64_t draw;
};

__device__ inline float MainWeightAt(const MixedAdamWParams& p, int64_t i) {
  return p.main_weight != nullptr
             ? p.main_weight[i]
             : scalar::JoinOf({.weight = p.weight[i], .remainder = p.remainder[i]});
}

__device__ inline void StoreMainWeight(const MixedAdamWParams& p, int64_t i, float x) {
  const scalar::SplitWeight split = scalar::SplitOf(x);
  if (p.main_weight != nullptr) {
    p.main_weight[i] = x;
  } else {
    p.remainder[i] = split.remainder;
  }
  if (p.weight != nullptr) {
    p.weight[i] = split.weight;
  }
}

// 16 random bits of element `lane` of a group: halves 4 to 7 round v.
__device__ inline uint32_t HalfFor(const scalar::PhiloxWords& words, int lane) {
  const uint32_t word = lane < 2 ? words[2] : words[3];
  return (lane & 1) != 0 ? word >> 16 : word & 0xFFFFu;
}

// G: type of the gradient, S: of the states.
template <typename G, typename S>
__device__ inline void UpdateElement(const MixedAdamWParams& p,
                                     const DeviceAdamWScalars& scalars,
                                     int64_t i,
                                     uint32_t random16) {
  S* m = static_cast<S*>(p.m) + i;
  S* v = static_cast<S*>(p.v) + i;
  const scalar::AdamWElement next =
      scalar::AdamWStep(scalars,
                        {MainWeightAt(p, i), ToFloat(*m), ToFloat(*v)},
                        ToFloat(static_cast<const G*>(p.g)[i]));
  StoreMainWeight(p, i, next.p);
  if constexpr (sizeof(S) == sizeof(float)) {
    *m = next.m;
    *v = next.v;
  } else {
    m->bits = scalar::Bf16Nearest(next.m);
    v->bits = scalar::Bf16Stochastic(next.v, random16);
  }
}

template <typename G, typename S>
__global__ void __launch_bounds__(kFlatThreads)
    MixedAdamWKernel(const __grid_constant__ MixedAdamWParams p) {
  if (p.apply != nullptr && *p.apply == 0) {
    return;
  }
  const DeviceAdamWScalars scalars = p.device_scalars != nullptr ? *p.device_scalars : p.scalars;
  const uint32_t key = p.device_step != nullptr ? static_cast<uint32_t>(*p.device_step) : p.step;
  const int64_t before = static_cast<int64_t>(p.first_index % 4);
  const int64_t groups = (before + p.elements + 3) / 4;
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t k = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; k < groups; k += step) {
    scalar::PhiloxWords words = {};
    if constexpr (sizeof(S) != sizeof(float)) {
      words = scalar::Philox4x32(
          p.seed,
          scalar::PhiloxCounter({.block = p.first_index / 4 + static_cast<uint64_t>(k),
                                 .step = key,
                                 .site = p.site,
                                 .purpose = scalar::PhiloxPurpose::kOptimizerState}));
    }
#pragma unroll
    for (int lane = 0; lane < 4; ++lane) {
      const int64_t i = 4 * k - before + lane;
      if (i >= 0 && i < p.elements) {
        UpdateElement<G, S>(p, scalars, i, HalfFor(words, lane));
      }
    }
  }
}

}  // namespace

std::vector<KernelEntry> AdamWKernels() {
  // The mixed kernel's variants: type of the gradient, then type of the states.
  return {EntryOf(Kernel::kAdamW, kF32Scalar, AdamWKernel<1>),
          EntryOf(Kernel::kAdamW, kF32Vector, AdamWKernel<kVectorOf<float>>),
          EntryOf(Kernel::kMixedAdamW, 0, MixedAdamWKernel<float, float>),
          EntryOf(Kernel::kMixedAdamW, 1, MixedAdamWKernel<float, Bf16>),
          EntryOf(Kernel::kMixedAdamW, 2, MixedAdamWKernel<Bf16, float>),
          EntryOf(Kernel::kMixedAdamW, 3, MixedAdamWKernel<Bf16, Bf16>)};
}

}  // namespace ravel::kernels::cuda
