#pragma once

#include <cstdint>
#include <cstring>

#include <immintrin.h>

namespace ravel::kernels::cpu {

// Above this a copy is not expected to stay in the cache, and glibc's memcpy can fall to a quarter
// of the speed when the destination lies a little above the source modulo 4 KiB: streaming stores
// do not.
inline constexpr int64_t kStreamingCopyBytes = int64_t{256} << 10;

// One core waits for memory unless it has several pages under way at once: hardware prefetches stop
// at the end of a page. Four of them give twice the speed of one.
inline constexpr int64_t kPagesUnderWay = 4;
inline constexpr int64_t kCopyPageBytes = 4096;
inline constexpr int64_t kCopyBlockBytes = kPagesUnderWay * kCopyPageBytes;

// One cache line; `to` is aligned to it.
inline void StreamLine(char* to, const char* from) {
  const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + 32));
  _mm256_stream_si256(reinterpret_cast<__m256i*>(to), low);
  _mm256_stream_si256(reinterpret_cast<__m256i*>(to + 32), high);
}

inline void StreamingCopy(void* to, const void* from, int64_t bytes) {
  char* target = static_cast<char*>(to);
  const char* source = static_cast<const char*>(from);
  if (bytes < kStreamingCopyBytes) {
    std::memcpy(target, source, static_cast<size_t>(bytes));
    return;
  }
  const int64_t head = static_cast<int64_t>(-reinterpret_cast<uintptr_t>(target) & 63);
  std::memcpy(target, source, static_cast<size_t>(head));
  int64_t block = head;
  for (; block + kCopyBlockBytes <= bytes; block += kCopyBlockBytes) {
    for (int64_t line = block; line < block + kCopyPageBytes; line += 64) {
      for (int64_t page = 0; page < kCopyBlockBytes; page += kCopyPageBytes) {
        // Beyond the end it only asks for what may not be there, which is harmless.
        _mm_prefetch(source + line + page + kCopyBlockBytes, _MM_HINT_T0);
        StreamLine(target + line + page, source + line + page);
      }
    }
  }
  for (; block + 64 <= bytes; block += 64) {
    StreamLine(target + block, source + block);
  }
  _mm_sfence();
  std::memcpy(target + block, source + block, static_cast<size_t>(bytes - block));
}

}  // namespace ravel::kernels::cpu
