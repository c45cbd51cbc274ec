#pragma once

// The blocks of update_block.h over vectors of a V (lanes_avx2.h, lanes_avx512.h), with the bits of
// update_block_loops.h. A group of 128 elements goes through registers once; only new values of fp8
// states wait in an array, as their scale is that of the largest. All calls are inlined (flatten):
// no function of a source that includes this is shared with one of another instruction set.

#include <cstddef>
#include <cstring>
#include <type_traits>

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

scalar::PhiloxPosition FirstDraw(const UpdateBlock& block) {
  return {.block = block.index / 4,
          .step = block.step,
          .site = block.site,
          .purpose = scalar::PhiloxPurpose::kOptimizerState};
}

template <typename V, bool kMean, bool kSquare>
void Draw(const UpdateBlock& group, const PhiloxRounds& rounds, bool alike, Halves& halves) {
  halves.first = static_cast<int64_t>(group.index % 4);
  const int64_t draws = (halves.first + group.elements + 3) / 4;
  scalar::PhiloxPosition at = FirstDraw(group);
  if (alike) {
    DrawHalves<V, kMean, kSquare>(rounds, at.block, draws, halves.mean, halves.square);
    return;
  }
  for (int64_t i = 0; i < draws; ++i, ++at.block) {
    const scalar::PhiloxWords words = scalar::Philox4x32(group.seed, scalar::PhiloxCounter(at));
    halves.mean[i] = words[0] | uint64_t{words[1]} << 32;
    halves.square[i] = words[2] | uint64_t{words[3]} << 32;
  }
}

template <typename V>
typename V::F LoadWeight(const UpdateBlock& block, int64_t i) {
  if (block.remainder == nullptr) {
    return V::Load(block.main + i);
  }
  const auto remainder = V::Load(reinterpret_cast<const uint16_t*>(block.remainder) + i);
  // The weight is rounded half away: one less where the remainder's top bit is set.
  const auto high = V::Sub(V::Load(block.weight + i), V::template Right<15>(remainder));
  return V::AsFloat(V::Or(V::template Left<16>(high), remainder));
}

template <typename V>
void StoreWeight(const UpdateBlock& block, int64_t i, typename V::F p) {
  if (block.remainder == nullptr) {
    V::Store(block.main + i, p);
  } else {
    V::Store(reinterpret_cast<uint16_t*>(block.remainder) + i,
             V::And(V::AsInt(p), V::Set(0xFFFFu)));
  }
  if (block.weight != nullptr && block.fp16_weight) {
    alignas(64) float values[V::kLanes];
    V::Store(values, p);
    for (int64_t lane = 0; lane < V::kLanes; ++lane) {
      block.weight[i + lane] = scalar::Fp16Nearest(values[lane]);
    }
  } else if (block.weight != nullptr) {
    V::Store(block.weight + i, Bf16HalfAwayOf<V>(p));
  }
}

template <typename V>
typename V::F LoadBf16(const void* from, int64_t i) {
  return V::AsFloat(V::template Left<16>(V::Load(static_cast<const uint16_t*>(from) + i)));
}

template <typename V, StateForm kForm, bool kSquare>
typename V::F LoadState(const StateBlock& state, typename V::F scale, int64_t i) {
  if constexpr (kForm == StateForm::kF32) {
    return V::Load(static_cast<const float*>(state.values) + i);
  } else if constexpr (kForm == StateForm::kBf16) {
    return LoadBf16<V>(state.values, i);
  } else if constexpr (kForm == StateForm::kFp8) {
    const auto code = V::Load(static_cast<const uint8_t*>(state.values) + i);
    const auto value = V::Mul(E4M3ValueOf<V>(code), scale);
    return kSquare ? V::Mul(value, value) : value;
  } else {
    return V::Set(0.0f);
  }
}

// New values of an fp8 state, until all of the group are known.
template <typename V>
struct Kept {
  alignas(64) float values[kUpdateGroup];
  typename V::I amax = V::Set(0u);
};

template <typename V, StateForm kForm, bool kSquare>
void StoreState(
    const StateBlock& state, const uint16_t* halves, int64_t i, typename V::F x, Kept<V>& kept) {
  if constexpr (kForm == StateForm::kF32) {
    V::Store(static_cast<float*>(state.values) + i, x);
  } else if constexpr (kForm == StateForm::kBf16) {
    V::Store(static_cast<uint16_t*>(state.values) + i,
             kSquare ? Bf16StochasticOf<V>(x, V::Load(halves + i)) : Bf16NearestOf<V>(x));
  } else if constexpr (kForm == StateForm::kFp8) {
    V::Store(kept.values + i, x);
    kept.amax = V::Max(kept.amax, V::And(V::AsInt(x), V::Set(kMagnitude)));
  }
}

template <typename V, bool kSquare>
void StoreCodes(const StateBlock& state, const uint16_t* halves, int64_t n, const Kept<V>& kept) {
  const uint32_t amax = V::ReduceMax(kept.amax);
  const uint8_t scale = kSquare ? scalar::ScaleOfSquares(amax) : scalar::ScaleOfMeans(amax);
  *state.scale = scale;
  const auto k = V::Set(scalar::E8M0Multiplier(scale));
  for (int64_t i = 0; i < n; i += V::kLanes) {
    const auto x = V::Load(kept.values + i);
    const auto random16 = V::Load(halves + i);
    V::Store(
        static_cast<uint8_t*>(state.values) + i,
        kSquare ? EncodeSquareOf<V>(x, k, random16) : E4M3StochasticOf<V>(V::Mul(x, k), random16));
  }
}

// Rule::Step of a vector. The loops over its lanes become one instruction each.
template <typename V, typename Rule>
void StepOf(const UpdateScalars& scalars,
            typename V::F g,
            typename V::F& p,
            typename V::F& m,
            typename V::F& v) {
  alignas(64) float values[4][V::kLanes];
  V::Store(values[0], g);
  V::Store(values[1], p);
  V::Store(values[2], m);
  V::Store(values[3], v);
  for (int64_t i = 0; i < V::kLanes; ++i) {
    const scalar::AdamWElement next =
        Rule::Step(scalars, {values[1][i], values[2][i], values[3][i]}, values[0][i]);
    values[1][i] = next.p;
    values[2][i] = next.m;
    values[3][i] = next.v;
  }
  p = V::Load(values[1]);
  m = V::Load(values[2]);
  v = V::Load(values[3]);
}

// At most a group, in whole vectors.
template <typename V, typename Rule, StateForm kMean, StateForm kSquare>
void UpdateWhole(const UpdateBlock& block, const PhiloxRounds& rounds, bool alike) {
  constexpr bool kMeanDraws = kMean == StateForm::kFp8;
  constexpr bool kSquareDraws = kSquare == StateForm::kFp8 || kSquare == StateForm::kBf16;
  Halves halves;
  if constexpr (kMeanDraws || kSquareDraws) {
    Draw<V, kMeanDraws, kSquareDraws>(block, rounds, alike, halves);
  }
  const UpdateScalars scalars = block.scalars;
  const auto scale = [](const StateBlock& state) {
    return V::Set(state.scale == nullptr ? 1.0f : scalar::E8M0Value(*state.scale));
  };
  const auto mean_scale = scale(block.mean);
  const auto square_scale = scale(block.square);
  Kept<V> means;
  Kept<V> squares;
  for (int64_t i = 0; i < block.elements; i += V::kLanes) {
    const auto g = block.bf16_gradient ? LoadBf16<V>(block.gradient, i)
                                       : V::Load(static_cast<const float*>(block.gradient) + i);
    auto p = LoadWeight<V>(block, i);
    auto m = LoadState<V, kMean, false>(block.mean, mean_scale, i);
    auto v = LoadState<V, kSquare, true>(block.square, square_scale, i);
    StepOf<V, Rule>(scalars, g, p, m, v);
    StoreWeight<V>(block, i, p);
    StoreState<V, kMean, false>(block.mean, halves.Means(), i, m, means);
    StoreState<V, kSquare, true>(block.square, halves.Squares(), i, v, squares);
  }
  if constexpr (kMean == StateForm::kFp8) {
    StoreCodes<V, false>(block.mean, halves.Means(), block.elements, means);
  }
  if constexpr (kSquare == StateForm::kFp8) {
    StoreCodes<V, true>(block.square, halves.Squares(), block.elements, squares);
  }
}

// The groups of a block that are not whole vectors: as copies with zeros behind their elements,
// which change no maximum.
template <typename V, typename Rule, StateForm kMean, StateForm kSquare>
void UpdatePart(const UpdateBlock& block, const PhiloxRounds& rounds, bool alike) {
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
  part.elements = RoundUp(block.elements, V::kLanes);
  part.gradient = lend(block.gradient, n * (block.bf16_gradient ? 2 : 4), copies[0]);
  part.main = static_cast<float*>(lend(block.main, n * 4, copies[1]));
  part.weight = static_cast<uint16_t*>(lend(block.weight, n * 2, copies[2]));
  part.remainder = static_cast<int16_t*>(lend(block.remainder, n * 2, copies[3]));
  part.mean.values = lend(block.mean.values, n * StateBytes(kMean), copies[4]);
  part.square.values = lend(block.square.values, n * StateBytes(kSquare), copies[5]);
  UpdateWhole<V, Rule, kMean, kSquare>(part, rounds, alike);
  give_back(block.main, n * 4, copies[1]);
  give_back(block.weight, n * 2, copies[2]);
  give_back(block.remainder, n * 2, copies[3]);
  give_back(block.mean.values, n * StateBytes(kMean), copies[4]);
  give_back(block.square.values, n * StateBytes(kSquare), copies[5]);
}

template <typename V, typename Rule, StateForm kMean, StateForm kSquare>
void UpdateGroups(const UpdateBlock& block) {
  const PhiloxRounds rounds(block.seed, scalar::PhiloxCounter(FirstDraw(block)));
  // True: word 1 of the counter is the same in all draws.
  const uint64_t last = block.index + static_cast<uint64_t>(block.elements) - 1;
  const bool alike = block.index >> 34 == last >> 34;
  for (int64_t at = 0; at < block.elements; at += kUpdateGroup) {
    const UpdateBlock group = GroupAt(block, at);
    if (group.elements % V::kLanes == 0) {
      UpdateWhole<V, Rule, kMean, kSquare>(group, rounds, alike);
    } else {
      UpdatePart<V, Rule, kMean, kSquare>(group, rounds, alike);
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
