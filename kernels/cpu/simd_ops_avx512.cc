// Compiled with AVX-512 (kernels/CMakeLists.txt); called only where RunsHere(SimdPath::kAvx512).

#include <iterator>
#include <numeric>

#include <immintrin.h>

#include "kernels/cpu/simd_table.h"
#include "kernels/cpu/streaming_copy.h"
#include "kernels/cpu/vector_avx512.h"
#include "kernels/scalar/digest.h"

namespace ravel::kernels::cpu {
namespace {

inline __m512i Set64(uint64_t x) {
  return _mm512_set1_epi64(static_cast<long long>(x));
}

uint64_t DigestWords(const uint32_t* words, int64_t count, uint64_t first_index) {
  alignas(64) uint64_t start[8];
  for (uint64_t lane = 0; lane < 8; ++lane) {
    start[lane] = (first_index + lane + 1) * scalar::kDigestStride;
  }
  __m512i position = _mm512_load_si512(start);
  const __m512i step = Set64(8 * scalar::kDigestStride);
  __m512i sums = _mm512_setzero_si512();
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(words + i));
    __m512i x = _mm512_xor_si512(position, _mm512_cvtepu32_epi64(bits));
    x = _mm512_xor_si512(x, _mm512_srli_epi64(x, 33));
    x = _mm512_mullo_epi64(x, Set64(scalar::kDigestMultiplier1));
    x = _mm512_xor_si512(x, _mm512_srli_epi64(x, 33));
    x = _mm512_mullo_epi64(x, Set64(scalar::kDigestMultiplier2));
    x = _mm512_xor_si512(x, _mm512_srli_epi64(x, 33));
    sums = _mm512_add_epi64(sums, x);
    position = _mm512_add_epi64(position, step);
  }
  // Not _mm512_reduce_add_epi64: it adds signed numbers, and this sum wraps.
  alignas(64) uint64_t parts[8];
  _mm512_store_si512(parts, sums);
  uint64_t sum = std::accumulate(std::begin(parts), std::end(parts), uint64_t{0});
  for (; i < count; ++i) {
    sum += scalar::DigestElement(first_index + static_cast<uint64_t>(i), words[i]);
  }
  return sum;
}

constexpr SimdOps kOps = MakeSimdOps<Avx512Vector>({.digest_words = DigestWords,
                                                    .copy_bytes = StreamingCopy,
                                                    .update_block = UpdateBlockAvx512,
                                                    .quantize = &kQuantizeAvx512});

}  // namespace

const SimdOps& Avx512Ops() {
  return kOps;
}

}  // namespace ravel::kernels::cpu
