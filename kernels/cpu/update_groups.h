#pragma once

// How a block is cut into groups. In an unnamed namespace: each instruction set has its own copy.

#include <algorithm>
#include <cstddef>

#include "kernels/cpu/update_block.h"

namespace ravel::kernels::cpu {
namespace {

constexpr size_t StateBytes(StateForm form) {
  switch (form) {
    case StateForm::kNone:
      return 0;
    case StateForm::kF32:
      return 4;
    case StateForm::kBf16:
      return 2;
    case StateForm::kFp8:
      return 1;
  }
  return 0;
}

inline StateBlock StateAt(StateBlock state, int64_t at) {
  if (state.values != nullptr) {
    state.values =
        static_cast<std::byte*>(state.values) + at * static_cast<int64_t>(StateBytes(state.form));
  }
  if (state.scale != nullptr) {
    state.scale += at / kUpdateGroup;
  }
  return state;
}

// The group that begins at element `at`, a multiple of kUpdateGroup.
inline UpdateBlock GroupAt(const UpdateBlock& block, int64_t at) {
  UpdateBlock group = block;
  group.elements = std::min(kUpdateGroup, block.elements - at);
  group.index += static_cast<uint64_t>(at);
  group.gradient =
      static_cast<const std::byte*>(block.gradient) + at * (block.bf16_gradient ? 2 : 4);
  group.main = block.main == nullptr ? nullptr : block.main + at;
  group.weight = block.weight == nullptr ? nullptr : block.weight + at;
  group.remainder = block.remainder == nullptr ? nullptr : block.remainder + at;
  group.mean = StateAt(block.mean, at);
  group.square = StateAt(block.square, at);
  return group;
}

}  // namespace
}  // namespace ravel::kernels::cpu
