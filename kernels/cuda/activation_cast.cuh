#pragma once

// The cast of an activation as device code: the scales of its tensor, and the random bits of its
// elements.

#include <cstdint>

#include "kernels/cuda/code_schemes.cuh"
#include "kernels/scalar/philox.h"

namespace ravel::kernels::cuda {

// The tensor's scales, in every thread. One thread of the grid writes what is known of the tensor.
template <typename S>
__device__ inline float BeginTensor(const QuantizeActivationParams& p) {
  scalar::Scales scales = {};
  const uint32_t amax = p.amax != nullptr ? *p.amax : 0;
  if constexpr (S::kRecipe == plan::Recipe::kNvFp4) {
    scales = scalar::NvFp4TensorScales(amax);
  } else if constexpr (S::kEdge == 0) {
    const float given = p.encode != nullptr ? *p.encode : 0.0f;
    scales = given != 0.0f ? scalar::Scales{given, 1.0f / given}
                           : scalar::TensorScales(S::kRecipe, amax, S::Codes::kLargest);
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    *p.scale = scales.decode;
    if (p.staged != nullptr) {
      *p.staged = MaxOf(*p.staged, amax);
    }
    if (p.non_finite != nullptr && amax >= scalar::kInfinityBits) {
      atomicOr(p.non_finite, 1u);
    }
  }
  return scales.encode;
}

// The draw of elements [16 * block, 16 * block + 16) of a sample.
__device__ inline scalar::PhiloxWords DrawAt(const QuantizeActivationParams& p,
                                             int64_t row,
                                             uint64_t block) {
  return scalar::Philox4x32(
      p.seed,
      scalar::PhiloxCounter(
          {.block = block,
           .sample = p.first_sample + static_cast<uint32_t>(row / p.sequence_tokens),
           .step = p.device_step != nullptr ? static_cast<uint32_t>(*p.device_step) : p.step,
           .site = p.site,
           .piece = p.piece,
           .purpose = static_cast<scalar::PhiloxPurpose>(p.purpose)}));
}

// Words of the draw that hold the bytes of kQuantizeWidth elements from `column` on: rows are whole
// draws.
struct HalfDraw {
  uint32_t words[2] = {0, 0};
};
template <typename S>
__device__ inline HalfDraw DrawHalf(const QuantizeActivationParams& p,
                                    int64_t row,
                                    int64_t column) {
  if constexpr (!S::Codes::kDraws) {
    return {};
  } else {
    const auto index = static_cast<uint64_t>(row % p.sequence_tokens * p.columns + column);
    const scalar::PhiloxWords words = DrawAt(p, row, index / 16);
    const bool upper = index % 16 != 0;
    return {{upper ? words[2] : words[0], upper ? words[3] : words[1]}};
  }
}

// The index of an element within its sample.
__device__ inline int64_t IndexOf(const QuantizeActivationParams& p, int64_t row, int64_t column) {
  return row % p.sequence_tokens * p.columns + column;
}

}  // namespace ravel::kernels::cuda
