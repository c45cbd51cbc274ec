#pragma once

// Schemes of quantization as device code: how a scheme makes codes and values, and the scales of a
// tensor and of its blocks. Rules are those of kernels/scalar.

#include <cstdint>

#include "kernels/cuda/device_math.cuh"
#include "kernels/cuda/kernel_params.h"
#include "kernels/scalar/block_scales.h"
#include "kernels/scalar/float4.h"

namespace ravel::kernels::cuda {

struct E4M3Codes {
  static constexpr int kPerByte = 1;
  static constexpr bool kDraws = false;
  static constexpr float kLargest = scalar::kLargestE4M3Value;
  __device__ static uint32_t Code(float x, uint32_t) { return scalar::E4M3::NearestCode(x); }
  __device__ static float Value(uint32_t code) { return scalar::E4M3::ValueOfCode(code); }
};
struct E5M2Codes {
  static constexpr int kPerByte = 1;
  static constexpr bool kDraws = false;
  static constexpr float kLargest = scalar::kLargestE5M2Value;
  __device__ static uint32_t Code(float x, uint32_t) { return scalar::E5M2::NearestCode(x); }
  __device__ static float Value(uint32_t code) { return scalar::E5M2::ValueOfCode(code); }
};
struct E2M1Codes {
  static constexpr int kPerByte = 2;
  static constexpr bool kDraws = false;
  static constexpr float kLargest = 0;  // not a format of one scale
  __device__ static uint32_t Code(float x, uint32_t) { return scalar::E2M1Nearest(x); }
  __device__ static float Value(uint32_t code) { return scalar::E2M1Value(code); }
};
struct E2M1StochasticCodes : E2M1Codes {
  static constexpr bool kDraws = true;
  __device__ static uint32_t Code(float x, uint32_t random8) {
    return scalar::E2M1Stochastic(x, random8);
  }
};

// kEdge 0: the tensor is one block.
template <plan::Recipe kRecipeOf, typename CodesOf>
struct Scheme {
  static constexpr plan::Recipe kRecipe = kRecipeOf;
  static constexpr int kEdge = static_cast<int>(plan::BlockEdge(kRecipeOf));
  using Codes = CodesOf;

  __device__ static scalar::Scales OfBlock(uint32_t amax, float tensor, uint32_t big) {
    return scalar::BlockScales<kRecipe>(amax, tensor, big);
  }
};
using TensorE4M3Scheme = Scheme<plan::Recipe::kCurrent, E4M3Codes>;
using TensorE5M2Scheme = Scheme<plan::Recipe::kCurrent, E5M2Codes>;
using Float8BlockScheme = Scheme<plan::Recipe::kFloat8Block, E4M3Codes>;
using MxFp8Scheme = Scheme<plan::Recipe::kMxFp8, E4M3Codes>;
using NvFp4Scheme = Scheme<plan::Recipe::kNvFp4, E2M1Codes>;
using NvFp4StochasticScheme = Scheme<plan::Recipe::kNvFp4, E2M1StochasticCodes>;

__device__ inline uint32_t MaxOf(uint32_t a, uint32_t b) {
  return a < b ? b : a;
}

// kQuantizeWidth elements, from an address that four of them align.
__device__ inline void LoadWidth(const Bf16* from, float (&x)[kQuantizeWidth]) {
  constexpr int kHalf = kQuantizeWidth / 2;
  float low[kHalf];
  float high[kHalf];
  Load<Bf16, kHalf>(from, low);
  Load<Bf16, kHalf>(from + kHalf, high);
#pragma unroll
  for (int i = 0; i < kHalf; ++i) {
    x[i] = low[i];
    x[kHalf + i] = high[i];
  }
}

__device__ inline uint32_t AmaxOf(const float (&x)[kQuantizeWidth]) {
  uint32_t amax = 0;
#pragma unroll
  for (int i = 0; i < kQuantizeWidth; ++i) {
    amax = MaxOf(amax, scalar::MagnitudeBits(x[i]));
  }
  return amax;
}

// The largest of kLanes neighbouring lanes, in each of them.
template <int kLanes>
__device__ inline uint32_t AmaxOfLanes(uint32_t amax) {
  if constexpr (kLanes == 1) {
    return amax;
  } else {
    return CombineLanes<kLanes>(amax, [](uint32_t a, uint32_t b) { return a < b ? b : a; });
  }
}

}  // namespace ravel::kernels::cuda
