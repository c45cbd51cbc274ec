#pragma once

// Scales and codes of fp8 states in update_vectors.h, from values of two groups at a time.

#include <cstddef>
#include <type_traits>

#include "kernels/cpu/lanes_four.h"
#include "kernels/cpu/narrow_vectors.h"
#include "kernels/cpu/update_groups.h"
#include "kernels/cpu/update_states.h"

namespace ravel::kernels::cpu {
namespace {

// What the first parts of two groups leave for the second.
template <typename V>
struct alignas(64) TwoGroups {
  float means[2 * kUpdateGroup];
  float squares[2 * kUpdateGroup];  // fp8 alone
  float directions[2 * kUpdateGroup];
  Range<V> mean_ranges[2];
  Range<V> square_ranges[2];
};

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

// Stores codes. encode(i): words of the pair at i.
template <typename V, typename Encode>
void StoreCodes(uint8_t* codes, int64_t n, const Encode& encode) {
  int64_t i = 0;
  for (; i + 4 * V::kLanes <= n; i += 4 * V::kLanes) {
    V::StoreBytes(codes + i, encode(i), encode(i + 2 * V::kLanes));
  }
  if (i < n) {
    V::StoreBytes(codes + i, encode(i));
  }
}

template <typename V, bool kSquare>
typename V::I StateBits(const uint16_t* halves) {
  const auto bits = V::LoadAll(halves);
  return kSquare ? bits : V::ExchangeBytes(bits);
}

template <typename V, bool kSquare>
typename V::I EncodeNormal(const Two<V>& x, typename V::I zero, typename V::I bits) {
  return kSquare ? EncodeNormalSquares<V>(x.first, x.second, zero, bits)
                 : EncodeNormalMeans<V>(x.first, x.second, zero, bits);
}

// The scale and the codes of n elements of an fp8 state from `at` on, a group at most, whose new
// values are known. `halves`: their random bits.
template <typename V, bool kSquare>
void StoreGroup(const StateBlock& state,
                int64_t at,
                int64_t n,
                const float* values,
                const Range<V>& range,
                const uint16_t* halves) {
  const uint32_t amax = AmaxOf<V>(values, n, range);
  const uint8_t scale = kSquare ? scalar::ScaleOfSquares(amax) : scalar::ScaleOfMeans(amax);
  state.scale[at / kUpdateGroup] = scale;
  const NormalCodes normal = NormalCodes::Of<V, kSquare>(range.most, scale);
  const auto zero = V::Set(TopsOfCodeZero<V, kSquare>(scale));
  const auto k = V::Set(scalar::E8M0Multiplier(scale));
  StoreCodes<V>(static_cast<uint8_t*>(state.values) + at, n, [&](int64_t i) {
    const auto x = LoadBoth<V>(values + i);
    const auto bits = StateBits<V, kSquare>(halves + i);
    if (normal.Hold<V>(V::Min(MagnitudeOf<V>(x.first), MagnitudeOf<V>(x.second)))) {
      return EncodeNormal<V, kSquare>(x, zero, bits);
    }
    return kSquare ? EncodeSquares<V>(x.first, x.second, k, bits)
                   : EncodeMeans<V>(x.first, x.second, k, bits);
  });
}

// The same of two whole groups and both states where all codes are normal or of zeros: four scales
// at a time.
template <typename V, StateForm kMean, StateForm kSquare>
struct NormalGroups {
  static constexpr bool kMeans = kMean == StateForm::kFp8;
  static constexpr bool kSquares = kSquare == StateForm::kFp8;

  // Of each group the first state, then the second one; where one is not fp8, the other twice.
  template <typename Of>
  static Four::I Lanes(const Of& of) {
    const uint32_t first = kMeans ? of(std::false_type{}) : of(std::true_type{});
    const uint32_t second = kSquares ? of(std::true_type{}) : of(std::false_type{});
    return Four::Set(first, first, second, second);
  }

  // Sets the scales of the groups from `at` on. Without a branch: what comes between this and the
  // question whether they are right need not wait.
  void Open(const UpdateBlock& block, int64_t at, const TwoGroups<V>& values) {
    const Range<V>* first = kMeans ? values.mean_ranges : values.square_ranges;
    const Range<V>* second = kSquares ? values.square_ranges : values.mean_ranges;
    const Four::I most =
        V::ReduceEachMax(first[0].most, first[1].most, second[0].most, second[1].most);
    const Four::I least =
        V::ReduceEachMin(first[0].least, first[1].least, second[0].least, second[1].least);
    // E8M0RoundUp of what is neither subnormal nor near the largest.
    const Four::I product = Four::Times(
        most, Lanes([](auto square) { return scalar::kOneOver448 - (square ? 8u << 23 : 0u); }));
    const Four::I scales = Four::Right<23>(Four::Add(product, Four::Set(0x007FFFFFu)));
    const auto smallest_normal = [](auto square) {
      return square ? scalar::UE5M3::kSmallestNormal : scalar::E4M3::kSmallestNormal;
    };
    smallest =
        Four::Add(Four::Left<23>(scales),
                  Lanes([&](auto square) { return smallest_normal(square) - (127u << 23); }));
    const Four::I few = Four::Above(
        Lanes([&](auto square) { return 128u - (smallest_normal(square) >> 23); }), scales);
    const Four::I outside = Four::Or(Four::Above(product, Four::Set(0x7E7FFFFFu)),
                                     Four::Above(Four::Set(0x00800000u), product));
    in_range = !Four::Any(Four::Or(few, outside));
    has_small = Four::Any(Four::Above(smallest, least));
    uint8_t* const to = kMeans ? block.mean.scale : block.square.scale;
    uint8_t* const also = kSquares ? block.square.scale : block.mean.scale;
    Four::StoreBytes(to + at / kUpdateGroup, also + at / kUpdateGroup, scales);
    const Four::I tops =
        Four::Add(Four::Left<3>(scales), Lanes([](auto square) {
                    return (square ? scalar::UE5M3::kRebias : scalar::E4M3::kRebias) - 8u * 127u;
                  }));
    Four::Store(zeros, Four::Or(Four::Left<16>(tops), Four::And(tops, Four::Set(0x0000FFFFu))));
  }

  // All codes are normal or of zeros. Where they are not, the scales may be wrong, too.
  bool AreNormal(const TwoGroups<V>& values) const {
    return in_range && (!has_small || OnlyZerosAreSmall(values));
  }
  bool OnlyZerosAreSmall(const TwoGroups<V>& values) const {
    alignas(16) uint32_t bounds[4];
    Four::Store(bounds, smallest);
    const float* const states[] = {kMeans ? values.means : values.squares,
                                   kSquares ? values.squares : values.means};
    auto below = V::Set(0u);  // more than 0 where one is
    for (size_t k = 0; k < 4; ++k) {
      const float* x = states[k / 2] + static_cast<int64_t>(k % 2) * kUpdateGroup;
      // One less, so that zeros are the largest.
      auto least = V::Set(~0u);
      for (int64_t i = 0; i < kUpdateGroup; i += V::kLanes) {
        const auto magnitude = V::AsInt(MagnitudeOf<V>(V::Load(x + i)));
        least = V::MinUnsigned(least, V::Sub(magnitude, V::Set(1u)));
      }
      const auto bound = V::Set(bounds[k] - 1);
      below = V::MaxUnsigned(below, V::Sub(V::MaxUnsigned(least, bound), least));
    }
    return !V::AnyAbove(below, V::Set(0u));
  }

  void Store(const UpdateBlock& block,
             int64_t at,
             const TwoGroups<V>& values,
             const uint16_t* halves) const {
    for (int64_t group = 0; group < 2; ++group) {
      const int64_t first = group * kUpdateGroup;
      if constexpr (kMeans) {
        Store<false>(block.mean, at + first, values.means + first, halves + first, zeros[group]);
      }
      if constexpr (kSquares) {
        Store<true>(
            block.square, at + first, values.squares + first, halves + first, zeros[2 + group]);
      }
    }
  }

  template <bool kOfSquares>
  static void Store(const StateBlock& state,
                    int64_t at,
                    const float* values,
                    const uint16_t* halves,
                    uint32_t zero) {
    const auto all = V::Set(zero);
    StoreCodes<V>(static_cast<uint8_t*>(state.values) + at, kUpdateGroup, [&](int64_t i) {
      return EncodeNormal<V, kOfSquares>(
          LoadBoth<V>(values + i), all, StateBits<V, kOfSquares>(halves + i));
    });
  }

  bool in_range = false;
  bool has_small = false;
  Four::I smallest;  // bits of the smallest magnitudes that take normal codes
  uint32_t zeros[4];
};

}  // namespace
}  // namespace ravel::kernels::cpu
