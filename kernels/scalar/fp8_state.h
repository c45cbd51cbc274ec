#pragma once

// Optimizer states as fp8: codes in E4M3 with one power of two, in E8M0, for each group of
// elements. An average of gradients is its code times the scale; an average of squares is kept as
// the square of that, which doubles the range of its exponents. Both are rounded stochastically,
// the second without bias in the square: to nearest, a slow average would stop where a step is
// below half a code. An all-zero group has scale 2^-127 and codes 0; nothing divides.

#include <bit>
#include <cmath>
#include <cstdint>

#include "kernels/scalar/float8.h"

namespace ravel::kernels::scalar {

inline constexpr uint32_t kLargestE4M3 = 0x7E;  // 448
inline constexpr uint32_t kOneOver448 = 0x3B124925;

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
  return E4M3Stochastic(m * E8M0Multiplier(scale), random16);
}
constexpr float DecodeMean(uint8_t code, uint8_t scale) {
  return E4M3Value(code) * E8M0Value(scale);
}

// The same of a group of squares, for their roots.
template <typename Bits>
constexpr uint8_t ScaleOfSquares(Bits amax_bits) {
  return E8M0RoundUp(std::sqrt(std::bit_cast<float>(amax_bits)) *
                     std::bit_cast<float>(kOneOver448));
}

// The largest code whose value is at most x, for x >= 0; at most 448.
constexpr uint32_t E4M3AtMost(float x) {
  constexpr uint32_t kSmallestNormal = 0x3C800000u;  // 2^-6
  constexpr uint32_t kRebias = 120u << 3;            // 127 - 7, above three bits of mantissa
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint32_t code = bits < kSmallestNormal
                            ? static_cast<uint32_t>(static_cast<int32_t>(x * 512.0f))
                            : (bits >> 20) - kRebias;
  return code < kLargestE4M3 ? code : kLargestE4M3;
}

// The code below or above the root of v in units of the scale, by chance so that its square is v on
// average: above with the share of (v - low^2) in (high^2 - low^2), in units of 2^-16. A v above 0
// is never 0: a root of zero under a live mean would be a step without bound.
template <typename Value>
constexpr uint8_t EncodeSquare(Value v, uint8_t scale, uint32_t random16) {
  const float k = E8M0Multiplier(scale);
  const float x = v * k * k;
  const auto square = [](uint32_t code) {
    const float value = E4M3Value(static_cast<uint8_t>(code));
    return value * value;
  };
  uint32_t code = E4M3AtMost(std::sqrt(x));
  code -= code > 0 && square(code) > x ? 1u : 0u;
  const float low = square(code);
  if (code < kLargestE4M3) {
    const float gap = square(code + 1) - low;
    code += static_cast<float>(static_cast<int32_t>(random16)) * 0x1p-16f * gap < x - low ? 1u : 0u;
  }
  return static_cast<uint8_t>(code == 0 && v > 0 ? 1u : code);
}
constexpr float DecodeSquare(uint8_t code, uint8_t scale) {
  const float root = E4M3Value(code) * E8M0Value(scale);
  return root * root;
}

}  // namespace ravel::kernels::scalar
