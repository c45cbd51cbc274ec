#pragma once

// Avx2Vector with panels in one AVX-512 register: tile gemms, where the multiply-adds are, use
// the wide units; all else, reductions above all, keeps its eight lanes and so its bits. Only files
// compiled with AVX-512 include this.

#include <immintrin.h>

#include "kernels/cpu/vector_avx2.h"

namespace ravel::kernels::cpu {

struct Avx512Vector : Avx2Vector {
  using P = __m512;
  static constexpr int64_t kStripRows = 12;
  static constexpr int64_t kStripPanels = 2;

  static P ZeroPanel() { return _mm512_setzero_ps(); }
  static P LoadPanel(const float* p) { return _mm512_loadu_ps(p); }
  static P LoadPanel(const uint16_t* p) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
  }
  static P LoadPanel(const Fp16* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static void StorePanel(float* p, P x) { _mm512_storeu_ps(p, x); }
  static P FmaPanel(float a, P b, P c) { return _mm512_fmadd_ps(_mm512_set1_ps(a), b, c); }
  static P AddPanel(P a, P b) { return _mm512_add_ps(a, b); }
};

}  // namespace ravel::kernels::cpu
