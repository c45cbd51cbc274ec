#pragma once

// The digest of a quantized weight: of its codes, then of its scales. A sum, as digest64 is, so
// that parts of any partition into rows add up to the whole.

#include <bit>
#include <cstdint>
#include <cstring>
#include <span>

#include "kernels/scalar/block_scales.h"
#include "kernels/scalar/digest.h"

namespace ravel::kernels::scalar {

// Scales count from here, behind any code.
inline constexpr uint64_t kFirstScaleIndex = uint64_t{1} << 60;

// Codes that lie one after another in a plane with rows of `row_bytes` each; `first_byte`: where
// they begin there. Rows of whole words are digested by words, and parts of rows are whole words
// then.
inline uint64_t CodesDigest(std::span<const uint8_t> codes, int64_t row_bytes, int64_t first_byte) {
  const int64_t step = row_bytes % 8 == 0 ? 8 : 1;
  uint64_t sum = 0;
  auto index = static_cast<uint64_t>(first_byte / step);
  for (size_t at = 0; at < codes.size(); at += static_cast<size_t>(step), ++index) {
    uint64_t bits = 0;
    std::memcpy(&bits, codes.data() + at, static_cast<size_t>(step));
    sum += DigestElement(index, bits);
  }
  return sum;
}

// What all codes of a weight are multiplied by, and what those of block `block` are.
inline uint64_t TensorScaleDigest(const Scales& tensor) {
  return DigestElement(kFirstScaleIndex, std::bit_cast<uint32_t>(tensor.decode));
}
inline uint64_t BlockScaleDigest(int64_t block, const Scales& scales) {
  return DigestElement(kFirstScaleIndex + 1 + static_cast<uint64_t>(block),
                       std::bit_cast<uint32_t>(scales.decode));
}

}  // namespace ravel::kernels::scalar
