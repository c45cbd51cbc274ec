#pragma once

// digest64: a sum over the elements of a tensor that does not depend on mesh, order or chunking.
// One wrong, moved or swapped element changes it. Pure.

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "common/crypto.h"
#include "common/dtype.h"
#include "common/shape.h"

namespace ravel::ckpt {

// The part of digest64 of elements [first_index, first_index + n) (row-major, global), whose stored
// bytes are `bytes`. Parts of any partition add up modulo 2^64.
uint64_t DigestRange(DType dtype, std::span<const std::byte> bytes, uint64_t first_index);
// The same for a box of a tensor of this shape. `bytes` are elements [first_element, ...) of the
// box's own row-major order.
uint64_t DigestBoxPart(DType dtype,
                       const Shape& shape,
                       const Box& box,
                       int64_t first_element,
                       std::span<const std::byte> bytes);
inline uint64_t DigestBox(DType dtype,
                          const Shape& shape,
                          const Box& box,
                          std::span<const std::byte> bytes) {
  return DigestBoxPart(dtype, shape, box, 0, bytes);
}

// The facts from which state_digest is computed.
struct TensorDigest {
  std::string name;
  DType dtype = DType::kF32;
  Shape shape;
  uint64_t digest64 = 0;
};
// SHA-256 over (name, dtype, shape, digest64) in name order: two states are bit-equal when these
// agree.
Sha256Digest StateDigest(std::vector<TensorDigest> tensors);

}  // namespace ravel::ckpt
