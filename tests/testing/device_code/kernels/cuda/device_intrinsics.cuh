#pragma once

// Found before the device's own file of this name.

#include <array>
#include <cstdint>
#include <cstring>

#include "kernels/scalar/bfloat16.h"

namespace ravel::kernels::cuda {

inline uint16_t Bf16NearestBits(float x) {
  return scalar::Bf16Nearest(x);
}

// All exchanges of the tree at once: lanes that wait are what costs here.
template <int kLanes, typename T, typename Combine>
inline T CombineLanes(T x, Combine combine) {
  uint64_t bits = 0;
  std::memcpy(&bits, &x, sizeof(T));
  const uint64_t* group = simt::GatherWarp(bits) + threadIdx.x % 32 / kLanes * kLanes;
  std::array<T, kLanes> values;
  for (size_t i = 0; i < kLanes; ++i) {
    std::memcpy(&values[i], &group[i], sizeof(T));
  }
  for (size_t step = kLanes / 2; step > 0; step /= 2) {
    for (size_t i = 0; i < step; ++i) {
      values[i] = combine(values[i], values[i + step]);
    }
  }
  return values[0];
}

inline float* DynamicShared() {
  return simt::DynamicShared();
}

}  // namespace ravel::kernels::cuda
