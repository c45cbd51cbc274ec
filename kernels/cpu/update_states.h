#pragma once

// States of update_vectors.h, weights and gradients as vectors, and the random bits that round
// states. Narrow states are taken in pairs (narrow_vectors.h).

#include <cstddef>

#include "kernels/cpu/narrow_vectors.h"
#include "kernels/cpu/update_groups.h"

namespace ravel::kernels::cpu {
namespace {

// Groups whose draws are made beside each other.
constexpr int64_t kDrawnGroups = 2;
constexpr int64_t kDrawnElements = kDrawnGroups * kUpdateGroup;
// Draws of these, one more where they begin inside one, in whole vectors.
constexpr int64_t kDrawnDraws = kDrawnElements / scalar::kStateDraw + 8;

// The 16 random bits of every element, and how many elements of the first draw are before the
// first.
struct alignas(64) Halves {
  uint64_t draws[2 * kDrawnDraws];
  int64_t first = 0;

  const uint16_t* Of(int64_t element) const {
    return reinterpret_cast<const uint16_t*>(draws) + first + element;
  }
};

scalar::PhiloxPosition FirstDraw(const UpdateBlock& block, int64_t at) {
  return {.block = (block.index + static_cast<uint64_t>(at)) / scalar::kStateDraw,
          .step = block.step,
          .site = block.site,
          .purpose = scalar::PhiloxPurpose::kOptimizerState};
}

// The draws of the n elements of a block from `at` on, at most kDrawnElements. `alike`: word 1 of
// the counter is the same in all draws of the block.
template <typename V>
void Draw(const UpdateBlock& block,
          int64_t at,
          int64_t n,
          const PhiloxRounds& rounds,
          bool alike,
          Halves& halves) {
  constexpr int64_t kLanes = V::kLanes / 2;
  constexpr int64_t kOfDraw = scalar::kStateDraw;
  halves.first = static_cast<int64_t>((block.index + static_cast<uint64_t>(at)) % kOfDraw);
  const int64_t draws = (halves.first + n + kOfDraw - 1) / kOfDraw;
  scalar::PhiloxPosition position = FirstDraw(block, at);
  if (!alike) {
    for (int64_t i = 0; i < draws; ++i, ++position.block) {
      const scalar::PhiloxWords words = scalar::DrawStates(block.seed, position);
      halves.draws[2 * i] = words[0] | uint64_t{words[1]} << 32;
      halves.draws[2 * i + 1] = words[2] | uint64_t{words[3]} << 32;
    }
    return;
  }
  int64_t i = 0;
  for (; i + V::kDrawVectors * kLanes <= draws; i += V::kDrawVectors * kLanes) {
    DrawHalves<V, V::kDrawVectors>(
        rounds, position.block + static_cast<uint64_t>(i), halves.draws + 2 * i);
  }
  for (; i < draws; i += kLanes) {
    DrawHalves<V, 1>(rounds, position.block + static_cast<uint64_t>(i), halves.draws + 2 * i);
  }
}

// Two vectors of consecutive elements: the first half and the second, or, where a state is narrow,
// those of even index and those of odd index.
template <typename V>
struct Two {
  typename V::F first;
  typename V::F second;
};

// One vector after the other.
template <typename V>
Two<V> LoadBoth(const float* from) {
  return {V::Held(V::Load(from)), V::Held(V::Load(from + V::kLanes))};
}
template <typename V>
void StoreBoth(float* to, const Two<V>& from) {
  V::Store(to, from.first);
  V::Store(to + V::kLanes, from.second);
}

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
    StoreBoth<V>(to, from);
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
Two<V> LoadState(const StateBlock& state, const GroupScale<V, kSquare>& scale, int64_t i) {
  if constexpr (kForm == StateForm::kF32) {
    return LoadFloats<V, kPair>(static_cast<const float*>(state.values) + i);
  } else if constexpr (kForm == StateForm::kBf16) {
    return LoadBf16<V, kPair>(static_cast<const uint16_t*>(state.values) + i);
  } else if constexpr (kForm == StateForm::kFp8) {
    Two<V> x;
    const auto* codes = static_cast<const uint8_t*>(state.values) + i;
    if constexpr (kSquare) {
      UE5M3PairOf<V>(codes, scale, x.first, x.second);
    } else {
      E4M3PairOf<V>(codes, scale, x.first, x.second);
    }
    return x;
  } else {
    return {V::Set(0.0f), V::Set(0.0f)};
  }
}

// The largest and the smallest bits of some values' magnitudes, by lanes, or of squares, whose sign
// is none, as they are; the smallest without NaN.
template <typename V>
struct Range {
  typename V::I most = V::Set(0u);
  typename V::F least = V::Set(0x1.fffffep127f);

  template <bool kSquare>
  void Add(typename V::F x) {
    const auto magnitude = kSquare ? x : MagnitudeOf<V>(x);
    most = V::MaxUnsigned(most, V::AsInt(magnitude));
    least = V::Min(magnitude, least);
  }
};

// Element j of the block and those after it; of an fp8 state only the range. `halves`: the random
// bits of these elements.
template <typename V, StateForm kForm, bool kSquare, bool kPair>
void StoreState(
    const StateBlock& state, const uint16_t* halves, int64_t j, const Two<V>& x, Range<V>& range) {
  if constexpr (kForm == StateForm::kF32) {
    StoreFloats<V, kPair>(static_cast<float*>(state.values) + j, x);
  } else if constexpr (kForm == StateForm::kBf16) {
    static_assert(kPair);
    auto* words = static_cast<uint16_t*>(state.values) + j;
    if constexpr (kSquare) {
      V::StoreAll(words, Bf16StochasticWordsOf<V>(x.first, x.second, V::LoadAll(halves)));
    } else {
      V::StoreAll(words, Bf16NearestWordsOf<V>(x.first, x.second));
    }
  } else if constexpr (kForm == StateForm::kFp8) {
    range.template Add<kSquare>(x.first);
    range.template Add<kSquare>(x.second);
  }
}

// The largest magnitude's bits of n values; what is not finite, or has a sign where none is
// expected, is rare.
template <typename V>
uint32_t AmaxOf(const float* values, int64_t n, const Range<V>& range) {
  const uint32_t amax = V::ReduceMax(range.most);
  if (amax < 0x7F800000u) {
    return amax;
  }
  auto most = V::Set(0u);
  for (int64_t i = 0; i < n; i += V::kLanes) {
    most = V::MaxUnsigned(most, V::AsInt(MagnitudeOf<V>(V::Load(values + i))));
  }
  return V::ReduceMax(most);
}

// The scale of a group of an fp8 state, n elements from `at` on, whose new values are known, and
// their codes. Of other states nothing.
template <typename V, StateForm kForm, bool kSquare>
struct GroupCodes {
  GroupCodes(
      const StateBlock& state, int64_t at, int64_t n, const float* values, const Range<V>& range) {
    if constexpr (kForm == StateForm::kFp8) {
      const uint32_t amax = AmaxOf<V>(values, n, range);
      const uint8_t scale = kSquare ? scalar::ScaleOfSquares(amax) : scalar::ScaleOfMeans(amax);
      state.scale[at / kUpdateGroup] = scale;
      codes = static_cast<uint8_t*>(state.values);
      zero = TopsOfCodeZero<V, kSquare>(scale);
      k = V::Set(scalar::E8M0Multiplier(scale));
      normal = NormalCodes::Of<V, kSquare>(range.most, scale);
      is_normal = normal.Hold<V>(range.least);
    }
  }

  // Element j of the block and those after it. kNormal: is_normal holds.
  template <bool kNormal>
  void Store(const Two<V>& x, typename V::I random, int64_t j) const {
    const auto bits = kSquare ? random : V::ExchangeBytes(random);
    const auto even = x.first;
    const auto odd = x.second;
    if (kNormal || normal.Hold<V>(V::Min(MagnitudeOf<V>(even), MagnitudeOf<V>(odd)))) {
      V::StoreBytes(codes + j,
                    kSquare ? EncodeNormalSquares<V>(even, odd, zero, bits)
                            : EncodeNormalMeans<V>(even, odd, zero, bits));
    } else {
      V::StoreBytes(
          codes + j,
          kSquare ? EncodeSquares<V>(even, odd, k, bits) : EncodeMeans<V>(even, odd, k, bits));
    }
  }

  bool is_normal = true;
  NormalCodes normal;
  uint8_t* codes = nullptr;
  typename V::I zero = V::Set(0u);
  typename V::F k = V::Set(1.0f);
};

}  // namespace
}  // namespace ravel::kernels::cpu
