#pragma once

// Updates of a run of elements, group by group: one source for each instruction set, the same bits
// from all. update_block_loops.h has them as plain loops, update_vectors.h as vectors.

#include <cstdint>

#include "kernels/scalar/update_rules.h"
#include "kernels/update.h"

namespace ravel::kernels::cpu {

enum class StateForm { kNone, kF32, kBf16, kFp8 };

// A state of the block's elements, from the first on, and the scales of their groups where it is
// fp8.
struct StateBlock {
  void* values = nullptr;
  StateForm form = StateForm::kNone;
  uint8_t* scale = nullptr;
};

// Consecutive elements of a tensor. Where a state is fp8, a group begins with the first, and they
// are of one row, or of rows that are whole groups. A main weight is `main`, or `weight` with
// `remainder`; `weight` is rounded from it where it is there.
struct UpdateBlock {
  float* main = nullptr;
  uint16_t* weight = nullptr;  // bf16, or fp16
  bool fp16_weight = false;
  int16_t* remainder = nullptr;
  const void* gradient = nullptr;
  bool bf16_gradient = false;
  StateBlock mean = {};
  StateBlock square = {};
  int64_t elements = 0;
  uint64_t index = 0;  // of the first element in the tensor
  uint64_t seed = 0;
  uint32_t site = 0;
  uint32_t step = 0;
  ElementRule rule = ElementRule::kAdamW;
  UpdateScalars scalars = {};
};

void UpdateBlockPortable(const UpdateBlock& block);
void UpdateBlockAvx2(const UpdateBlock& block);
void UpdateBlockAvx512(const UpdateBlock& block);

}  // namespace ravel::kernels::cpu
