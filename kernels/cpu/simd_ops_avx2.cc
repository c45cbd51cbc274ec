// Compiled with AVX2 and FMA (kernels/CMakeLists.txt); called only where RunsHere(SimdPath::kAvx2).

#include <immintrin.h>

#include "kernels/cpu/simd_table.h"
#include "kernels/cpu/streaming_copy.h"
#include "kernels/cpu/vector_avx2.h"
#include "kernels/scalar/digest.h"

namespace ravel::kernels::cpu {
namespace {

// x * y modulo 2^64 in four lanes, from 32-bit halves.
inline __m256i MultiplyLow(__m256i x, __m256i y, __m256i y_high) {
  const __m256i cross =
      _mm256_add_epi64(_mm256_mul_epu32(_mm256_srli_epi64(x, 32), y), _mm256_mul_epu32(x, y_high));
  return _mm256_add_epi64(_mm256_mul_epu32(x, y), _mm256_slli_epi64(cross, 32));
}

inline __m256i Set64(uint64_t x) {
  return _mm256_set1_epi64x(static_cast<long long>(x));
}

uint64_t DigestWords(const uint32_t* words, int64_t count, uint64_t first_index) {
  const __m256i m1 = Set64(scalar::kDigestMultiplier1);
  const __m256i m1_high = _mm256_srli_epi64(m1, 32);
  const __m256i m2 = Set64(scalar::kDigestMultiplier2);
  const __m256i m2_high = _mm256_srli_epi64(m2, 32);
  const auto at = [&](uint64_t i) {
    return static_cast<long long>((first_index + i + 1) * scalar::kDigestStride);
  };
  __m256i position = _mm256_setr_epi64x(at(0), at(1), at(2), at(3));
  const __m256i step = Set64(4 * scalar::kDigestStride);
  __m256i sums = _mm256_setzero_si256();
  int64_t i = 0;
  for (; i + 4 <= count; i += 4) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(words + i));
    __m256i x = _mm256_xor_si256(position, _mm256_cvtepu32_epi64(bits));
    x = _mm256_xor_si256(x, _mm256_srli_epi64(x, 33));
    x = MultiplyLow(x, m1, m1_high);
    x = _mm256_xor_si256(x, _mm256_srli_epi64(x, 33));
    x = MultiplyLow(x, m2, m2_high);
    x = _mm256_xor_si256(x, _mm256_srli_epi64(x, 33));
    sums = _mm256_add_epi64(sums, x);
    position = _mm256_add_epi64(position, step);
  }
  alignas(32) uint64_t lanes[4];
  _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), sums);
  uint64_t sum = lanes[0] + lanes[1] + lanes[2] + lanes[3];
  for (; i < count; ++i) {
    sum += scalar::DigestElement(first_index + static_cast<uint64_t>(i), words[i]);
  }
  return sum;
}

constexpr SimdOps kOps = MakeSimdOps<Avx2Vector>({.digest_words = DigestWords,
                                                  .copy_bytes = StreamingCopy,
                                                  .update_block = UpdateBlockAvx2,
                                                  .quantize = &kQuantizeAvx2});

}  // namespace

const SimdOps& Avx2Ops() {
  return kOps;
}

}  // namespace ravel::kernels::cpu
