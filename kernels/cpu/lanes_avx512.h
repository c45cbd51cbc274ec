#pragma once

// Avx2Lanes with sixteen lanes of AVX-512 F and BW. Only files compiled with AVX-512 include this.

#include <cstdint>

#include <immintrin.h>

#include "kernels/cpu/lanes_four.h"
#include "kernels/cpu/narrow_constants.h"

namespace ravel::kernels::cpu {

struct Avx512Lanes {
  using F = __m512;
  using I = __m512i;
  using Mask = __mmask16;
  static constexpr int64_t kLanes = 16;
  static constexpr int64_t kDrawVectors = 4;

  static F Set(float x) { return _mm512_set1_ps(x); }
  static I Set(uint32_t x) { return _mm512_set1_epi32(static_cast<int32_t>(x)); }
  static F Load(const float* p) { return _mm512_loadu_ps(p); }
  static void Store(float* p, F x) { _mm512_storeu_ps(p, x); }
  static I Load(const uint16_t* p) {
    return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static void Store(uint16_t* p, I x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(x));
  }
  static I LoadAll(const void* p) { return _mm512_loadu_si512(p); }
  static void StoreAll(void* p, I x) { _mm512_storeu_si512(p, x); }
  static I LoadBytes(const uint8_t* p) {
    return _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static I LoadSignedBytes(const uint8_t* p) {
    return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static void StoreBytes(uint8_t* p, I words) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi16_epi8(words));
  }
  static void StoreBytes(uint8_t* p, I first, I second) {
    const I order = _mm512_set_epi64(7, 5, 3, 1, 6, 4, 2, 0);
    StoreAll(p, _mm512_permutexvar_epi64(order, _mm512_packus_epi16(first, second)));
  }
  static void LoadPairs(const float* p, F& even, F& odd) {
    const F low = Load(p);
    const F high = Load(p + kLanes);
    even = _mm512_permutex2var_ps(low, Numbers(0, 2), high);
    odd = _mm512_permutex2var_ps(low, Numbers(1, 2), high);
  }
  static void StorePairs(float* p, F even, F odd) {
    const I first = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    Store(p, _mm512_permutex2var_ps(even, first, odd));
    Store(p + kLanes, _mm512_permutex2var_ps(even, Add(first, Set(8u)), odd));
  }

  static F AsFloat(I x) { return _mm512_castsi512_ps(x); }
  static I AsInt(F x) { return _mm512_castps_si512(x); }
  static F ToFloat(I x) { return _mm512_cvtepi32_ps(x); }
  static I Truncate(F x) { return _mm512_cvttps_epi32(x); }

  static F Add(F a, F b) { return _mm512_add_ps(a, b); }
  static F Sub(F a, F b) { return _mm512_sub_ps(a, b); }
  static F Mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static F Div(F a, F b) { return _mm512_div_ps(a, b); }
  static F Sqrt(F x) { return _mm512_sqrt_ps(x); }
  static F Fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  static F FmaNegated(F a, F b, F c) { return _mm512_fnmadd_ps(a, b, c); }
  static I Add(I a, I b) { return _mm512_add_epi32(a, b); }
  static I Sub(I a, I b) { return _mm512_sub_epi32(a, b); }
  static I And(I a, I b) { return _mm512_and_si512(a, b); }
  static I Or(I a, I b) { return _mm512_or_si512(a, b); }
  template <int kBits>
  static I Left(I x) {
    return _mm512_slli_epi32(x, kBits);
  }
  template <int kBits>
  static I Right(I x) {
    return _mm512_srli_epi32(x, kBits);
  }
  static I Min(I a, I b) { return _mm512_min_epi32(a, b); }
  static F Min(F a, F b) { return _mm512_min_ps(a, b); }
  static I MaxUnsigned(I a, I b) { return _mm512_max_epu32(a, b); }
  static I MinUnsigned(I a, I b) { return _mm512_min_epu32(a, b); }
  static Mask Less(I a, I b) { return _mm512_cmplt_epi32_mask(a, b); }
  static Mask Less(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
  static bool Any(Mask mask) { return mask != 0; }
  static Mask Both(Mask a, Mask b) { return static_cast<Mask>(a & b); }
  static I Select(Mask mask, I yes, I no) { return _mm512_mask_mov_epi32(no, mask, yes); }
  static F Select(Mask mask, F yes, F no) { return _mm512_mask_mov_ps(no, mask, yes); }
  static I AddWhere(Mask mask, I x, I addend) { return _mm512_mask_add_epi32(x, mask, x, addend); }
  static bool AnyAbove(I x, I most) { return _mm512_cmpgt_epu32_mask(x, most) != 0; }
  static I AddWhereSet(I bit, I bits, I x, I addend) {
    return AddWhere(_mm512_test_epi32_mask(bits, bit), x, addend);
  }
  static Mask IsNan(F x) { return _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q); }
  static Mask EitherIsNan(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q); }
  static I MergeHigh(I high, I low) {
    return _mm512_ternarylogic_epi32(Set(kNarrow.high_word), high, low, 0xCA);
  }
  static I WordsDown(I x) { return _mm512_bsrli_epi128(x, 2); }
  static I WordsUp(I x) { return _mm512_bslli_epi128(x, 2); }
  static I SubWords(I a, I b) { return _mm512_sub_epi16(a, b); }
  static I SubWordsToZero(I a, I b) { return _mm512_subs_epu16(a, b); }
  template <int kBits>
  static I RightWords(I x) {
    return _mm512_srli_epi16(x, kBits);
  }
  static I ExchangeBytes(I words) {
    const I order =
        _mm512_broadcast_i32x4(_mm_set_epi8(14, 15, 12, 13, 10, 11, 8, 9, 6, 7, 4, 5, 2, 3, 0, 1));
    return _mm512_shuffle_epi8(words, order);
  }
  static uint32_t ReduceMax(I x) { return static_cast<uint32_t>(_mm512_reduce_max_epu32(x)); }
  static __m128i ReduceEachMax(I a, I b, I c, I d) { return ReduceEach<true>(a, b, c, d); }
  static __m128i ReduceEachMin(F a, F b, F c, F d) {
    return ReduceEach<false>(AsInt(a), AsInt(b), AsInt(c), AsInt(d));
  }

  static F Held(F x) {
    asm("" : "+v"(x));  // NOLINT(hicpp-no-assembler)
    return x;
  }
  static I Held(I x) {
    asm("" : "+v"(x));  // NOLINT(hicpp-no-assembler)
    return x;
  }
  static I Set64(uint64_t x) { return _mm512_set1_epi64(static_cast<int64_t>(x)); }
  static I Count64(uint64_t first) {
    return _mm512_add_epi64(Set64(first), _mm512_set_epi64(7, 3, 6, 2, 5, 1, 4, 0));
  }
  static void StoreBlocks(uint16_t* p, I low, I high) {
    const I first = _mm512_unpacklo_epi64(low, high);
    const I second = _mm512_unpackhi_epi64(low, high);
    StoreAll(p, first);
    StoreAll(p + 2 * kLanes, ExchangeBytes(first));
    StoreAll(p + 4 * kLanes, second);
    StoreAll(p + 6 * kLanes, ExchangeBytes(second));
  }
  static I MulWide(I a, I b) { return _mm512_mul_epu32(a, b); }
  static I SwapHalves(I x) { return _mm512_shuffle_epi32(x, _MM_PERM_CDAB); }
  static I Xor(I a, I b) { return _mm512_xor_si512(a, b); }
  static I Xor(I a, I b, I c) { return _mm512_ternarylogic_epi32(a, b, c, 0x96); }

 private:
  template <bool kMost>
  static __m128i ReduceEach(I a, I b, I c, I d) {
    const auto of = [](I x, I y) {
      return kMost ? _mm512_max_epu32(x, y) : _mm512_min_epu32(x, y);
    };
    const I ab = of(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
    const I cd = of(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
    const I all = of(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
    return Four::Fold<kMost>(
        Four::Fold<kMost>(_mm512_castsi512_si256(all), _mm512_extracti64x4_epi64(all, 1)));
  }

  // first, first + step, ...
  static I Numbers(int first, int step) {
    const I count = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    return Add(_mm512_mullo_epi32(count, _mm512_set1_epi32(step)), _mm512_set1_epi32(first));
  }
};

}  // namespace ravel::kernels::cpu
