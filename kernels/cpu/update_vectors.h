#pragma once

// The blocks of update_block.h over vectors of a V (lanes_avx2.h, lanes_avx512.h), with the bits of
// update_block_loops.h. A group of 128 elements goes through registers once; only new values of fp8
// states wait in an array, as their scale is that of the largest. Narrow states are taken in pairs
// (narrow_vectors.h). All calls but those of draws, which need all registers, are inlined
// (flatten): no function of a source that includes this is shared with one of another instruction
// set.

#include <cstddef>
#include <cstring>
#include <type_traits>
#include <utility>

#include "common/check.h"
#include "kernels/cpu/narrow_vectors.h"
#include "kernels/cpu/update_groups.h"

namespace ravel::kernels::cpu {
namespace {

// Draws of a group, one more where it begins inside one, in whole vectors.
constexpr int64_t kGroupDraws = kUpdateGroup / 4 + 8;

// The 16 random bits of every element for its two states, and how many elements of the first draw
// are before the group.
struct alignas(64) Halves {
  uint64_t mean[kGroupDraws];
  uint64_t square[kGroupDraws];
  int64_t first = 0;

  const uint16_t* Means() const { return reinterpret_cast<const uint16_t*>(mean) + first; }
  const uint16_t* Squares() const { return reinterpret_cast<const uint16_t*>(square) + first; }
};

scalar::PhiloxPosition FirstDraw(const UpdateBlock& block, int64_t at) {
  return {.block = (block.index + static_cast<uint64_t>(at)) / 4,
          .step = block.step,
          .site = block.site,
          .purpose = scalar::PhiloxPurpose::kOptimizerState};
}

// The draws of the n elements of a block from `at` on, at most a group.
template <typename V, bool kMean, bool kSquare>
void Draw(const UpdateBlock& block,
          int64_t at,
          int64_t n,
          const PhiloxRounds& rounds,
          bool alike,
          Halves& halves) {
  constexpr int64_t kLanes = V::kLanes / 2;
  halves.first = static_cast<int64_t>((block.index + static_cast<uint64_t>(at)) % 4);
  const int64_t draws = (halves.first + n + 3) / 4;
  scalar::PhiloxPosition position = FirstDraw(block, at);
  if (!alike) {
    for (int64_t i = 0; i < draws; ++i, ++position.block) {
      const scalar::PhiloxWords words =
          scalar::Philox4x32(block.seed, scalar::PhiloxCounter(position));
      halves.mean[i] = words[0] | uint64_t{words[1]} << 32;
      halves.square[i] = words[2] | uint64_t{words[3]} << 32;
    }
    return;
  }
  int64_t i = 0;
  for (; i + V::kDrawVectors * kLanes <= draws; i += V::kDrawVectors * kLanes) {
    DrawHalves<V, kMean, kSquare, V::kDrawVectors>(
        rounds, position.block + static_cast<uint64_t>(i), halves.mean + i, halves.square + i);
  }
  for (; i < draws; i += kLanes) {
    DrawHalves<V, kMean, kSquare, 1>(
        rounds, position.block + static_cast<uint64_t>(i), halves.mean + i, halves.square + i);
  }
}

// Two vectors of consecutive elements: the first half and the second, or, where a state is narrow,
// those of even index and those of odd index.
template <typename V>
struct Two {
  typename V::F first;
  typename V::F second;
};

template <typename V, bool kPair>
Two<V> LoadFloats(const float* from) {
  Two<V> to;
  if constexpr (kPair) {
    V::LoadPairs(from, to.first, to.second);
  } else {
    to = {V::Load(from), V::Load(from + V::kLanes)};
  }
  return to;
}

template <typename V, bool kPair>
void StoreFloats(float* to, const Two<V>& from) {
  if constexpr (kPair) {
    V::StorePairs(to, from.first, from.second);
  } else {
    V::Store(to, from.first);
    V::Store(to + V::kLanes, from.second);
  }
}

template <typename V, bool kPair>
Two<V> LoadBf16(const uint16_t* from) {
  if constexpr (kPair) {
    const auto words = V::LoadAll(from);
    return {V::AsFloat(V::template Left<16>(words)),
            V::AsFloat(V::And(words, V::Set(kNarrow.high_word)))};
  } else {
    const auto widened = [](typename V::I word) { return V::AsFloat(V::template Left<16>(word)); };
    return {widened(V::Load(from)), widened(V::Load(from + V::kLanes))};
  }
}

// The high words.
template <typename V, bool kPair>
void StoreHighWords(uint16_t* to, typename V::I first, typename V::I second) {
  if constexpr (kPair) {
    V::StoreAll(to, HighWordsOf<V>(first, second));
  } else {
    V::Store(to, V::template Right<16>(first));
    V::Store(to + V::kLanes, V::template Right<16>(second));
  }
}

template <typename V, bool kPair>
Two<V> LoadWeights(const UpdateBlock& block, int64_t i) {
  if (block.remainder == nullptr) {
    return LoadFloats<V, kPair>(block.main + i);
  }
  const uint16_t* weight = block.weight + i;
  const auto* remainder = reinterpret_cast<const uint16_t*>(block.remainder) + i;
  // The weight is rounded half away: one less where the remainder's top bit is set.
  if constexpr (kPair) {
    const auto low = V::LoadAll(remainder);
    const auto high = V::SubWords(V::LoadAll(weight), V::template RightWords<15>(low));
    return {V::AsFloat(LowWordsOf<V>(low, high)), V::AsFloat(HighWordsOf<V>(low, high))};
  } else {
    const auto joined = [&](int64_t at) {
      const auto low = V::Load(remainder + at);
      const auto high = V::Sub(V::Load(weight + at), V::template Right<15>(low));
      return V::AsFloat(V::Or(V::template Left<16>(high), low));
    };
    return {joined(0), joined(V::kLanes)};
  }
}

template <typename V, bool kPair>
void StoreWeights(const UpdateBlock& block, int64_t i, const Two<V>& p) {
  const auto first = V::AsInt(p.first);
  const auto second = V::AsInt(p.second);
  if (block.remainder == nullptr) {
    StoreFloats<V, kPair>(block.main + i, p);
  } else {
    auto* remainder = reinterpret_cast<uint16_t*>(block.remainder) + i;
    if constexpr (kPair) {
      V::StoreAll(remainder, LowWordsOf<V>(first, second));
    } else {
      V::Store(remainder, LowWord<V>(first));
      V::Store(remainder + V::kLanes, LowWord<V>(second));
    }
  }
  if (block.weight != nullptr && block.fp16_weight) {
    alignas(64) float values[2 * V::kLanes];
    StoreFloats<V, kPair>(values, p);
    for (int64_t lane = 0; lane < 2 * V::kLanes; ++lane) {
      block.weight[i + lane] = scalar::Fp16Nearest(values[lane]);
    }
  } else if (block.weight != nullptr) {
    StoreHighWords<V, kPair>(
        block.weight + i, Bf16HalfAwayOf<V>(p.first), Bf16HalfAwayOf<V>(p.second));
  }
}

template <typename V, StateForm kForm, bool kSquare, bool kPair>
Two<V> LoadState(const StateBlock& state, typename V::F scale, int64_t i) {
  if constexpr (kForm == StateForm::kF32) {
    return LoadFloats<V, kPair>(static_cast<const float*>(state.values) + i);
  } else if constexpr (kForm == StateForm::kBf16) {
    return LoadBf16<V, kPair>(static_cast<const uint16_t*>(state.values) + i);
  } else if constexpr (kForm == StateForm::kFp8) {
    Two<V> x;
    E4M3PairOf<V>(
        V::LoadBytes(static_cast<const uint8_t*>(state.values) + i), scale, x.first, x.second);
    return kSquare ? Two<V>{V::Mul(x.first, x.first), V::Mul(x.second, x.second)} : x;
  } else {
    return {V::Set(0.0f), V::Set(0.0f)};
  }
}

// New values of an fp8 state, until all of the group are known.
template <typename V>
struct Kept {
  alignas(64) float values[kUpdateGroup];
  typename V::I amax = V::Set(0u);
};

// Element i of the group, j of the block.
template <typename V, StateForm kForm, bool kSquare, bool kPair>
void StoreState(const StateBlock& state,
                const uint16_t* halves,
                int64_t i,
                int64_t j,
                const Two<V>& x,
                Kept<V>& kept) {
  if constexpr (kForm == StateForm::kF32) {
    StoreFloats<V, kPair>(static_cast<float*>(state.values) + j, x);
  } else if constexpr (kForm == StateForm::kBf16 && kSquare) {
    const auto random = V::LoadAll(halves + i);
    StoreHighWords<V, kPair>(static_cast<uint16_t*>(state.values) + j,
                             Bf16StochasticOf<V>(x.first, LowWord<V>(random)),
                             Bf16StochasticOf<V>(x.second, V::template Right<16>(random)));
  } else if constexpr (kForm == StateForm::kBf16) {
    StoreHighWords<V, kPair>(static_cast<uint16_t*>(state.values) + j,
                             Bf16NearestOf<V>(x.first),
                             Bf16NearestOf<V>(x.second));
  } else if constexpr (kForm == StateForm::kFp8) {
    for (const auto& [value, at] : {std::pair(x.first, i), std::pair(x.second, i + V::kLanes)}) {
      V::Store(kept.values + at, value);
      kept.amax = V::Max(kept.amax, V::And(V::AsInt(value), V::Set(kNarrow.magnitude)));
    }
  }
}

// The codes of a group that begins at `at`.
template <typename V, bool kSquare>
void StoreCodes(
    const StateBlock& state, const uint16_t* halves, int64_t at, int64_t n, const Kept<V>& kept) {
  const uint32_t amax = V::ReduceMax(kept.amax);
  const uint8_t scale = kSquare ? scalar::ScaleOfSquares(amax) : scalar::ScaleOfMeans(amax);
  state.scale[at / kUpdateGroup] = scale;
  const auto k = V::Set(scalar::E8M0Multiplier(scale));
  auto* codes = static_cast<uint8_t*>(state.values) + at;
  for (int64_t i = 0; i < n; i += 2 * V::kLanes) {
    const auto even = V::Load(kept.values + i);
    const auto odd = V::Load(kept.values + i + V::kLanes);
    const auto random = V::LoadAll(halves + i);
    V::StoreBytes(codes + i,
                  kSquare ? EncodeSquareWordsOf<V>(even, odd, k, random)
                          : E4M3WordsOf<V>(V::Mul(even, k), V::Mul(odd, k), random));
  }
}

// The scalars of a rule, one vector each.
template <typename V>
struct StepVectors {
  explicit StepVectors(const UpdateScalars& s)
      : scalars(s),
        scale(V::Set(s.gradient_scale)),
        beta1(V::Set(s.beta1)),
        beta2(V::Set(s.beta2)),
        rest1(V::Set(s.one_minus_beta1)),
        rest2(V::Set(s.one_minus_beta2)),
        correction1(V::Set(s.inverse_correction1)),
        correction2(V::Set(s.inverse_correction2)),
        epsilon(V::Set(s.epsilon)),
        decay(V::Set(s.weight_decay)),
        rate(V::Set(s.learning_rate)),
        minus_rate(V::Set(-s.learning_rate)) {}

  UpdateScalars scalars;
  typename V::F scale, beta1, beta2, rest1, rest2, correction1, correction2, epsilon, decay, rate,
      minus_rate;
};

// Rule::Step of a vector.
template <typename V, typename Rule>
void StepOf(const StepVectors<V>& s,
            typename V::F g,
            typename V::F& p,
            typename V::F& m,
            typename V::F& v) {
  const bool decays = s.scalars.weight_decay != 0.0f;
  g = V::Mul(g, s.scale);
  if constexpr (Rule::kRule == ElementRule::kAdamW) {
    m = V::Fma(s.rest1, g, V::Mul(s.beta1, m));
    v = V::Fma(V::Mul(s.rest2, g), g, V::Mul(s.beta2, v));
    const auto root = V::Sqrt(V::Mul(v, s.correction2));
    auto u = V::Div(V::Mul(m, s.correction1), V::Add(root, s.epsilon));
    u = decays ? V::Fma(s.decay, p, u) : u;
    p = V::Fma(s.minus_rate, u, p);
  } else if constexpr (Rule::kRule == ElementRule::kLion) {
    const auto zero = V::Set(0.0f);
    const auto one = V::AsInt(V::Set(1.0f));
    const auto direction = V::Fma(s.rest1, g, V::Mul(s.beta1, m));
    const auto sign = [&](typename V::Mask mask) { return V::Select(mask, one, V::Set(0u)); };
    auto u = V::Sub(V::AsFloat(sign(V::Less(zero, direction))),
                    V::AsFloat(sign(V::Less(direction, zero))));
    u = decays ? V::Fma(s.decay, p, u) : u;
    m = V::Fma(s.rest2, g, V::Mul(s.beta2, m));
    p = V::Fma(s.minus_rate, u, p);
  } else {
    m = V::Add(V::Mul(s.beta1, m), g);
    auto u = Rule::kRule == ElementRule::kSgdNesterov ? V::Add(g, V::Mul(s.beta1, m)) : m;
    u = decays ? V::Add(u, V::Mul(s.decay, p)) : u;
    p = V::Sub(p, V::Mul(s.rate, u));
  }
}

// What the groups of a block share.
template <typename V>
struct Shared {
  const PhiloxRounds& rounds;
  bool alike;  // word 1 of the counter is the same in all draws
  const StepVectors<V>& step;
};

// The group that begins at `at`: n elements, a multiple of 2 kLanes.
template <typename V, typename Rule, StateForm kMean, StateForm kSquare>
void UpdateWhole(const UpdateBlock& block, int64_t at, int64_t n, const Shared<V>& shared) {
  constexpr bool kMeanDraws = kMean == StateForm::kFp8;
  constexpr bool kSquareDraws = kSquare == StateForm::kFp8 || kSquare == StateForm::kBf16;
  constexpr bool kPair = kMeanDraws || kSquareDraws || kMean == StateForm::kBf16;
  Halves halves;
  if constexpr (kMeanDraws || kSquareDraws) {
    Draw<V, kMeanDraws, kSquareDraws>(block, at, n, shared.rounds, shared.alike, halves);
  }
  const auto scale = [&](const StateBlock& state) {
    return V::Set(state.scale == nullptr ? 1.0f
                                         : scalar::E8M0Value(state.scale[at / kUpdateGroup]));
  };
  const auto mean_scale = scale(block.mean);
  const auto square_scale = scale(block.square);
  Kept<V> means;
  Kept<V> squares;
  for (int64_t i = 0; i < n; i += 2 * V::kLanes) {
    const int64_t j = at + i;
    const auto g = block.bf16_gradient
                       ? LoadBf16<V, kPair>(static_cast<const uint16_t*>(block.gradient) + j)
                       : LoadFloats<V, kPair>(static_cast<const float*>(block.gradient) + j);
    auto p = LoadWeights<V, kPair>(block, j);
    auto m = LoadState<V, kMean, false, kPair>(block.mean, mean_scale, j);
    auto v = LoadState<V, kSquare, true, kPair>(block.square, square_scale, j);
    StepOf<V, Rule>(shared.step, g.first, p.first, m.first, v.first);
    StepOf<V, Rule>(shared.step, g.second, p.second, m.second, v.second);
    StoreWeights<V, kPair>(block, j, p);
    StoreState<V, kMean, false, kPair>(block.mean, halves.Means(), i, j, m, means);
    StoreState<V, kSquare, true, kPair>(block.square, halves.Squares(), i, j, v, squares);
  }
  if constexpr (kMean == StateForm::kFp8) {
    StoreCodes<V, false>(block.mean, halves.Means(), at, n, means);
  }
  if constexpr (kSquare == StateForm::kFp8) {
    StoreCodes<V, true>(block.square, halves.Squares(), at, n, squares);
  }
}

// The groups of a block that are not whole pairs of vectors: as copies with zeros behind their
// elements, which change no maximum.
template <typename V, typename Rule, StateForm kMean, StateForm kSquare>
void UpdatePart(const UpdateBlock& block, const Shared<V>& shared) {
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
  UpdateWhole<V, Rule, kMean, kSquare>(part, 0, part.elements, shared);
  give_back(block.main, n * 4, copies[1]);
  give_back(block.weight, n * 2, copies[2]);
  give_back(block.remainder, n * 2, copies[3]);
  give_back(block.mean.values, n * StateBytes(kMean), copies[4]);
  give_back(block.square.values, n * StateBytes(kSquare), copies[5]);
}

template <typename V, typename Rule, StateForm kMean, StateForm kSquare>
void UpdateGroups(const UpdateBlock& block) {
  const PhiloxRounds rounds(block.seed, scalar::PhiloxCounter(FirstDraw(block, 0)));
  const uint64_t last = block.index + static_cast<uint64_t>(block.elements) - 1;
  const StepVectors<V> step(block.scalars);
  const Shared<V> shared = {
      .rounds = rounds, .alike = block.index >> 34 == last >> 34, .step = step};
  for (int64_t at = 0; at < block.elements; at += kUpdateGroup) {
    const int64_t n = std::min(kUpdateGroup, block.elements - at);
    if (n % (2 * V::kLanes) == 0) {
      UpdateWhole<V, Rule, kMean, kSquare>(block, at, n, shared);
    } else {
      UpdatePart<V, Rule, kMean, kSquare>(GroupAt(block, at), shared);
    }
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
