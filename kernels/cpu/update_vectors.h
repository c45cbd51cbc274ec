#pragma once

// The blocks of update_block.h over vectors of a V (lanes_avx2.h, lanes_avx512.h), with the bits of
// update_block_loops.h. Two groups of 128 elements at a time are updated in two parts, with what
// the second needs from the first in the first cache; random bits are made for four. All calls but
// those of draws, which need all registers, are inlined (flatten): no function of a source that
// includes this is shared with one of another instruction set.

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <type_traits>

#include "common/check.h"
#include "kernels/cpu/narrow_vectors.h"
#include "kernels/cpu/update_codes.h"
#include "kernels/cpu/update_groups.h"
#include "kernels/cpu/update_states.h"

namespace ravel::kernels::cpu {
namespace {

// Rule::Step of a vector in two parts: the states, and, where v is rooted and m divided by it, the
// weight. Scalars are read from the block each time: as vectors they would be more than the
// registers hold, and whole vectors from memory are slower than one number for all lanes.
//
// The first part, which returns the direction of the step: v's root or, of rules that have none,
// what p goes down by.
template <typename V, typename Rule>
typename V::F StatesOf(const UpdateScalars& s,
                       typename V::F gradient,
                       typename V::F& m,
                       typename V::F& v) {
  using F = typename V::F;
  const F g = V::Mul(gradient, V::Set(s.gradient_scale));
  const F old_m = V::Mul(V::Set(s.beta1), m);
  if constexpr (Rule::kRule == ElementRule::kAdamW) {
    m = V::Fma(V::Set(s.one_minus_beta1), g, old_m);
    v = V::Fma(V::Mul(V::Set(s.one_minus_beta2), g), g, V::Mul(V::Set(s.beta2), v));
    return V::Sqrt(V::Mul(v, V::Set(s.inverse_correction2)));
  } else if constexpr (Rule::kRule == ElementRule::kLion) {
    const F zero = V::Set(0.0f);
    const auto one = V::AsInt(V::Set(1.0f));
    const F direction = V::Fma(V::Set(s.one_minus_beta1), g, old_m);
    const auto sign = [&](typename V::Mask mask) {
      return V::AsFloat(V::Select(mask, one, V::Set(0u)));
    };
    m = V::Fma(V::Set(s.one_minus_beta2), g, V::Mul(V::Set(s.beta2), m));
    return V::Sub(sign(V::Less(zero, direction)), sign(V::Less(direction, zero)));
  } else {
    m = V::Add(old_m, g);
    return Rule::kRule == ElementRule::kSgdNesterov ? V::Add(g, V::Mul(V::Set(s.beta1), m)) : m;
  }
}

// The second, from the new m.
template <typename V, typename Rule>
typename V::F WeightOf(const UpdateScalars& s,
                       typename V::F p,
                       typename V::F m,
                       typename V::F direction) {
  using F = typename V::F;
  const bool decays = s.weight_decay != 0.0f;
  if constexpr (Rule::kRule == ElementRule::kSgd || Rule::kRule == ElementRule::kSgdNesterov) {
    const F u = decays ? V::Add(direction, V::Mul(V::Set(s.weight_decay), p)) : direction;
    return V::Sub(p, V::Mul(V::Set(s.learning_rate), u));
  } else {
    const F u =
        Rule::kRule == ElementRule::kAdamW
            ? V::Div(V::Mul(m, V::Set(s.inverse_correction1)), V::Add(direction, V::Set(s.epsilon)))
            : direction;
    return V::FmaNegated(
        V::Set(s.learning_rate), decays ? V::Fma(V::Set(s.weight_decay), p, u) : u, p);
  }
}

// What the groups of a block share.
struct Shared {
  const PhiloxRounds& rounds;
  bool alike;  // word 1 of the counter is the same in all draws
};

template <StateForm kMean, StateForm kSquare>
constexpr bool kDraws =
    kMean == StateForm::kFp8 || kSquare == StateForm::kFp8 || kSquare == StateForm::kBf16;
// Elements are taken in pairs.
template <StateForm kMean, StateForm kSquare>
constexpr bool kPairs = kDraws<kMean, kSquare> || kMean == StateForm::kBf16;

// Asks for the lines of 2 kLanes elements of kBytes some way ahead of element i, which may be
// behind the end: with as much arithmetic as narrow states take, a core runs ahead of few lines by
// itself.
template <typename V, int64_t kBytes, bool kWrites>
__attribute__((always_inline)) inline void Fetch(const void* from, int64_t i) {
  constexpr int64_t kAhead = 1024;
  constexpr int64_t kLine = 64;
  const auto at = reinterpret_cast<uintptr_t>(from) + static_cast<uintptr_t>((i + kAhead) * kBytes);
  for (uintptr_t line = 0; line < 2 * V::kLanes * kBytes; line += kLine) {
    __builtin_prefetch(reinterpret_cast<const void*>(at + line), kWrites ? 1 : 0, 3);
  }
}

template <typename V>
__attribute__((always_inline)) inline void FetchGradient(const UpdateBlock& block, int64_t j) {
  if (block.bf16_gradient) {
    Fetch<V, 2, false>(block.gradient, j);
  } else {
    Fetch<V, 4, false>(block.gradient, j);
  }
}

template <typename V>
__attribute__((always_inline)) inline void FetchWeights(const UpdateBlock& block, int64_t j) {
  if (block.remainder != nullptr) {
    Fetch<V, 2, true>(block.remainder, j);
  } else {
    Fetch<V, 4, true>(block.main, j);
  }
  if (block.weight != nullptr) {
    Fetch<V, 2, true>(block.weight, j);
  }
}

template <typename V>
struct GroupScales {
  GroupScales(const UpdateBlock& block, int64_t at)
      : mean(CodeAt(block.mean, at)), square(CodeAt(block.square, at)) {}
  static uint8_t CodeAt(const StateBlock& state, int64_t at) {
    return state.scale == nullptr ? uint8_t{127} : state.scale[at / kUpdateGroup];
  }

  bool HaveFactors() const { return mean.has_factor && square.has_factor; }

  GroupScale<V, false> mean;
  GroupScale<V, true> square;
};

// The first part of the n elements from `at` on, a group at most: new states, of which those of fp8
// wait for their scale. `group`: 0 or 1, which of `values`. kFactors: the scales have factors.
template <typename V, typename Rule, StateForm kMean, StateForm kSquare, bool kFactors>
void UpdateStates(const UpdateBlock& block,
                  const GroupScales<V>& scales,
                  int64_t at,
                  int64_t n,
                  const uint16_t* halves,
                  int64_t group,
                  TwoGroups<V>& values) {
  constexpr bool kPair = kPairs<kMean, kSquare>;
  const int64_t first = group * kUpdateGroup;
  Range<V> means;
  Range<V> squares;
  for (int64_t i = 0; i < n; i += 2 * V::kLanes) {
    const int64_t j = at + i;
    FetchGradient<V>(block, j);
    Fetch<V, StateBytes(kMean), true>(block.mean.values, j);
    Fetch<V, StateBytes(kSquare), true>(block.square.values, j);
    const auto g = block.bf16_gradient
                       ? LoadBf16<V, kPair>(static_cast<const uint16_t*>(block.gradient) + j)
                       : LoadFloats<V, kPair>(static_cast<const float*>(block.gradient) + j);
    auto m = LoadState<V, kMean, false, kPair, kFactors>(block.mean, scales.mean, j);
    auto v = LoadState<V, kSquare, true, kPair, kFactors>(block.square, scales.square, j);
    const Two<V> direction = {StatesOf<V, Rule>(block.scalars, g.first, m.first, v.first),
                              StatesOf<V, Rule>(block.scalars, g.second, m.second, v.second)};
    StoreBoth<V>(values.means + first + i, m);
    StoreBoth<V>(values.directions + first + i, direction);
    StoreState<V, kMean, false, kPair>(block.mean, halves + i, j, m, means);
    StoreState<V, kSquare, true, kPair>(block.square, halves + i, j, v, squares);
    if constexpr (kSquare == StateForm::kFp8) {
      StoreBoth<V>(values.squares + first + i, v);
    }
  }
  values.mean_ranges[group] = means;
  values.square_ranges[group] = squares;
}

// The second part of n elements: weights.
template <typename V, typename Rule, bool kPair>
void UpdateWeights(const UpdateBlock& block, int64_t at, int64_t n, const TwoGroups<V>& values) {
  for (int64_t i = 0; i < n; i += 2 * V::kLanes) {
    const int64_t j = at + i;
    FetchWeights<V>(block, j);
    auto p = LoadWeights<V, kPair>(block, j);
    const Two<V> m = LoadBoth<V>(values.means + i);
    const Two<V> direction = LoadBoth<V>(values.directions + i);
    p.first = WeightOf<V, Rule>(block.scalars, p.first, m.first, direction.first);
    p.second = WeightOf<V, Rule>(block.scalars, p.second, m.second, direction.second);
    StoreWeights<V, kPair>(block, j, p);
  }
}

// n elements from `at` on, two groups at most, whole pairs of vectors. In parts: what follows a
// root or a division waits for it, and the scale of a group is known some time after its last
// value. Meanwhile the core has the other group's first part, and both groups' weights.
template <typename V, typename Rule, StateForm kMean, StateForm kSquare>
void UpdateTwo(
    const UpdateBlock& block, int64_t at, int64_t n, const uint16_t* halves, TwoGroups<V>& values) {
  constexpr bool kMeanCodes = kMean == StateForm::kFp8;
  constexpr bool kSquareCodes = kSquare == StateForm::kFp8;
  for (int64_t i = 0; i < n; i += kUpdateGroup) {
    const GroupScales<V> scales(block, at + i);
    const auto update = [&](auto factors) {
      UpdateStates<V, Rule, kMean, kSquare, factors>(block,
                                                     scales,
                                                     at + i,
                                                     std::min(kUpdateGroup, n - i),
                                                     halves + i,
                                                     i / kUpdateGroup,
                                                     values);
    };
    if (!(kMeanCodes || kSquareCodes) || scales.HaveFactors()) {
      update(std::true_type{});
    } else {
      update(std::false_type{});
    }
  }
  NormalGroups<V, kMean, kSquare> groups;
  const bool two = (kMeanCodes || kSquareCodes) && n == 2 * kUpdateGroup;
  if constexpr (kMeanCodes || kSquareCodes) {
    if (two) {
      groups.Open(block, at, values);
    }
  }
  UpdateWeights<V, Rule, kPairs<kMean, kSquare>>(block, at, n, values);
  if (two && groups.AreNormal(values)) {
    groups.Store(block, at, values, halves);
    return;
  }
  for (int64_t i = 0; i < n && (kMeanCodes || kSquareCodes); i += kUpdateGroup) {
    const int64_t count = std::min(kUpdateGroup, n - i);
    const int64_t group = i / kUpdateGroup;
    if constexpr (kMeanCodes) {
      StoreGroup<V, false>(
          block.mean, at + i, count, values.means + i, values.mean_ranges[group], halves + i);
    }
    if constexpr (kSquareCodes) {
      StoreGroup<V, true>(
          block.square, at + i, count, values.squares + i, values.square_ranges[group], halves + i);
    }
  }
}

// n elements from `at` on, kDrawnElements at most, whole pairs of vectors.
template <typename V, typename Rule, StateForm kMean, StateForm kSquare>
void UpdateDrawn(const UpdateBlock& block, int64_t at, int64_t n, const Shared& shared) {
  Halves halves;
  if constexpr (kDraws<kMean, kSquare>) {
    Draw<V>(block, at, n, shared.rounds, shared.alike, halves);
  }
  TwoGroups<V> values;
  constexpr int64_t kTwo = 2 * kUpdateGroup;
  for (int64_t i = 0; i < n; i += kTwo) {
    UpdateTwo<V, Rule, kMean, kSquare>(block, at + i, std::min(kTwo, n - i), halves.Of(i), values);
  }
}

// A group that is not whole pairs of vectors: as copies with zeros behind its elements, which
// change no maximum.
template <typename V, typename Rule, StateForm kMean, StateForm kSquare>
void UpdatePart(const UpdateBlock& block, const Shared& shared) {
  constexpr size_t kBytes = kUpdateGroup * sizeof(float);
  alignas(64) std::byte copies[6][kBytes];
  const auto n = static_cast<size_t>(block.elements);
  const auto lend = [](const void* from, size_t bytes, std::byte* copy) -> void* {
    if (from == nullptr) {
      return nullptr;
    }
    std::memset(copy, 0, kBytes);
    std::memcpy(copy, from, bytes);
    return copy;
  };
  const auto give_back = [](void* to, size_t bytes, const std::byte* copy) {
    if (to != nullptr) {
      std::memcpy(to, copy, bytes);
    }
  };
  UpdateBlock part = block;
  part.elements = RoundUp(block.elements, 2 * V::kLanes);
  part.gradient = lend(block.gradient, n * (block.bf16_gradient ? 2 : 4), copies[0]);
  part.main = static_cast<float*>(lend(block.main, n * 4, copies[1]));
  part.weight = static_cast<uint16_t*>(lend(block.weight, n * 2, copies[2]));
  part.remainder = static_cast<int16_t*>(lend(block.remainder, n * 2, copies[3]));
  part.mean.values = lend(block.mean.values, n * StateBytes(kMean), copies[4]);
  part.square.values = lend(block.square.values, n * StateBytes(kSquare), copies[5]);
  UpdateDrawn<V, Rule, kMean, kSquare>(part, 0, part.elements, shared);
  give_back(block.main, n * 4, copies[1]);
  give_back(block.weight, n * 2, copies[2]);
  give_back(block.remainder, n * 2, copies[3]);
  give_back(block.mean.values, n * StateBytes(kMean), copies[4]);
  give_back(block.square.values, n * StateBytes(kSquare), copies[5]);
}

// A function for each form: in one of all forms the compiler keeps registers less well.
template <typename V, typename Rule, StateForm kMean, StateForm kSquare>
__attribute__((noinline, flatten)) void UpdateGroups(const UpdateBlock& block) {
  const PhiloxRounds rounds(block.seed, scalar::PhiloxCounter(FirstDraw(block, 0)));
  const uint64_t last = FirstDraw(block, block.elements - 1).block;
  const Shared shared = {.rounds = rounds, .alike = FirstDraw(block, 0).block >> 32 == last >> 32};
  const int64_t rest = block.elements % kUpdateGroup;
  const int64_t whole = block.elements - (rest % (2 * V::kLanes) == 0 ? 0 : rest);
  for (int64_t at = 0; at < whole; at += kDrawnElements) {
    UpdateDrawn<V, Rule, kMean, kSquare>(block, at, std::min(kDrawnElements, whole - at), shared);
  }
  if (whole < block.elements) {
    UpdatePart<V, Rule, kMean, kSquare>(GroupAt(block, whole), shared);
  }
}

// visit<form>() of a state whose form may be narrow only where kNarrow.
template <bool kNarrow, typename Visit>
void WithForm(StateForm form, const Visit& visit) {
  if constexpr (kNarrow) {
    if (form == StateForm::kBf16) {
      return visit(std::integral_constant<StateForm, StateForm::kBf16>{});
    }
    if (form == StateForm::kFp8) {
      return visit(std::integral_constant<StateForm, StateForm::kFp8>{});
    }
  }
  visit(std::integral_constant<StateForm, StateForm::kF32>{});
}

template <typename V>
void UpdateVectors(const UpdateBlock& block) {
  scalar::ForEachRule([&](auto rule) {
    using Rule = decltype(rule);
    if (Rule::kRule != block.rule) {
      return;
    }
    WithForm<Rule::kNarrowStates>(block.mean.form, [&](auto mean) {
      if constexpr (Rule::kStates == 1) {
        UpdateGroups<V, Rule, mean.value, StateForm::kNone>(block);
      } else {
        WithForm<Rule::kNarrowStates>(block.square.form, [&](auto square) {
          UpdateGroups<V, Rule, mean.value, square.value>(block);
        });
      }
    });
  });
}

}  // namespace
}  // namespace ravel::kernels::cpu
