#pragma once

// CRC-32C (Castagnoli), as SSE 4.2, S3 and iSCSI define it. Pure; standard library only.

#include <cstddef>
#include <cstdint>

namespace ravel {

// Continues `crc` (0 at the start) over `size` bytes. Crc32c(0, "123456789") is 0xe3069283.
uint32_t Crc32c(uint32_t crc, const void* data, size_t size);
// The sum of a followed by b, from the sums of both and the size of b. O(log size_b).
uint32_t Crc32cCombine(uint32_t crc_a, uint32_t crc_b, uint64_t size_b);

// The table-driven version that machines without the instruction run; same values.
uint32_t Crc32cPortable(uint32_t crc, const void* data, size_t size);

}  // namespace ravel
