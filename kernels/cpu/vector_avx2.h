#pragma once

// Eight fp32 lanes in an AVX2 register; the members and their meaning are those of PortableVector.
// Only files compiled with AVX2, FMA and F16C include this (kernels/CMakeLists.txt).

#include <cstring>

#include <immintrin.h>

#include "kernels/cpu/vector_portable.h"

namespace ravel::kernels::cpu {

struct Avx2Vector {
  using F = __m256;
  struct P {
    __m256 low;
    __m256 high;
  };
  static constexpr int64_t kStripRows = 6;
  static constexpr int64_t kStripPanels = 1;

  static P ZeroPanel() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
  static P LoadPanel(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
  template <typename E>
  static P LoadPanel(const E* p) {
    return {Load(p), Load(p + 8)};
  }
  static void StorePanel(float* p, P x) {
    _mm256_storeu_ps(p, x.low);
    _mm256_storeu_ps(p + 8, x.high);
  }
  static P FmaPanel(float a, P b, P c) {
    const __m256 x = _mm256_set1_ps(a);
    return {_mm256_fmadd_ps(x, b.low, c.low), _mm256_fmadd_ps(x, b.high, c.high)};
  }

  static P AddPanel(P a, P b) {
    return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)};
  }

  static F Set1(float x) { return _mm256_set1_ps(x); }
  static F Zero() { return _mm256_setzero_ps(); }
  static __m256i Mask(int count) {
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(count), lane);
  }
  static F Load(const float* p, AllLanes = {}) { return _mm256_loadu_ps(p); }
  static F Load(const float* p, SomeLanes lanes) {
    return _mm256_maskload_ps(p, Mask(lanes.count));
  }
  static void Store(float* p, F x, AllLanes = {}) { _mm256_storeu_ps(p, x); }
  static void Store(float* p, F x, SomeLanes lanes) {
    _mm256_maskstore_ps(p, Mask(lanes.count), x);
  }
  static F Load(const uint16_t* p, AllLanes = {}) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
  }
  static F Load(const Fp16* p, AllLanes = {}) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  template <typename E>
  static F Load(const E* p, SomeLanes lanes) {
    alignas(16) E all[8] = {};
    std::memcpy(all, p, sizeof(E) * static_cast<size_t>(lanes.count));
    return Load(all);
  }
  static void Store(uint16_t* p, F x, AllLanes = {}) {
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i up = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF));
    const __m256i nearest = _mm256_srli_epi32(_mm256_add_epi32(bits, up), 16);
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    const __m256i halves = _mm256_blendv_epi8(nearest, _mm256_set1_epi32(0x7FFF), is_nan);
    // Each 128 bits packed on their own, then the two side by side.
    const __m256i packed =
        _mm256_permute4x64_epi64(_mm256_packus_epi32(halves, halves), _MM_SHUFFLE(3, 1, 2, 0));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
  }
  static void Store(Fp16* p, F x, AllLanes = {}) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
  }
  template <typename E>
  static void Store(E* p, F x, SomeLanes lanes) {
    alignas(16) E all[8];
    Store(all, x);
    std::memcpy(p, all, sizeof(E) * static_cast<size_t>(lanes.count));
  }
  static void StoreAround(float* p, F x) { _mm256_stream_ps(p, x); }
  static void FinishStoresAround() { _mm_sfence(); }

  static F Add(F a, F b) { return _mm256_add_ps(a, b); }
  static F Sub(F a, F b) { return _mm256_sub_ps(a, b); }
  static F Mul(F a, F b) { return _mm256_mul_ps(a, b); }
  static F Div(F a, F b) { return _mm256_div_ps(a, b); }
  static F Max(F a, F b) { return _mm256_max_ps(a, b); }
  static F Min(F a, F b) { return _mm256_min_ps(a, b); }
  static F Sqrt(F a) { return _mm256_sqrt_ps(a); }
  static F Fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  static F Fnma(F a, F b, F c) { return _mm256_fnmadd_ps(a, b, c); }
  static F Round(F a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  static F ScaleByPower(F a, F n) {
    const __m256i shift = _mm256_slli_epi32(_mm256_cvttps_epi32(n), 23);
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(a), shift));
  }
  static F ZeroWhereBelow(F a, F test, float limit) {
    return _mm256_andnot_ps(_mm256_cmp_ps(test, _mm256_set1_ps(limit), _CMP_LT_OQ), a);
  }
  static F KeepFirst(F a, int count, F other) {
    return _mm256_blendv_ps(other, a, _mm256_castsi256_ps(Mask(count)));
  }
  static __m128 LoadFour(const float* p) { return _mm_loadu_ps(p); }
  static __m128 LoadFour(const uint16_t* p) {
    const __m128i bits = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
    return _mm_castsi128_ps(_mm_slli_epi32(_mm_cvtepu16_epi32(bits), 16));
  }
  static __m128 LoadFour(const Fp16* p) {
    return _mm_cvtph_ps(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  }
  template <typename E>
  static void Transpose8x8(const E* from, int64_t from_step, float* to, int64_t to_step) {
    // Halves of rows i and i + 4 side by side, then pairs and fours of columns.
    F x[8];
    for (int64_t i = 0; i < 4; ++i) {
      const E* upper = from + i * from_step;
      const E* lower = upper + 4 * from_step;
      x[i] = _mm256_insertf128_ps(_mm256_castps128_ps256(LoadFour(upper)), LoadFour(lower), 1);
      x[i + 4] =
          _mm256_insertf128_ps(_mm256_castps128_ps256(LoadFour(upper + 4)), LoadFour(lower + 4), 1);
    }
    for (int64_t half = 0; half < 2; ++half) {
      const F* y = x + half * 4;
      float* out = to + half * 4 * to_step;
      const F low01 = _mm256_unpacklo_ps(y[0], y[1]);
      const F high01 = _mm256_unpackhi_ps(y[0], y[1]);
      const F low23 = _mm256_unpacklo_ps(y[2], y[3]);
      const F high23 = _mm256_unpackhi_ps(y[2], y[3]);
      Store(out, _mm256_shuffle_ps(low01, low23, _MM_SHUFFLE(1, 0, 1, 0)));
      Store(out + to_step, _mm256_shuffle_ps(low01, low23, _MM_SHUFFLE(3, 2, 3, 2)));
      Store(out + 2 * to_step, _mm256_shuffle_ps(high01, high23, _MM_SHUFFLE(1, 0, 1, 0)));
      Store(out + 3 * to_step, _mm256_shuffle_ps(high01, high23, _MM_SHUFFLE(3, 2, 3, 2)));
    }
  }
  // Four vectors -> the sum of each, as ((x0+x1)+(x2+x3)) + ((x4+x5)+(x6+x7)).
  static __m128 ReduceFour(const F* x) {
    const F pairs = _mm256_hadd_ps(_mm256_hadd_ps(x[0], x[1]), _mm256_hadd_ps(x[2], x[3]));
    return _mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps(pairs, 1));
  }
  static float ReduceStrands(const F* strands) {
    const __m128 first = _mm_hadd_ps(ReduceFour(strands), ReduceFour(strands + 4));
    const __m128 second = _mm_hadd_ps(ReduceFour(strands + 8), ReduceFour(strands + 12));
    const __m128 quarters = _mm_hadd_ps(first, second);
    const __m128 halves = _mm_hadd_ps(quarters, quarters);
    return _mm_cvtss_f32(_mm_hadd_ps(halves, halves));
  }
  static float ReduceAdd(F a) {
    const __m128 half = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    const __m128 pair = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(pair, _mm_movehdup_ps(pair)));
  }
  static float ReduceMax(F a) {
    const __m128 half = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    const __m128 pair = _mm_max_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_max_ss(pair, _mm_movehdup_ps(pair)));
  }
};

}  // namespace ravel::kernels::cpu
