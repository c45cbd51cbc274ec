#pragma once

// Integers of narrow_vectors.h that loops of vectors read from memory. As literals, compilers move
// each into a vector from a scalar register in every turn of a loop, which costs as much as two
// operations; a load is free there.

#include <cstdint>

namespace ravel::kernels::cpu {

struct NarrowConstants {
  uint32_t one = 1;
  uint32_t bit16 = 1u << 16;
  uint32_t low_word = 0x0000FFFFu;
  uint32_t high_word = 0xFFFF0000u;
  uint32_t magnitude = 0x7FFFFFFFu;
  // Rounding to bf16.
  uint32_t half = 0x8000u;
  uint32_t below_half = 0x7FFFu;
  uint32_t nan = 0x7FFF0000u;
  uint32_t largest = 0x7F7F0000u;
  // Codes of fp8: of a float's bits, the code and what is behind it; of words, codes.
  uint32_t signed_code_bits = 0x87F00000u;
  uint32_t code_bits = 0x0FF00000u;  // without sign
  uint32_t draw_bits = 0x000FFFF0u;
  uint32_t signs = 0x00800080u;
  uint32_t unsigned_words = 0x7FFF7FFFu;
};

extern const NarrowConstants kNarrow;

}  // namespace ravel::kernels::cpu
