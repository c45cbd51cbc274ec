#pragma once

#include <cstdint>
#include <cstring>

#include <immintrin.h>

namespace ravel::kernels::cpu {

// Above this a copy is not expected to stay in the cache, and glibc's memcpy can fall to a quarter
// of the speed when the destination lies a little above the source modulo 4 KiB: streaming stores
// do not.
inline constexpr int64_t kStreamingCopyBytes = int64_t{1} << 20;

inline void StreamingCopy(void* to, const void* from, int64_t bytes) {
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

}  // namespace ravel::kernels::cpu
