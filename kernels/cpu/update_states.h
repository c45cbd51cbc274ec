#pragma once

// States of update_vectors.h, weights and gradients as vectors, and the random bits that round
// states. Narrow states are taken in pairs (narrow_vectors.h).

#include <cstddef>

#include "kernels/cpu/narrow_vectors.h"
#include "kernels/cpu/update_groups.h"

namespace ravel::kernels::cpu {
namespace {

// Elements whose draws are made beside each other.
constexpr int64_t kDrawnElements = 4 * kUpdateGroup;
// Their blocks of scalar/philox.h, one more where they begin inside one, in whole vectors.
constexpr int64_t kDrawnBlocks = kDrawnElements / scalar::kStateBlock + 2;

// The 16 random bits of every element, and how many elements of the first block are before the
// first.
struct alignas(64) Halves {
  uint16_t values[kDrawnBlocks * scalar::kStateBlock];
  int64_t first = 0;

  const uint16_t* Of(int64_t element) const { return values + first + element; }
};

// The first draw of the block of scalar/philox.h that has an element.
scalar::PhiloxPosition FirstDraw(const UpdateBlock& block, int64_t at) {
  const uint64_t index = block.index + static_cast<uint64_t>(at);
  return {.block = scalar::StateDraw(index / scalar::kStateBlock * scalar::kStateBlock),
          .step = block.step,
          .site = block.site,
          .purpose = scalar::PhiloxPurpose::kOptimizerState};
}

// The halves of a block of scalar/philox.h, whose first draw is at `position`.
void DrawBlock(uint64_t seed, scalar::PhiloxPosition position, uint16_t* to) {
  for (uint32_t e = 0; e < scalar::kBlockHalves; ++e) {
    if (e > 0 && e % scalar::kDrawHalves == 0) {
      ++position.block;
    }
    const uint32_t half =
        scalar::PhiloxHalf(scalar::DrawStates(seed, position), e % scalar::kDrawHalves);
    to[e] = static_cast<uint16_t>(half);
    to[e + scalar::kBlockHalves] = static_cast<uint16_t>(scalar::ExchangeBytes(half));
  }
}

// The halves of the n elements of a block from `at` on, at most kDrawnElements. `alike`: word 1 of
// the counter is the same in all draws of the block.
template <typename V>
void Draw(const UpdateBlock& block,
          int64_t at,
          int64_t n,
          const PhiloxRounds& rounds,
          bool alike,
          Halves& halves) {
  constexpr int64_t kBlock = scalar::kStateBlock;
  constexpr int64_t kOfVector = V::kLanes / 2 / scalar::kBlockDraws;  // blocks
  halves.first = static_cast<int64_t>((block.index + static_cast<uint64_t>(at)) % kBlock);
  const int64_t blocks = (halves.first + n + kBlock - 1) / kBlock;
  scalar::PhiloxPosition position = FirstDraw(block, at);
  if (!alike) {
    for (int64_t i = 0; i < blocks; ++i, position.block += scalar::kBlockDraws) {
      DrawBlock(block.seed, position, halves.values + i * kBlock);
    }
    return;
  }
  const auto first_of = [&](int64_t i) {
    return position.block + static_cast<uint64_t>(i * scalar::kBlockDraws);
  };
  int64_t i = 0;
  for (; i + V::kDrawVectors * kOfVector <= blocks; i += V::kDrawVectors * kOfVector) {
    DrawHalves<V, V::kDrawVectors>(rounds, first_of(i), halves.values + i * kBlock);
  }
  for (; i < blocks; i += kOfVector) {
    DrawHalves<V, 1>(rounds, first_of(i), halves.values + i * kBlock);
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

// kFactors: the scale has a factor.
template <typename V, StateForm kForm, bool kSquare, bool kPair, bool kFactors>
Two<V> LoadState(const StateBlock& state, const GroupScale<V, kSquare>& scale, int64_t i) {
  if constexpr (kForm == StateForm::kF32) {
    return LoadFloats<V, kPair>(static_cast<const float*>(state.values) + i);
  } else if constexpr (kForm == StateForm::kBf16) {
    return LoadBf16<V, kPair>(static_cast<const uint16_t*>(state.values) + i);
  } else if constexpr (kForm == StateForm::kFp8) {
    Two<V> x;
    const auto* codes = static_cast<const uint8_t*>(state.values) + i;
    if constexpr (kSquare) {
      UE5M3PairOf<V, kFactors>(codes, scale, x.first, x.second);
    } else {
      E4M3PairOf<V, kFactors>(codes, scale, x.first, x.second);
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

}  // namespace
}  // namespace ravel::kernels::cpu
