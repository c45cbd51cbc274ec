#pragma once

// Optimizer states as fp8: codes with one power of two, in E8M0, for each group of elements. An
// average of gradients is E4M3. An average of squares, which has no sign, is UE5M3: neighbours are
// an eighth apart, and their roots a sixteenth, over a range of 2^31. Both are rounded
// stochastically: to nearest, a slow average would stop where a step is below half a code. An
// all-zero group has scale 2^-127 and codes 0; nothing divides. Where a value of a group is NaN,
// its scale is NaN and its codes are 0: no code is NaN, and those that are in the formats are read
// as if they were values.

#include <bit>
#include <cstdint>

#include "kernels/scalar/float8.h"

namespace ravel::kernels::scalar {

inline constexpr uint32_t kLargestE4M3 = 0x7E;  // 448
inline constexpr uint32_t kOneOver448 = 0x3B124925;

inline constexpr uint8_t kNanScale = 255;

constexpr uint32_t MagnitudeBits(float x) {
  return std::bit_cast<uint32_t>(x) & 0x7FFFFFFFu;
}

// The scale of a group whose largest magnitude has these bits: the smallest power of two that
// brings it to 448 or below.
constexpr uint8_t ScaleOfMeans(uint32_t amax_bits) {
  return E8M0RoundUp(std::bit_cast<float>(amax_bits) * std::bit_cast<float>(kOneOver448));
}
// random16: 16 random bits.
constexpr uint8_t EncodeMean(float m, uint8_t scale, uint32_t random16) {
  return scale == kNanScale ? uint8_t{0} : E4M3Stochastic(m * E8M0Multiplier(scale), random16);
}
constexpr float DecodeMean(uint8_t code, uint8_t scale) {
  const uint32_t magnitude = code & 0x7Fu;
  const float value = magnitude < 8 ? static_cast<float>(magnitude) * 0x1p-9f
                                    : std::bit_cast<float>((magnitude + E4M3::kRebias) << 20);
  return (code >= 0x80 ? -value : value) * E8M0Value(scale);
}

// The same of a group of squares, of which the largest code is 448 * 2^8.
constexpr uint8_t ScaleOfSquares(uint32_t amax_bits) {
  return E8M0RoundUp(std::bit_cast<float>(amax_bits) *
                     (std::bit_cast<float>(kOneOver448) * 0x1p-8f));
}
// v >= 0. A v above 0 is never 0: a root of zero under a live mean would be a step without bound.
constexpr uint8_t EncodeSquare(float v, uint8_t scale, uint32_t random16) {
  const uint8_t code =
      scale == kNanScale ? uint8_t{0} : UE5M3Stochastic(v * E8M0Multiplier(scale), random16);
  return code == 0 && v > 0 && scale != kNanScale ? uint8_t{1} : code;
}
constexpr float DecodeSquare(uint8_t code, uint8_t scale) {
  return UE5M3Value(code) * E8M0Value(scale);
}

}  // namespace ravel::kernels::scalar
