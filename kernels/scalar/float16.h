#pragma once

// fp16 (IEEE 754 binary16) as bits: what the F16C instructions of x86 give, in integers.

#include <bit>
#include <cstdint>

namespace ravel::kernels::scalar {

// Exact. A NaN becomes a quiet one with the same sign and payload.
constexpr float Fp16Value(uint16_t half) {
  const uint32_t sign = uint32_t{half & 0x8000u} << 16;
  const uint32_t magnitude = half & 0x7FFFu;
  if (magnitude < 0x0400u) {  // zero and subnormals: a multiple of 2^-24
    const float value = static_cast<float>(magnitude) * 0x1p-24f;
    return std::bit_cast<float>(std::bit_cast<uint32_t>(value) | sign);
  }
  if (magnitude >= 0x7C00u) {
    const uint32_t quiet = magnitude > 0x7C00u ? 0x00400000u : 0u;
    return std::bit_cast<float>(sign | 0x7F800000u | (magnitude << 13) | quiet);
  }
  return std::bit_cast<float>(sign | ((magnitude << 13) + (112u << 23)));
}

// To nearest, ties to even, subnormals kept; from 65520 on an infinity; NaN stays NaN.
constexpr uint16_t Fp16Nearest(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  // Beside 0.5 an fp32 ends where the subnormals of fp16 do, at 2^-24.
  const float small = std::bit_cast<float>(magnitude < 0x38800000u ? magnitude : 0u) + 0.5f;
  const uint32_t subnormal = std::bit_cast<uint32_t>(small) - 0x3F000000u;
  const uint32_t rounded = (magnitude + 0xFFFu + ((magnitude >> 13) & 1u) - (112u << 23)) >> 13;
  const uint32_t finite = magnitude < 0x38800000u ? subnormal : rounded;
  const uint32_t nan = 0x7E00u | ((magnitude >> 13) & 0x03FFu);
  const uint32_t huge = magnitude > 0x7F800000u ? nan : 0x7C00u;
  return static_cast<uint16_t>((magnitude < 0x477FF000u ? finite : huge) |
                               ((bits >> 16) & 0x8000u));
}

}  // namespace ravel::kernels::scalar
