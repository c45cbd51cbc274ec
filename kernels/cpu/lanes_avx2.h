#pragma once

// Eight 32-bit lanes of AVX2, as floats and as integers, for update_vectors.h. Only files compiled
// with AVX2 include this.

#include <cstdint>

#include <immintrin.h>

#include "kernels/cpu/lanes_four.h"

namespace ravel::kernels::cpu {

struct Avx2Lanes {
  using F = __m256;
  using I = __m256i;
  using Mask = __m256i;  // all ones where true
  static constexpr int64_t kLanes = 8;
  // Vectors of draws that fit in the registers beside each other: while a round of one waits for
  // its products, others multiply.
  static constexpr int64_t kDrawVectors = 2;

  static F Set(float x) { return _mm256_set1_ps(x); }
  static I Set(uint32_t x) { return _mm256_set1_epi32(static_cast<int32_t>(x)); }
  static F Load(const float* p) { return _mm256_loadu_ps(p); }
  static void Store(float* p, F x) { _mm256_storeu_ps(p, x); }
  // Words of 16 bits, widened; the low words of lanes, which are below 2^16.
  static I Load(const uint16_t* p) {
    return _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static void Store(uint16_t* p, I x) {
    const I pairs = _mm256_packus_epi32(x, x);
    const I packed = _mm256_permute4x64_epi64(pairs, 0b1000);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
  }
  // A whole register, as it is in memory.
  static I LoadAll(const void* p) { return _mm256_loadu_si256(static_cast<const I*>(p)); }
  static void StoreAll(void* p, I x) { _mm256_storeu_si256(static_cast<I*>(p), x); }
  // 2 kLanes bytes, as words; words that are below 2^8.
  static I LoadBytes(const uint8_t* p) {
    return _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  // The same with the sign of each byte in the upper half of its word.
  static I LoadSignedBytes(const uint8_t* p) {
    return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static void StoreBytes(uint8_t* p, I words) {
    const I packed = _mm256_permute4x64_epi64(_mm256_packus_epi16(words, words), 0b1000);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
  }
  // The same of two vectors, one after the other.
  static void StoreBytes(uint8_t* p, I first, I second) {
    StoreAll(p, _mm256_permute4x64_epi64(_mm256_packus_epi16(first, second), 0b11011000));
  }
  // 2 kLanes floats: those of even index and those of odd index.
  static void LoadPairs(const float* p, F& even, F& odd) {
    const F low = Load(p);
    const F high = Load(p + kLanes);
    even = InOrder(_mm256_shuffle_ps(low, high, 0b10001000));
    odd = InOrder(_mm256_shuffle_ps(low, high, 0b11011101));
  }
  static void StorePairs(float* p, F even, F odd) {
    const F low = _mm256_unpacklo_ps(even, odd);
    const F high = _mm256_unpackhi_ps(even, odd);
    Store(p, _mm256_permute2f128_ps(low, high, 0x20));
    Store(p + kLanes, _mm256_permute2f128_ps(low, high, 0x31));
  }

  static F AsFloat(I x) { return _mm256_castsi256_ps(x); }
  static I AsInt(F x) { return _mm256_castps_si256(x); }
  static F ToFloat(I x) { return _mm256_cvtepi32_ps(x); }
  static I Truncate(F x) { return _mm256_cvttps_epi32(x); }

  static F Add(F a, F b) { return _mm256_add_ps(a, b); }
  static F Sub(F a, F b) { return _mm256_sub_ps(a, b); }
  static F Mul(F a, F b) { return _mm256_mul_ps(a, b); }
  static F Div(F a, F b) { return _mm256_div_ps(a, b); }
  static F Sqrt(F x) { return _mm256_sqrt_ps(x); }
  static F Fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  static F FmaNegated(F a, F b, F c) { return _mm256_fnmadd_ps(a, b, c); }  // c - a * b
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
  static Mask Less(I a, I b) { return _mm256_cmpgt_epi32(b, a); }
  // False where either is NaN.
  static Mask Less(F a, F b) { return AsInt(_mm256_cmp_ps(a, b, _CMP_LT_OQ)); }
  static bool Any(Mask mask) { return _mm256_movemask_epi8(mask) != 0; }
  static Mask Both(Mask a, Mask b) { return And(a, b); }
  static I Select(Mask mask, I yes, I no) { return _mm256_blendv_epi8(no, yes, mask); }
  static F Select(Mask mask, F yes, F no) { return _mm256_blendv_ps(no, yes, AsFloat(mask)); }
  static I AddWhere(Mask mask, I x, I addend) { return Add(x, And(mask, addend)); }
  // b where either is NaN.
  static F Min(F a, F b) { return _mm256_min_ps(a, b); }
  // Without signs.
  static I MaxUnsigned(I a, I b) { return _mm256_max_epu32(a, b); }
  static I MinUnsigned(I a, I b) { return _mm256_min_epu32(a, b); }
  static bool AnyAbove(I x, I most) {
    const I fits = _mm256_cmpeq_epi32(_mm256_min_epu32(x, most), x);
    return _mm256_movemask_epi8(fits) != -1;
  }
  // x + addend where `bit` of `bits` is set.
  static I AddWhereSet(I bit, I bits, I x, I addend) {
    return AddWhere(_mm256_cmpeq_epi32(And(bits, bit), bit), x, addend);
  }
  static Mask IsNan(F x) { return AsInt(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)); }
  static Mask EitherIsNan(F a, F b) { return AsInt(_mm256_cmp_ps(a, b, _CMP_UNORD_Q)); }
  // The high words of lanes of `high`, the low ones of `low`.
  static I MergeHigh(I high, I low) { return _mm256_blend_epi16(low, high, 0b10101010); }
  // The high words of lanes in place of the low ones, and the reverse; the other word is not set.
  // Shuffles, as shifts of lanes have fewer ports.
  static I WordsDown(I x) { return _mm256_bsrli_epi128(x, 2); }
  static I WordsUp(I x) { return _mm256_bslli_epi128(x, 2); }
  // Vectors of 16-bit words.
  static I SubWords(I a, I b) { return _mm256_sub_epi16(a, b); }
  // Without signs; 0 where a < b.
  static I SubWordsToZero(I a, I b) { return _mm256_subs_epu16(a, b); }
  template <int kBits>
  static I RightWords(I x) {
    return _mm256_srli_epi16(x, kBits);
  }
  static I ExchangeBytes(I words) {
    const I order = _mm256_broadcastsi128_si256(
        _mm_set_epi8(14, 15, 12, 13, 10, 11, 8, 9, 6, 7, 4, 5, 2, 3, 0, 1));
    return _mm256_shuffle_epi8(words, order);
  }
  static uint32_t ReduceMax(I x) {
    __m128i most = _mm_max_epu32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    most = _mm_max_epu32(most, _mm_shuffle_epi32(most, 0b01001110));
    most = _mm_max_epu32(most, _mm_shuffle_epi32(most, 0b10110001));
    return static_cast<uint32_t>(_mm_cvtsi128_si32(most));
  }
  // The largest of each of four vectors, and the smallest without signs, as four lanes: together
  // they take half the steps.
  static __m128i ReduceEachMax(I a, I b, I c, I d) { return ReduceEach<true>(a, b, c, d); }
  static __m128i ReduceEachMin(F a, F b, F c, F d) {
    return ReduceEach<false>(AsInt(a), AsInt(b), AsInt(c), AsInt(d));
  }

  // A constant in a register, where the compiler would read it from memory each time.
  static F Held(F x) {
    asm("" : "+x"(x));  // NOLINT(hicpp-no-assembler)
    return x;
  }
  static I Held(I x) {
    asm("" : "+x"(x));  // NOLINT(hicpp-no-assembler)
    return x;
  }

  // The same registers as half as many 64-bit lanes.
  static I Set64(uint64_t x) { return _mm256_set1_epi64x(static_cast<int64_t>(x)); }
  // Numbers from `first` on in the order in which StoreBlocks has them in memory in theirs.
  static I Count64(uint64_t first) {
    return _mm256_add_epi64(Set64(first), _mm256_set_epi64x(3, 1, 2, 0));
  }
  // Blocks of scalar/philox.h: lane i of `low` and of `high` beside each other for 32 halves, and
  // these with their bytes exchanged.
  static void StoreBlocks(uint16_t* p, I low, I high) {
    const I first = _mm256_unpacklo_epi64(low, high);
    const I second = _mm256_unpackhi_epi64(low, high);
    StoreAll(p, first);
    StoreAll(p + 2 * kLanes, second);
    StoreAll(p + 4 * kLanes, ExchangeBytes(first));
    StoreAll(p + 6 * kLanes, ExchangeBytes(second));
  }
  // Product of the low halves.
  static I MulWide(I a, I b) { return _mm256_mul_epu32(a, b); }
  static I SwapHalves(I x) { return _mm256_shuffle_epi32(x, 0b10110001); }
  static I Xor(I a, I b) { return _mm256_xor_si256(a, b); }
  static I Xor(I a, I b, I c) { return _mm256_xor_si256(_mm256_xor_si256(a, b), c); }

 private:
  template <bool kMost>
  static __m128i ReduceEach(I a, I b, I c, I d) {
    const auto of = [](I x, I y) {
      return kMost ? _mm256_max_epu32(x, y) : _mm256_min_epu32(x, y);
    };
    const I ab = of(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
    const I cd = of(_mm256_unpacklo_epi32(c, d), _mm256_unpackhi_epi32(c, d));
    return Four::Fold<kMost>(of(_mm256_unpacklo_epi64(ab, cd), _mm256_unpackhi_epi64(ab, cd)));
  }

  // Two floats of the first half, two of the second, and so on: a half each.
  static F InOrder(F x) {
    return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(x), 0b11011000));
  }
};

}  // namespace ravel::kernels::cpu
