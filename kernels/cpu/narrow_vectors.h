#pragma once

// What scalar/bfloat16.h, fp8_state.h and philox.h compute, a vector of elements at a time, with
// the same bits. V: Avx2Lanes or Avx512Lanes.

#include <bit>
#include <cstdint>

#include "kernels/cpu/narrow_constants.h"
#include "kernels/scalar/bfloat16.h"
#include "kernels/scalar/float16.h"
#include "kernels/scalar/fp8_state.h"
#include "kernels/scalar/philox.h"

namespace ravel::kernels::cpu {

inline constexpr uint32_t kMagnitude = 0x7FFFFFFFu;

static_assert(NarrowConstants().magnitude == kMagnitude);

// A pair is 2 kLanes values in two vectors: those of even index and those of odd index, so that two
// neighbours of 16 bits are the halves of one lane.

template <typename V>
typename V::I LowWord(typename V::I x) {
  return V::And(x, V::Set(kNarrow.low_word));
}
// The high words of a pair as words in order, and their low words.
template <typename V>
typename V::I HighWordsOf(typename V::I even, typename V::I odd) {
  return V::MergeHigh(odd, V::WordsDown(even));
}
template <typename V>
typename V::I LowWordsOf(typename V::I even, typename V::I odd) {
  return V::MergeHigh(V::WordsUp(odd), even);
}

template <typename V>
typename V::F MagnitudeOf(typename V::F x) {
  return V::AsFloat(V::And(V::AsInt(x), V::Set(kNarrow.magnitude)));
}

// Bf16Nearest of a pair, as words.
template <typename V>
typename V::I Bf16NearestWordsOf(typename V::F even, typename V::F odd) {
  const auto rounded = [](typename V::F x) {
    const auto bits = V::AsInt(x);
    return V::AddWhereSet(
        V::Set(kNarrow.bit16), bits, V::Add(bits, V::Set(kNarrow.below_half)), V::Set(kNarrow.one));
  };
  auto first = rounded(even);
  auto second = rounded(odd);
  if (V::Any(V::EitherIsNan(even, odd))) {
    first = V::Select(V::IsNan(even), V::Set(kNarrow.nan), first);
    second = V::Select(V::IsNan(odd), V::Set(kNarrow.nan), second);
  }
  return HighWordsOf<V>(first, second);
}

// Bf16HalfAway, in the high word.
template <typename V>
typename V::I Bf16HalfAwayOf(typename V::F x) {
  return V::Add(V::AsInt(x), V::Set(kNarrow.half));
}

// Bf16Stochastic, in the high word.
template <typename V>
typename V::I Bf16StochasticOf(typename V::F x, typename V::I random16) {
  const auto bits = V::AsInt(x);
  const auto magnitude = V::And(bits, V::Set(kNarrow.magnitude));
  const auto code = V::Or(V::Min(V::Add(magnitude, random16), V::Set(kNarrow.largest)),
                          V::And(bits, V::Set(~kMagnitude)));
  return V::Select(V::IsNan(x), V::Set(kNarrow.nan), code);
}

// Bf16Stochastic of a pair, as words; `random` has the random bits as words. Only what has a sign,
// is not finite, or would not be once it is rounded, needs more than a sum.
template <typename V>
typename V::I Bf16StochasticWordsOf(typename V::F even, typename V::F odd, typename V::I random) {
  const auto low = LowWord<V>(random);
  const auto high = V::template Right<16>(random);
  const auto most = V::MaxUnsigned(V::AsInt(even), V::AsInt(odd));
  if (V::AnyAbove(most, V::Set(kNarrow.largest))) {
    return HighWordsOf<V>(Bf16StochasticOf<V>(even, low), Bf16StochasticOf<V>(odd, high));
  }
  return HighWordsOf<V>(V::Add(V::AsInt(even), low), V::Add(V::AsInt(odd), high));
}

// Values of codes from 0 to 0x7F without sign.
template <typename V>
typename V::F ValueOfCode(typename V::I code) {
  const auto normal = V::template Left<20>(V::Add(code, V::Set(scalar::E4M3::kRebias)));
  const auto small = V::Mul(V::ToFloat(code), V::Set(0x1p-9f));
  return V::Select(V::Less(code, V::Set(8u)), small, V::AsFloat(normal));
}

// The same with a sign.
template <typename V>
typename V::F E4M3ValueOf(typename V::I code) {
  const auto magnitude = V::And(code, V::Set(0x7Fu));
  const auto sign = V::template Left<24>(V::And(code, V::Set(0x80u)));
  return V::AsFloat(V::Or(V::AsInt(ValueOfCode<V>(magnitude)), sign));
}

// The scale of a group of codes. A code's bits at the top of a float are its value in units of
// 2^-120 (E4M3) or 2^-112 (UE5M3), subnormal or not, and the inverse of that times it is exact;
// `factor` is this inverse times the scale.
template <typename V, bool kSquare>
struct GroupScale {
  static constexpr uint32_t kShift = kSquare ? 112 : 120;
  explicit GroupScale(uint8_t scale_code)
      : code(scale_code),
        factor(V::Set(std::bit_cast<float>((uint32_t{code} + kShift) << 23))),
        has_factor(code + kShift < 255) {}
  typename V::F Scale() const { return V::Set(scalar::E8M0Value(code)); }

  uint8_t code;
  typename V::F factor;
  bool has_factor;  // it is finite; a scale that is NaN has none
};

// DecodeMean of 2 kLanes codes, as a pair. kFactors: the scale has a factor.
template <typename V, bool kFactors>
void E4M3PairOf(const uint8_t* codes,
                const GroupScale<V, false>& group,
                typename V::F& even,
                typename V::F& odd) {
  const auto words = V::LoadSignedBytes(codes);
  if constexpr (!kFactors) {
    const auto bytes = V::LoadBytes(codes);
    even = V::Mul(E4M3ValueOf<V>(LowWord<V>(bytes)), group.Scale());
    odd = V::Mul(E4M3ValueOf<V>(V::template Right<16>(bytes)), group.Scale());
    return;
  }
  const auto value = [&](typename V::I top) {
    return V::Mul(V::AsFloat(V::And(top, V::Set(kNarrow.signed_code_bits))), group.factor);
  };
  even = value(V::template Left<20>(words));
  odd = value(V::template Left<4>(words));
}

// UE5M3Value of codes.
template <typename V>
typename V::F UE5M3ValueOf(typename V::I code) {
  const auto normal = V::template Left<20>(V::Add(code, V::Set(scalar::UE5M3::kRebias)));
  const auto small = V::Mul(V::ToFloat(code), V::Set(0x1p-17f));
  return V::Select(V::Less(code, V::Set(8u)), small, V::AsFloat(normal));
}

// DecodeSquare of 2 kLanes codes, as a pair.
template <typename V, bool kFactors>
void UE5M3PairOf(const uint8_t* codes,
                 const GroupScale<V, true>& group,
                 typename V::F& even,
                 typename V::F& odd) {
  const auto words = V::LoadBytes(codes);
  if constexpr (!kFactors) {
    even = V::Mul(UE5M3ValueOf<V>(LowWord<V>(words)), group.Scale());
    odd = V::Mul(UE5M3ValueOf<V>(V::template Right<16>(words)), group.Scale());
    return;
  }
  even = V::Mul(V::AsFloat(V::template Left<20>(words)), group.factor);
  odd = V::Mul(V::AsFloat(V::And(V::template Left<4>(words), V::Set(kNarrow.code_bits))),
               group.factor);
}

// E4M3Stochastic of no NaN; 0 of NaN.
template <typename V>
typename V::I E4M3StochasticOf(typename V::F x, typename V::I random16) {
  const auto bits = V::AsInt(x);
  const auto magnitude = V::And(bits, V::Set(kMagnitude));
  // From 448 on the sum of normal codes ends at the largest code, too.
  const auto sum = V::Add(magnitude, V::template Left<4>(random16));
  const auto normal = V::Sub(V::template Right<20>(sum), V::Set(scalar::E4M3::kRebias));
  const auto steps = V::Add(V::Mul(V::AsFloat(magnitude), V::Set(512.0f)),
                            V::Mul(V::ToFloat(random16), V::Set(0x1p-16f)));
  const auto is_small = V::Less(magnitude, V::Set(scalar::E4M3::kSmallestNormal));
  const auto code =
      V::Min(V::Select(is_small, V::Truncate(steps), normal), V::Set(scalar::kLargestE4M3));
  const auto sign = V::And(V::template Right<24>(bits), V::Set(0x80u));
  return V::Select(V::IsNan(x), V::Set(0u), V::Or(code, sign));
}

// UE5M3Stochastic of no NaN; 0 of NaN.
template <typename V>
typename V::I UE5M3StochasticOf(typename V::F x, typename V::I random16) {
  const auto magnitude = V::And(V::AsInt(x), V::Set(kMagnitude));
  const auto sum = V::Add(magnitude, V::template Left<4>(random16));
  const auto normal = V::Sub(V::template Right<20>(sum), V::Set(scalar::UE5M3::kRebias));
  const auto steps = V::Add(V::Mul(V::AsFloat(magnitude), V::Set(0x1p17f)),
                            V::Mul(V::ToFloat(random16), V::Set(0x1p-16f)));
  const auto is_small = V::Less(magnitude, V::Set(scalar::UE5M3::kSmallestNormal));
  const auto code =
      V::Min(V::Select(is_small, V::Truncate(steps), normal), V::Set(scalar::UE5M3::kLargest));
  return V::Select(V::IsNan(x), V::Set(0u), code);
}

// Which values of a group take normal codes.
struct NormalCodes {
  bool any = false;       // some may: no value is NaN, and the smallest is a normal float
  uint32_t smallest = 0;  // bits of the smallest magnitude that does

  // `most`: the largest bits, by lanes.
  template <typename V, bool kSquare>
  static NormalCodes Of(typename V::I most, uint8_t scale) {
    constexpr uint32_t kSmallest =
        kSquare ? scalar::UE5M3::kSmallestNormal : scalar::E4M3::kSmallestNormal;
    const uint32_t smallest = kSmallest + (uint32_t{scale} << 23) - (127u << 23);
    return {.any = scale + (kSmallest >> 23) > 127 &&
                   !V::AnyAbove(most, V::Set(scalar::kInfinityBits - 1)),
            .smallest = smallest};
  }
  // Magnitudes without NaN.
  template <typename V>
  bool Hold(typename V::F least) const {
    return any && !V::AnyAbove(V::Set(smallest), V::AsInt(least));
  }
};

// What the words of a normal float's top (sign, exponent and three bits of mantissa) are more than
// its code in units of the scale.
template <typename V, bool kSquare>
uint32_t TopsOfCodeZero(uint8_t scale) {
  constexpr uint32_t kRebias = kSquare ? scalar::UE5M3::kRebias : scalar::E4M3::kRebias;
  const uint32_t top = kRebias + 8u * scale - 8u * 127u;
  return top << 16 | (top & 0xFFFFu);
}

// The words of tops of a pair, after the sum with random bits, which end where a code's bits begin;
// `random` has them as words. From bit 4 on: the top, and the sign above it.
template <typename V>
typename V::I DrawnTops(typename V::F even, typename V::F odd, typename V::I random) {
  const auto draw_bits = V::Set(kNarrow.draw_bits);
  return HighWordsOf<V>(V::Add(V::AsInt(even), V::And(V::template Left<4>(random), draw_bits)),
                        V::Add(V::AsInt(odd), V::And(V::template Right<12>(random), draw_bits)));
}

// EncodeMean of a pair of a normal group, as words: of normal codes, and of zeros, whose tops are
// below any code's. No sum is above the largest code: a scale takes its largest value to 448 but
// for the last bits, and these end below the random ones.
template <typename V>
typename V::I EncodeNormalMeans(typename V::F even,
                                typename V::F odd,
                                typename V::I zero,
                                typename V::I random) {
  static_assert(scalar::ScaleOfMeans(0x43E00010u) == scalar::ScaleOfMeans(0x43E00000u) + 1);
  const auto words = DrawnTops<V>(even, odd, random);
  const auto tops = V::And(words, V::Set(kNarrow.unsigned_words));
  const auto codes = V::SubWordsToZero(V::template RightWords<4>(tops), zero);
  return V::Or(codes, V::And(V::template RightWords<8>(words), V::Set(kNarrow.signs)));
}

// EncodeMean of a pair, as words.
template <typename V>
typename V::I EncodeMeans(typename V::F even,
                          typename V::F odd,
                          typename V::F k,
                          typename V::I random) {
  return V::Or(
      E4M3StochasticOf<V>(V::Mul(even, k), LowWord<V>(random)),
      V::template Left<16>(E4M3StochasticOf<V>(V::Mul(odd, k), V::template Right<16>(random))));
}

// EncodeSquare of a pair of a normal group, as words: as means, without signs.
template <typename V>
typename V::I EncodeNormalSquares(typename V::F even,
                                  typename V::F odd,
                                  typename V::I zero,
                                  typename V::I random) {
  static_assert(scalar::ScaleOfSquares(0x47E00010u) == scalar::ScaleOfSquares(0x47E00000u) + 1);
  return V::SubWordsToZero(V::template RightWords<4>(DrawnTops<V>(even, odd, random)), zero);
}

// EncodeSquare of a pair, as words.
template <typename V>
typename V::I EncodeSquares(typename V::F even,
                            typename V::F odd,
                            typename V::F k,
                            typename V::I random) {
  const auto zero = V::Mul(k, V::Set(0.0f));  // NaN, and so above nothing, where k is NaN
  const auto encoded = [&](typename V::F v, typename V::I random16) {
    const auto code = UE5M3StochasticOf<V>(V::Mul(v, k), random16);
    const auto is_lost = V::Both(V::Less(code, V::Set(1u)), V::Less(zero, v));
    return V::AddWhere(is_lost, code, V::Set(1u));
  };
  return V::Or(encoded(even, LowWord<V>(random)),
               V::template Left<16>(encoded(odd, V::template Right<16>(random))));
}

// The Philox draws of a run of elements, whose counters differ in word 0 alone: what does not
// change from draw to draw in the first two rounds is computed once, and so are all keys.
struct PhiloxRounds {
  explicit PhiloxRounds(uint64_t seed, const scalar::PhiloxWords& counter) {
    uint32_t key0 = static_cast<uint32_t>(seed);
    uint32_t key1 = static_cast<uint32_t>(seed >> 32);
    for (size_t round = 0; round < scalar::kStateRounds; ++round) {
      keys0[round] = key0;
      keys1[round] = key1;
      key0 += 0x9E3779B9u;
      key1 += 0xBB67AE85u;
    }
    const uint64_t product1 = uint64_t{0xCD9E8D57u} * counter[2];
    const uint32_t second0 =
        static_cast<uint32_t>(product1 >> 32) ^ counter[1] ^ static_cast<uint32_t>(keys0[0]);
    const uint64_t product0 = uint64_t{0xD2511F53u} * second0;
    first2 = counter[3] ^ keys1[0];
    second_key0 = static_cast<uint32_t>(product1) ^ keys0[1];
    second2 = (product0 >> 32) ^ keys1[1];
    second3 = static_cast<uint32_t>(product0);
  }

  uint64_t keys0[scalar::kStateRounds];
  uint64_t keys1[scalar::kStateRounds];
  uint64_t first2;       // what word 2 is exclusive-or'd with in round 1
  uint64_t second_key0;  // the same of words 0 and 2 in round 2
  uint64_t second2;
  uint64_t second3;  // word 3 after round 2
};

// The halves of all elements of kVectors vectors of draws, whole blocks, from that at `position`
// on. A 64-bit lane has a draw; its words are the low halves of four registers, and what a product
// leaves above them is never read.
template <typename V, int64_t kVectors>
__attribute__((noinline)) void DrawHalves(const PhiloxRounds& rounds,
                                          uint64_t position,
                                          uint16_t* halves) {
  constexpr int64_t kLanes = V::kLanes / 2;
  static_assert(kLanes % scalar::kBlockDraws == 0);
  constexpr int kLast = scalar::kStateRounds - 1;
  const auto m0 = V::Held(V::Set64(0xD2511F53u));
  const auto m1 = V::Held(V::Set64(0xCD9E8D57u));
  const auto low = V::Set64(0xFFFFFFFFu);
  typename V::I c0[kVectors], c1[kVectors], c2[kVectors], c3[kVectors];
#pragma GCC unroll 8
  for (int64_t i = 0; i < kVectors; ++i) {
    c3[i] = V::MulWide(m0, V::Count64(position + static_cast<uint64_t>(i * kLanes)));
    c1[i] = V::MulWide(m1, V::Xor(V::SwapHalves(c3[i]), V::Set64(rounds.first2)));
    c0[i] = V::Xor(V::SwapHalves(c1[i]), V::Set64(rounds.second_key0));
    c2[i] = V::Xor(c3[i], V::Set64(rounds.second2));
    c3[i] = V::Set64(rounds.second3);
  }
#pragma GCC unroll 8
  for (int round = 2; round < kLast; ++round) {
#pragma GCC unroll 8
    for (int64_t i = 0; i < kVectors; ++i) {
      const auto product0 = V::MulWide(m0, c0[i]);
      const auto product1 = V::MulWide(m1, c2[i]);
      c0[i] = V::Xor(V::SwapHalves(product1), c1[i], V::Set64(rounds.keys0[round]));
      c1[i] = product1;
      c2[i] = V::Xor(V::SwapHalves(product0), c3[i], V::Set64(rounds.keys1[round]));
      c3[i] = product0;
    }
  }
  // Words 0 and 1 are the halves of one register in the order of elements, 2 and 3 of another.
#pragma GCC unroll 8
  for (int64_t i = 0; i < kVectors; ++i) {
    const auto first = V::SwapHalves(V::MulWide(m1, c2[i]));
    const auto second = V::SwapHalves(V::MulWide(m0, c0[i]));
    V::StoreBlocks(halves + i * kLanes / scalar::kBlockDraws * scalar::kStateBlock,
                   V::Xor(first, V::And(c1[i], low), V::Set64(rounds.keys0[kLast])),
                   V::Xor(second, V::And(c3[i], low), V::Set64(rounds.keys1[kLast])));
  }
}

}  // namespace ravel::kernels::cpu
