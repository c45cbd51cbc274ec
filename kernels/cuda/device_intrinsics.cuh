#pragma once

// Intrinsics that only a device compiler has. Tests that run device code on the host bring their
// own (tests/testing/device_code).

#include <cstdint>

namespace ravel::kernels::cuda {

// bf16 of an fp32, to nearest even.
__device__ inline uint16_t Bf16NearestBits(float x) {
  uint16_t bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bits;
}

// fp16 of an fp32, to nearest even, and back, exactly.
__device__ inline uint16_t Fp16NearestBits(float x) {
  uint16_t bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bits;
}
__device__ inline float Fp16ValueOf(uint16_t bits) {
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
  return x;
}

// Combines the values of kLanes neighbouring lanes pairwise, in the same tree for each of them;
// `combine` is commutative.
template <int kLanes, typename T, typename Combine>
__device__ inline T CombineLanes(T x, Combine combine) {
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2) {
    x = combine(x, __shfl_xor_sync(0xFFFFFFFFu, x, step));
  }
  return x;
}

// The block's dynamic shared memory.
__device__ inline float* DynamicShared() {
  extern __shared__ float shared[];
  return shared;
}

}  // namespace ravel::kernels::cuda
