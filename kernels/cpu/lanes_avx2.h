#pragma once

// Eight 32-bit lanes of AVX2, as floats and as integers, for update_vectors.h. Only files compiled
// with AVX2 include this.

#include <cstdint>

#include <immintrin.h>

namespace ravel::kernels::cpu {

struct Avx2Lanes {
  using F = __m256;
  using I = __m256i;
  using Mask = __m256i;  // all ones where true
  static constexpr int64_t kLanes = 8;

  static F Set(float x) { return _mm256_set1_ps(x); }
  static I Set(uint32_t x) { return _mm256_set1_epi32(static_cast<int32_t>(x)); }
  static F Load(const float* p) { return _mm256_loadu_ps(p); }
  static void Store(float* p, F x) { _mm256_storeu_ps(p, x); }
  // Narrow integers, widened; the low bits of lanes, narrowed.
  static I Load(const uint16_t* p) {
    return _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static I Load(const uint8_t* p) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  }
  // Lanes are below 2^16.
  static void Store(uint16_t* p, I x) {
    const I pairs = _mm256_packus_epi32(x, x);
    const I packed = _mm256_permute4x64_epi64(pairs, 0b1000);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
  }
  // Lanes are below 2^8.
  static void Store(uint8_t* p, I x) {
    const __m128i pairs =
        _mm_packus_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packus_epi16(pairs, pairs));
  }

  static F AsFloat(I x) { return _mm256_castsi256_ps(x); }
  static I AsInt(F x) { return _mm256_castps_si256(x); }
  static F ToFloat(I x) { return _mm256_cvtepi32_ps(x); }
  static I Truncate(F x) { return _mm256_cvttps_epi32(x); }

  static F Add(F a, F b) { return _mm256_add_ps(a, b); }
  static F Sub(F a, F b) { return _mm256_sub_ps(a, b); }
  static F Mul(F a, F b) { return _mm256_mul_ps(a, b); }
  static I Add(I a, I b) { return _mm256_add_epi32(a, b); }
  static I Sub(I a, I b) { return _mm256_sub_epi32(a, b); }
  static I And(I a, I b) { return _mm256_and_si256(a, b); }
  static I Or(I a, I b) { return _mm256_or_si256(a, b); }
  template <int kBits>
  static I Left(I x) {
    return _mm256_slli_epi32(x, kBits);
  }
  template <int kBits>
  static I Right(I x) {
    return _mm256_srli_epi32(x, kBits);
  }
  // As signed numbers.
  static I Min(I a, I b) { return _mm256_min_epi32(a, b); }
  static I Max(I a, I b) { return _mm256_max_epi32(a, b); }
  static Mask Less(I a, I b) { return _mm256_cmpgt_epi32(b, a); }
  // False where either is NaN.
  static Mask Less(F a, F b) { return AsInt(_mm256_cmp_ps(a, b, _CMP_LT_OQ)); }
  static bool Any(Mask mask) { return _mm256_movemask_epi8(mask) != 0; }
  static Mask Both(Mask a, Mask b) { return And(a, b); }
  static I Select(Mask mask, I yes, I no) { return _mm256_blendv_epi8(no, yes, mask); }
  static F Select(Mask mask, F yes, F no) { return _mm256_blendv_ps(no, yes, AsFloat(mask)); }
  static I AddWhere(Mask mask, I x, uint32_t addend) { return Add(x, And(mask, Set(addend))); }
  static uint32_t ReduceMax(I x) {
    __m128i most = _mm_max_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    most = _mm_max_epi32(most, _mm_shuffle_epi32(most, 0b01001110));
    most = _mm_max_epi32(most, _mm_shuffle_epi32(most, 0b10110001));
    return static_cast<uint32_t>(_mm_cvtsi128_si32(most));
  }

  // The same registers as half as many 64-bit lanes.
  static I Set64(uint64_t x) { return _mm256_set1_epi64x(static_cast<int64_t>(x)); }
  static I Count64(uint64_t first) {
    return _mm256_add_epi64(Set64(first), _mm256_set_epi64x(3, 2, 1, 0));
  }
  // Product of the low halves.
  static I MulWide(I a, I b) { return _mm256_mul_epu32(a, b); }
  static I HighHalf(I x) { return _mm256_srli_epi64(x, 32); }
  static I SwapHalves(I x) { return _mm256_shuffle_epi32(x, 0b10110001); }
  static I Xor(I a, I b) { return _mm256_xor_si256(a, b); }
  static I Xor(I a, I b, I c) { return _mm256_xor_si256(_mm256_xor_si256(a, b), c); }
  static void Store(uint64_t* p, I x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x); }
};

}  // namespace ravel::kernels::cpu
