#pragma once

// bf16 as bits: its roundings, and a bf16 weight with the 16 bits that make it an exact fp32.

#include <bit>
#include <cstdint>

namespace ravel::kernels::scalar {

constexpr float Bf16Value(uint16_t bits) {
  return std::bit_cast<float>(uint32_t{bits} << 16);
}

// To nearest, ties to even; NaN stays NaN. Activations, gradients on a wire, first moments.
constexpr uint16_t Bf16Nearest(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) {
    return 0x7FFF;
  }
  return static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

// To nearest, ties away from zero: model weights from main weights, in both forms of main weights.
constexpr uint16_t Bf16HalfAway(float x) {
  return static_cast<uint16_t>((std::bit_cast<uint32_t>(x) + 0x8000u) >> 16);
}

// Up with a probability that is the cut-off fraction: `random16` is 16 random bits. The magnitude
// ends at the largest finite value. NaN stays NaN.
constexpr uint16_t Bf16Stochastic(float x, uint32_t random16) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) {
    return 0x7FFF;
  }
  const uint32_t rounded = (magnitude + random16) >> 16;
  return static_cast<uint16_t>((rounded < 0x7F7Fu ? rounded : 0x7F7Fu) | ((bits >> 16) & 0x8000u));
}

// weight = the fp32 rounded half away, remainder = its low 16 bits: a bijection on finite values.
struct SplitWeight {
  uint16_t weight;
  int16_t remainder;
};
constexpr SplitWeight SplitOf(float x) {
  return {Bf16HalfAway(x), static_cast<int16_t>(std::bit_cast<uint32_t>(x) & 0xFFFFu)};
}
constexpr float JoinOf(SplitWeight split) {
  const uint32_t high = uint32_t{split.weight} - (split.remainder < 0 ? 1u : 0u);
  return std::bit_cast<float>((high << 16) | static_cast<uint16_t>(split.remainder));
}

}  // namespace ravel::kernels::scalar
