#pragma once

// The loops of quantization over a strip: elements of a row that are next to each other. One source
// for each instruction set, the same bits from all.

#include <cstdint>

#include "common/recipe.h"
#include "kernels/scalar/philox.h"

namespace ravel::kernels::cpu {

// word = max(word, value), of a word that other threads raise meanwhile. Inlined, and of builtins:
// a function of its own could be shared with another instruction set.
[[gnu::always_inline]] inline void RaiseWord(uint32_t& word, uint32_t value) {
  uint32_t now = __atomic_load_n(&word, __ATOMIC_RELAXED);
  while (now < value && !__atomic_compare_exchange_n(
                            &word, &now, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
}

enum class CodeForm { kE4M3, kE5M2, kE2M1 };

// Random bytes for a strip of E2M1: that of element i is byte (index + i) mod 16 of the draw at
// block (index + i) / 16 of `position`.
struct StripDraws {
  bool present = false;
  uint64_t seed = 0;
  scalar::PhiloxPosition position = {};  // its block is not read
  uint64_t index = 0;
};

// Element i has the scales encode[i / block] and decode[i / block].
struct StripScales {
  const float* encode = nullptr;
  const float* decode = nullptr;
  int64_t block = 1;
};

// to[i] = bf16 of the code of from[i], decoded; from and to may be the same memory.
struct RoundTripStrip {
  const uint16_t* from = nullptr;
  uint16_t* to = nullptr;
  int64_t elements = 0;
  CodeForm form = CodeForm::kE4M3;
  StripScales scales = {};
  StripDraws draws = {};
};

// Codes of fp32, one in a byte, or of E2M1 two: `elements` is even then.
struct EncodeStrip {
  const float* from = nullptr;
  uint8_t* codes = nullptr;
  int64_t elements = 0;
  CodeForm form = CodeForm::kE4M3;
  StripScales scales = {};
};
struct DecodeStrip {
  const uint8_t* codes = nullptr;
  uint16_t* to = nullptr;
  int64_t elements = 0;
  CodeForm form = CodeForm::kE4M3;
  StripScales scales = {};
};

// encode[i] and decode[i] of blocks with amax[i] (scalar/block_scales.h).
struct BlockScalesStrip {
  plan::Recipe recipe = plan::Recipe::kNone;
  const uint32_t* amax = nullptr;
  int64_t blocks = 0;
  float tensor = 1;
  uint32_t big = 0;
  float* encode = nullptr;
  float* decode = nullptr;
};

// 16 rows of bf16, transformed (scalar/hadamard.h) and rounded; the same memory is allowed.
struct HadamardStrip {
  const uint16_t* from = nullptr;
  int64_t from_stride = 0;
  uint16_t* to = nullptr;
  int64_t to_stride = 0;
  int64_t columns = 0;
};

struct QuantizeLoops {
  // amax[i / block] = max(amax[i / block], magnitude of from[i]).
  void (*block_amax_f32)(const float* from, int64_t elements, int64_t block, uint32_t* amax);
  void (*block_amax_bf16)(const uint16_t* from, int64_t elements, int64_t block, uint32_t* amax);
  void (*block_scales)(const BlockScalesStrip&);
  void (*round_trip)(const RoundTripStrip&);
  void (*encode)(const EncodeStrip&);
  void (*decode)(const DecodeStrip&);
  void (*hadamard)(const HadamardStrip&);
};

extern const QuantizeLoops kQuantizePortable;
extern const QuantizeLoops kQuantizeAvx2;
extern const QuantizeLoops kQuantizeAvx512;

}  // namespace ravel::kernels::cpu
