#pragma once

// Found before the device's own file of this name.

#include <array>
#include <cstdint>
#include <cstring>

#include "kernels/scalar/bfloat16.h"
#include "kernels/scalar/float16.h"

namespace ravel::kernels::cuda {

inline uint16_t Bf16NearestBits(float x) {
  return scalar::Bf16Nearest(x);
}

inline uint16_t Fp16NearestBits(float x) {
  return scalar::Fp16Nearest(x);
}

inline float Fp16ValueOf(uint16_t bits) {
  return scalar::Fp16Value(bits);
}

// All exchanges of the tree at once, by the last lane that comes: lanes that wait are what costs
// here.
template <int kLanes, typename T, typename Combine>
inline T CombineLanes(T x, Combine) {
  uint64_t bits = 0;
  std::memcpy(&bits, &x, sizeof(T));
  bits = simt::GatherWarp(bits, [](uint64_t* lanes) {
    std::array<T, 32> values;
    for (size_t i = 0; i < 32; ++i) {
      std::memcpy(&values[i], &lanes[i], sizeof(T));
    }
    for (size_t group = 0; group < 32; group += kLanes) {
      for (size_t step = kLanes / 2; step > 0; step /= 2) {
        for (size_t i = group; i < group + step; ++i) {
          values[i] = Combine()(values[i], values[i + step]);
        }
      }
      for (size_t i = group; i < group + kLanes; ++i) {
        std::memcpy(&lanes[i], &values[group], sizeof(T));
      }
    }
  })[threadIdx.x % 32];
  std::memcpy(&x, &bits, sizeof(T));
  return x;
}

inline float* DynamicShared() {
  return simt::DynamicShared();
}

}  // namespace ravel::kernels::cuda
