#pragma once

// The scales of quantization by recipe. An amax is the bits of a magnitude (kernels/quantize.h). A
// code is made of mul(x, encode), and a decoded value is its code times `decode`.

#include <bit>
#include <cstdint>

#include "common/recipe.h"
#include "kernels/scalar/float8.h"
#include "kernels/scalar/fp8_state.h"

namespace ravel::kernels::scalar {

inline constexpr float kLargestE4M3Value = 448.0f;
inline constexpr float kLargestE5M2Value = 57344.0f;
inline constexpr uint32_t kLargestF32Bits = 0x7F7FFFFF;
inline constexpr uint32_t kLargestBf16Bits = 0x7F7F0000;  // as bits of an fp32

// largest: what the amax goes to. epsilon: the smallest amax. big: bits of the scale where the
// quotient is infinite.
struct ScaleRule {
  float largest = kLargestE4M3Value;
  bool power_of_two = false;
  float epsilon = 0;
  uint32_t big = kLargestF32Bits;
};

// div(largest, amax); 1 where the amax is 0 or not finite; a power of two is rounded down.
constexpr float ScaleOf(const ScaleRule& rule, uint32_t amax_bits) {
  const float given = std::bit_cast<float>(amax_bits);
  const float amax = given < rule.epsilon ? rule.epsilon : given;
  const uint32_t bits = std::bit_cast<uint32_t>(amax);
  const bool usable = bits != 0 && bits < kInfinityBits;
  const uint32_t quotient = std::bit_cast<uint32_t>(rule.largest / (usable ? amax : 1.0f));
  const uint32_t finite = quotient >= kInfinityBits ? rule.big : quotient;
  const uint32_t scale = rule.power_of_two ? finite & 0x7F800000u : finite;
  return usable ? std::bit_cast<float>(scale) : 1.0f;
}

// x, or FLT_MAX where it is more; NaN stays NaN.
constexpr float AtMostLargest(float x) {
  constexpr float kLargest = std::bit_cast<float>(kLargestF32Bits);
  return x > kLargest ? kLargest : x;
}

struct Scales {
  float encode = 1;
  float decode = 1;
};

// NVFP4: the first of two levels, for the domain of the amax: div(2688, amax), 2688 = 6 * 448. Its
// decode is mul(amax, 1 / 2688).
constexpr Scales NvFp4TensorScales(uint32_t amax_bits) {
  constexpr float kOneOver2688 = std::bit_cast<float>(0x39C30C31u);
  const float amax = std::bit_cast<float>(amax_bits);
  const float quotient = AtMostLargest(2688.0f / (amax_bits == 0 ? 2688.0f : amax));
  return {quotient == 0 ? 1.0f : quotient, amax * kOneOver2688};
}

// NVFP4: the second, as E4M3, for blocks under a first level of encode `tensor`.
constexpr uint32_t NvFp4BlockCode(uint32_t amax_bits, float tensor) {
  constexpr float kOneOver6 = std::bit_cast<float>(0x3E2AAAABu);
  return E4M3::NearestCode(AtMostLargest(std::bit_cast<float>(amax_bits) * (tensor * kOneOver6)));
}
constexpr Scales NvFp4BlockScales(uint32_t amax_bits, float tensor) {
  const float decode = E4M3::ValueOfCode(NvFp4BlockCode(amax_bits, tensor));
  return {AtMostLargest(1.0f / (decode * (1.0f / tensor))), decode};
}

// MXFP8: the exponent is rounded up, so nothing exceeds 448.
constexpr uint8_t MxFp8BlockCode(uint32_t amax_bits) {
  return E8M0RoundUp(std::bit_cast<float>(amax_bits) * std::bit_cast<float>(kOneOver448));
}

// What codes of a whole tensor are multiplied by, and what an operand takes as GemmArgs::scale_a.
// kDelayed: as kCurrent, where no history gives a scale.
constexpr Scales TensorScales(plan::Recipe recipe, uint32_t amax_bits, float largest) {
  switch (recipe) {
    case plan::Recipe::kNvFp4:
      return NvFp4TensorScales(amax_bits);
    case plan::Recipe::kDelayed:
    case plan::Recipe::kCurrent: {
      const float encode = ScaleOf({.largest = largest}, amax_bits);
      return {encode, 1.0f / encode};
    }
    default:
      return {};
  }
}

// The E8M0 code of a decode scale of kFloat8Block: 2^k for k from -127, which is no normal number,
// to 127.
constexpr uint8_t E8M0OfPowerOfTwo(float decode) {
  constexpr int kMantissaBits = 23;
  return static_cast<uint8_t>(std::bit_cast<uint32_t>(decode) >> kMantissaBits);
}

// The scales of a block of that amax. tensor: TensorScales' encode; big: ScaleRule's.
template <plan::Recipe kRecipe>
constexpr Scales BlockScales(uint32_t amax_bits, float tensor, uint32_t big) {
  if constexpr (kRecipe == plan::Recipe::kNvFp4) {
    return NvFp4BlockScales(amax_bits, tensor);
  } else if constexpr (kRecipe == plan::Recipe::kMxFp8) {
    const uint8_t code = MxFp8BlockCode(amax_bits);
    return {E8M0Multiplier(code), E8M0Value(code)};
  } else if constexpr (kRecipe == plan::Recipe::kFloat8Block) {
    const float encode = ScaleOf({.power_of_two = true, .big = big}, amax_bits);
    return {encode, 1.0f / encode};
  } else {
    return {tensor, 1.0f};
  }
}

// The scales of a whole weight. delayed_encode: of kDelayed; 0, which a history of zeros gives,
// counts as 1. amax_bits: of the domain.
constexpr Scales WeightTensorScales(plan::Recipe recipe, uint32_t amax_bits, float delayed_encode) {
  if (recipe == plan::Recipe::kDelayed) {
    const float encode = delayed_encode == 0.0f ? 1.0f : delayed_encode;
    return {encode, 1.0f / encode};
  }
  return TensorScales(recipe, amax_bits, kLargestE4M3Value);
}

// The scales of a weight's block, where the recipe has blocks, under those of the whole.
constexpr Scales WeightBlockScales(plan::Recipe recipe, uint32_t amax_bits, float tensor) {
  switch (recipe) {
    case plan::Recipe::kFloat8Block:
      return BlockScales<plan::Recipe::kFloat8Block>(amax_bits, tensor, kLargestF32Bits);
    case plan::Recipe::kMxFp8:
      return BlockScales<plan::Recipe::kMxFp8>(amax_bits, tensor, kLargestF32Bits);
    case plan::Recipe::kNvFp4:
      return BlockScales<plan::Recipe::kNvFp4>(amax_bits, tensor, kLargestF32Bits);
    default:
      return {tensor, 1.0f};
  }
}

}  // namespace ravel::kernels::scalar
