#pragma once

// Device code of updates with states in any form: reading and writing them, their groups in a warp,
// and the random bits that round them.

#include "kernels/cuda/update_pieces.cuh"
#include "kernels/scalar/fp8_state.h"
#include "kernels/scalar/philox.h"

namespace ravel::kernels::cuda {

// A state in any form, `i` from its first element.
struct StateAt {
  void* values;
  StateForm form;
  bool square;
};

__device__ inline float ReadState(const StateAt& state, int64_t i, uint8_t scale) {
  if (state.form == StateForm::kF32) {
    return static_cast<const float*>(state.values)[i];
  }
  if (state.form == StateForm::kBf16) {
    return ToFloat(static_cast<const Bf16*>(state.values)[i]);
  }
  const uint8_t code = static_cast<const uint8_t*>(state.values)[i];
  return state.square ? scalar::DecodeSquare(code, scale) : scalar::DecodeMean(code, scale);
}

__device__ inline void WriteState(
    const StateAt& state, int64_t i, uint8_t scale, uint32_t random16, float x) {
  if (state.form == StateForm::kF32) {
    static_cast<float*>(state.values)[i] = x;
  } else if (state.form == StateForm::kBf16) {
    static_cast<Bf16*>(state.values)[i].bits =
        state.square ? scalar::Bf16Stochastic(x, random16) : scalar::Bf16Nearest(x);
  } else {
    static_cast<uint8_t*>(state.values)[i] = state.square ? scalar::EncodeSquare(x, scale, random16)
                                                          : scalar::EncodeMean(x, scale, random16);
  }
}

// The largest magnitude of a warp's values.
__device__ inline uint32_t AmaxOfWarp(uint32_t bits) {
  return CombineLanes<32>(bits, [](uint32_t a, uint32_t b) { return a < b ? b : a; });
}

// Elements of a group that a lane of a warp takes.
inline constexpr int kGroupWidth = 4;
inline constexpr int64_t kScaleGroup = 32 * kGroupWidth;

// The 16 random bits of four elements that begin at a global index, the first one's lowest: half a
// draw, or parts of two halves where the index is no multiple of four.
__device__ inline uint64_t DrawsAt(uint64_t seed, uint32_t site, uint32_t key, uint64_t index) {
  const auto four = [&](uint64_t at) {
    const scalar::PhiloxWords words =
        scalar::DrawStates(seed, {.block = scalar::StateDraw(at), .step = key, .site = site});
    const uint64_t halves = at % scalar::kDrawHalves < 4 ? words[0] | uint64_t{words[1]} << 32
                                                         : words[2] | uint64_t{words[3]} << 32;
    return scalar::IsExchanged(at) ? scalar::ExchangeBytes(halves) : halves;
  };
  const uint64_t skipped = index % 4;
  const uint64_t low = four(index - skipped);
  if (skipped == 0) {
    return low;
  }
  return low >> (16 * skipped) | four(index - skipped + 4) << (64 - 16 * skipped);
}

__device__ inline uint32_t HalfAt(uint64_t halves, int element) {
  return static_cast<uint32_t>(halves >> (16 * element)) & 0xFFFFu;
}

}  // namespace ravel::kernels::cuda
