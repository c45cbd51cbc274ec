#pragma once

// Device functions that kernels share: bf16 and fp16, 16-byte packs, sums over a warp and a block
// in a fixed order.

#include <cstdint>

#include "kernels/cuda/device_intrinsics.cuh"

namespace ravel::kernels::cuda {

struct Bf16 {
  uint16_t bits;
};

struct Fp16 {
  uint16_t bits;
};

__device__ inline float ToFloat(float x) {
  return x;
}
__device__ inline float ToFloat(Bf16 x) {
  return __uint_as_float(uint32_t{x.bits} << 16);
}
__device__ inline float ToFloat(Fp16 x) {
  return Fp16ValueOf(x.bits);
}

template <typename T>
__device__ inline T FromFloat(float x);
template <>
__device__ inline float FromFloat<float>(float x) {
  return x;
}
template <>
__device__ inline Bf16 FromFloat<Bf16>(float x) {  // to nearest even
  return {Bf16NearestBits(x)};
}
template <>
__device__ inline Fp16 FromFloat<Fp16>(float x) {  // to nearest even; what is too large is infinite
  return {Fp16NearestBits(x)};
}

// Elements of a 16-byte access, or one.
template <typename T>
inline constexpr int kVectorOf = 16 / static_cast<int>(sizeof(T));

template <typename T, int kWidth>
struct alignas(sizeof(T) * kWidth) Pack {
  T elements[kWidth];
};

template <typename T, int kWidth>
__device__ inline void Load(const T* from, float (&to)[kWidth]) {
  const Pack<T, kWidth> pack = *reinterpret_cast<const Pack<T, kWidth>*>(from);
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    to[i] = ToFloat(pack.elements[i]);
  }
}

template <typename T, int kWidth>
__device__ inline void Store(T* to, const float (&from)[kWidth]) {
  Pack<T, kWidth> pack;
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    pack.elements[i] = FromFloat<T>(from[i]);
  }
  *reinterpret_cast<Pack<T, kWidth>*>(to) = pack;
}

// Over kLanes neighbouring lanes, in each of them.
template <int kLanes>
__device__ inline float SumOfLanes(float x) {
  return CombineLanes<kLanes>(x, [](float a, float b) { return a + b; });
}
template <int kLanes>
__device__ inline float MaxOfLanes(float x) {
  return CombineLanes<kLanes>(x, [](float a, float b) { return fmaxf(a, b); });
}
__device__ inline float SumOfWarp(float x) {
  return SumOfLanes<32>(x);
}
__device__ inline float MaxOfWarp(float x) {
  return MaxOfLanes<32>(x);
}

// The sum over a block of whole warps, in every thread. `shared` holds 32 floats, free again after
// the block's next barrier.
__device__ inline float SumOfBlock(float x, float* shared) {
  x = SumOfWarp(x);
  const int warps = static_cast<int>(blockDim.x) / 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (lane == 0) {
    shared[warp] = x;
  }
  __syncthreads();
  x = SumOfWarp(lane < warps ? shared[lane] : 0.0f);
  __syncthreads();
  return x;
}

__device__ inline float MaxOfBlock(float x, float* shared) {
  x = MaxOfWarp(x);
  const int warps = static_cast<int>(blockDim.x) / 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (lane == 0) {
    shared[warp] = x;
  }
  __syncthreads();
  x = MaxOfWarp(lane < warps ? shared[lane] : shared[0]);
  __syncthreads();
  return x;
}

}  // namespace ravel::kernels::cuda
