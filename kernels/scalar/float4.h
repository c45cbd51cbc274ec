#pragma once

// E2M1, the fp4 of OCP's "Microscaling Formats" 1.0, as codes of four bits: sign, then the
// magnitudes 0, 0.5, 1, 1.5, 2, 3, 4 and 6 in order. There is neither infinity nor NaN.

#include <bit>
#include <cstdint>

#include "kernels/scalar/float8.h"

namespace ravel::kernels::scalar {

// The sign of `bits` before a magnitude; NaN is 0x7, +6.
constexpr uint32_t E2M1Signed(uint32_t bits, uint32_t code) {
  return (bits & 0x7FFFFFFFu) > kInfinityBits ? 0x7u : code | ((bits >> 28) & 0x8u);
}

// To nearest, ties to even, ending at 6. The sign of zero stays.
constexpr uint32_t E2M1Nearest(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const float a = std::bit_cast<float>(bits & 0x7FFFFFFFu);
  // Codes rise by one per 0.5 below 2, per 1 below 4, per 2 below 6. Adding a number whose last bit
  // is that step rounds to it.
  const float step = a < 2.0f ? 0x1p22f : a < 4.0f ? 0x1p23f : 0x1p24f;
  const uint32_t first = a < 2.0f ? 0u : a < 4.0f ? 2u : 4u;
  const float capped = a < 6.0f ? a : 6.0f;
  const uint32_t code = std::bit_cast<uint32_t>(capped + step) - std::bit_cast<uint32_t>(step);
  return E2M1Signed(bits, first + code);
}

// Up with a probability that is the cut-off fraction, in units of 2^-8: `random8` is 8 random bits.
constexpr uint32_t E2M1Stochastic(float x, uint32_t random8) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const float a = std::bit_cast<float>(bits & 0x7FFFFFFFu);
  const float step = a < 2.0f ? 0.5f : a < 4.0f ? 1.0f : 2.0f;
  const float t = a + static_cast<float>(static_cast<int32_t>(random8)) * 0x1p-8f * step;
  // The largest magnitude that is at most t.
  const float capped = t < 6.0f ? t : 6.0f;
  const float steps_per_unit = t < 2.0f ? 2.0f : t < 4.0f ? 1.0f : 0.5f;
  const uint32_t first = t < 2.0f ? 0u : t < 4.0f ? 2u : 4u;
  const auto code = static_cast<uint32_t>(static_cast<int32_t>(capped * steps_per_unit));
  return E2M1Signed(bits, first + code);
}

constexpr float E2M1Value(uint32_t code) {
  const uint32_t magnitude = code & 0x7u;
  const uint32_t normal = (magnitude + (126u << 1)) << 22;
  const uint32_t subnormal = magnitude * std::bit_cast<uint32_t>(0.5f);  // 0 or 0.5
  return std::bit_cast<float>((magnitude < 2 ? subnormal : normal) | ((code & 0x8u) << 28));
}

// The value of E2M1Nearest(x) without the code.
constexpr float E2M1Rounded(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const float a = std::bit_cast<float>(bits & 0x7FFFFFFFu);
  const float step = a < 2.0f ? 0x1p22f : a < 4.0f ? 0x1p23f : 0x1p24f;
  const float capped = a < 6.0f ? a : 6.0f;
  const uint32_t rounded = std::bit_cast<uint32_t>((capped + step) - step);
  const uint32_t sign = (bits & 0x7FFFFFFFu) > kInfinityBits ? 0u : bits & 0x80000000u;
  return std::bit_cast<float>(rounded | sign);
}

}  // namespace ravel::kernels::scalar
