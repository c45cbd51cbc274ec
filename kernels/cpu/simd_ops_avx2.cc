// Compiled with AVX2 and FMA (kernels/CMakeLists.txt); called only where RunsHere(SimdPath::kAvx2).

#include <cstring>

#include <immintrin.h>

#include "kernels/cpu/simd_table.h"
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

// Above this a copy is not expected to stay in the cache, and glibc's memcpy can fall to a quarter
// of the speed when the destination lies a little above the source modulo 4 KiB: streaming stores
// do not.
constexpr int64_t kStreamingCopyBytes = int64_t{1} << 20;

void Copy(void* to, const void* from, int64_t bytes) {
  char* target = static_cast<char*>(to);
  const char* source = static_cast<const char*>(from);
  if (bytes < kStreamingCopyBytes) {
    std::memcpy(target, source, static_cast<size_t>(bytes));
    return;
  }
  const int64_t head = static_cast<int64_t>(-reinterpret_cast<uintptr_t>(target) & 63);
  std::memcpy(target, source, static_cast<size_t>(head));
  int64_t i = head;
  for (; i + 128 <= bytes; i += 128) {
    _mm_prefetch(source + i + 1024, _MM_HINT_NTA);
    _mm_prefetch(source + i + 1088, _MM_HINT_NTA);
    for (int64_t part = 0; part < 128; part += 32) {
      const auto* from_part = reinterpret_cast<const __m256i*>(source + i + part);
      _mm256_stream_si256(reinterpret_cast<__m256i*>(target + i + part),
                          _mm256_loadu_si256(from_part));
    }
  }
  _mm_sfence();
  std::memcpy(target + i, source + i, static_cast<size_t>(bytes - i));
}

constexpr SimdOps kOps = MakeSimdOps<Avx2Vector>(DigestWords, Copy);

}  // namespace

const SimdOps& Avx2Ops() {
  return kOps;
}

}  // namespace ravel::kernels::cpu
