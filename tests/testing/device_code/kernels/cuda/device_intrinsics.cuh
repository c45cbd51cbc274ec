#pragma once

// Found before the device's own file of this name.

#include <cstdint>

#include "kernels/scalar/bfloat16.h"

namespace ravel::kernels::cuda {

inline uint16_t Bf16NearestBits(float x) {
  return scalar::Bf16Nearest(x);
}

inline float* DynamicShared() {
  return simt::DynamicShared();
}

}  // namespace ravel::kernels::cuda
