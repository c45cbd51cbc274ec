#pragma once

// Parts of updates in plain loops: the two forms of a main weight, and the random bits of an
// element's states.

#include <cstdint>

#include "kernels/element_update.h"
#include "kernels/scalar/bfloat16.h"
#include "kernels/scalar/philox.h"

namespace ravel::kernels::cpu {

inline float MainWeightAt(const ElementUpdateArgs& args, int64_t i) {
  return args.main_weight.present()
             ? args.main_weight.As<float>()[i]
             : scalar::JoinOf({.weight = args.weight.As<uint16_t>()[i],
                               .remainder = args.remainder.As<int16_t>()[i]});
}

inline void StoreMainWeight(const ElementUpdateArgs& args, int64_t i, float x) {
  const scalar::SplitWeight split = scalar::SplitOf(x);
  if (args.main_weight.present()) {
    args.main_weight.As<float>()[i] = x;
  } else {
    args.remainder.As<int16_t>()[i] = split.remainder;
  }
  if (args.weight.present()) {
    args.weight.As<uint16_t>()[i] = split.weight;
  }
}

// The draw of the four elements among which a global element is.
inline scalar::PhiloxWords StateDraw(uint64_t seed, uint32_t site, uint32_t step, uint64_t index) {
  return scalar::Philox4x32(
      seed,
      scalar::PhiloxCounter({.block = index / 4,
                             .step = step,
                             .site = site,
                             .purpose = scalar::PhiloxPurpose::kOptimizerState}));
}

// 16 bits of a draw: half 0 is the lower one of word 0. An element takes half index % 4 for its
// first state, and the fourth after that for its second.
inline uint32_t HalfOf(const scalar::PhiloxWords& words, uint64_t half) {
  const uint32_t word = words[half / 2];
  return half % 2 != 0 ? word >> 16 : word & 0xFFFFu;
}

}  // namespace ravel::kernels::cpu
