#pragma once

// One element's share of digest64: the mixed value of its bits and its global index.

#include <cstdint>

namespace ravel::kernels::scalar {

inline constexpr uint64_t kDigestStride = 0x9E3779B97F4A7C15u;
inline constexpr uint64_t kDigestMultiplier1 = 0xFF51AFD7ED558CCDu;
inline constexpr uint64_t kDigestMultiplier2 = 0xC4CEB9FE1A85EC53u;

constexpr uint64_t DigestMix(uint64_t x) {
  x ^= x >> 33;
  x *= kDigestMultiplier1;
  x ^= x >> 33;
  x *= kDigestMultiplier2;
  x ^= x >> 33;
  return x;
}

// index: row-major position in the whole tensor. bits: the stored element as an unsigned integer.
constexpr uint64_t DigestElement(uint64_t index, uint64_t bits) {
  return DigestMix(((index + 1) * kDigestStride) ^ bits);
}

}  // namespace ravel::kernels::scalar
