#pragma once

// Four 32-bit lanes: two groups of two states (update_codes.h). Only files compiled with AVX2
// include this. In an unnamed namespace: each instruction set has its own copy.

#include <cstdint>
#include <cstring>

#include <immintrin.h>

namespace ravel::kernels::cpu {
namespace {

struct Four {
  using I = __m128i;

  static I Set(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    return _mm_set_epi32(static_cast<int32_t>(d),
                         static_cast<int32_t>(c),
                         static_cast<int32_t>(b),
                         static_cast<int32_t>(a));
  }
  static I Set(uint32_t x) { return Set(x, x, x, x); }
  static I Add(I a, I b) { return _mm_add_epi32(a, b); }
  static I Or(I a, I b) { return _mm_or_si128(a, b); }
  static I And(I a, I b) { return _mm_and_si128(a, b); }
  template <int kBits>
  static I Left(I x) {
    return _mm_slli_epi32(x, kBits);
  }
  template <int kBits>
  static I Right(I x) {
    return _mm_srli_epi32(x, kBits);
  }
  // The product of floats.
  static I Times(I a, I b) {
    return _mm_castps_si128(_mm_mul_ps(_mm_castsi128_ps(a), _mm_castsi128_ps(b)));
  }
  // Ones in lanes where a > b, as signed numbers.
  static I Above(I a, I b) { return _mm_cmpgt_epi32(a, b); }
  static bool Any(I mask) { return _mm_movemask_epi8(mask) != 0; }
  static void Store(uint32_t* to, I x) { _mm_storeu_si128(reinterpret_cast<I*>(to), x); }
  // Lanes below 2^8 as bytes: the first two, and the others.
  static void StoreBytes(uint8_t* first, uint8_t* second, I x) {
    const I bytes = _mm_packus_epi16(_mm_packus_epi32(x, x), x);
    const auto all = static_cast<uint32_t>(_mm_cvtsi128_si32(bytes));
    const auto low = static_cast<uint16_t>(all);
    const auto high = static_cast<uint16_t>(all >> 16);
    std::memcpy(first, &low, sizeof(low));
    std::memcpy(second, &high, sizeof(high));
  }
  // The larger of the halves' lanes, or the smaller, without signs.
  template <bool kMost>
  static __m256i Fold(__m256i a, __m256i b) {
    return kMost ? _mm256_max_epu32(a, b) : _mm256_min_epu32(a, b);
  }
  template <bool kMost>
  static I Fold(__m256i x) {
    const I low = _mm256_castsi256_si128(x);
    const I high = _mm256_extracti128_si256(x, 1);
    return kMost ? _mm_max_epu32(low, high) : _mm_min_epu32(low, high);
  }
};

}  // namespace
}  // namespace ravel::kernels::cpu
