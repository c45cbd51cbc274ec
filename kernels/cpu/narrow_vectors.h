#pragma once

// What scalar/bfloat16.h, fp8_state.h and philox.h compute, a vector of elements at a time, with
// the same bits. V: Avx2Lanes or Avx512Lanes.

#include <cstdint>

#include "kernels/cpu/narrow_constants.h"
#include "kernels/scalar/bfloat16.h"
#include "kernels/scalar/float16.h"
#include "kernels/scalar/fp8_state.h"
#include "kernels/scalar/philox.h"

namespace ravel::kernels::cpu {

inline constexpr uint32_t kMagnitude = 0x7FFFFFFFu;

static_assert(NarrowConstants().magnitude == kMagnitude);
static_assert(NarrowConstants().smallest_normal == scalar::E4M3::kSmallestNormal);
static_assert(NarrowConstants().code == 1u << scalar::E4M3::kShift);
static_assert(NarrowConstants().smallest_root ==
              NarrowConstants().smallest_normal + NarrowConstants().code);
static_assert(NarrowConstants().largest_root == (scalar::kLargestE4M3 + scalar::E4M3::kRebias)
                                                    << scalar::E4M3::kShift);
static_assert(NarrowConstants().normal_range ==
              NarrowConstants().largest_root - NarrowConstants().smallest_normal);
static_assert(NarrowConstants().rebias_words ==
              (scalar::E4M3::kRebias << 16 | scalar::E4M3::kRebias));

// A pair is 2 kLanes values in two vectors: those of even index and those of odd index, so that two
// neighbours of 16 bits are the halves of one lane.
inline constexpr uint32_t kHighWord = 0xFFFF0000u;

template <typename V>
typename V::I LowWord(typename V::I x) {
  return V::And(x, V::Set(kNarrow.low_word));
}
// The high words of a pair as words in order, and their low words.
template <typename V>
typename V::I HighWordsOf(typename V::I even, typename V::I odd) {
  return V::MergeHigh(odd, V::template Right<16>(even));
}
template <typename V>
typename V::I LowWordsOf(typename V::I even, typename V::I odd) {
  return V::MergeHigh(V::template Left<16>(odd), even);
}

// Bf16Nearest, in the high word.
template <typename V>
typename V::I Bf16NearestOf(typename V::F x) {
  const auto bits = V::AsInt(x);
  const auto rounded = V::AddWhereSet(
      V::Set(kNarrow.bit16), bits, V::Add(bits, V::Set(kNarrow.below_half)), V::Set(kNarrow.one));
  return V::Select(V::IsNan(x), V::Set(kNarrow.nan), rounded);
}

// Bf16HalfAway, in the high word.
template <typename V>
typename V::I Bf16HalfAwayOf(typename V::F x) {
  return V::Add(V::AsInt(x), V::Set(kNarrow.half));
}

// Bf16Stochastic, in the high word. Only what is not finite, or would not be once it is rounded,
// needs more than a sum.
template <typename V>
typename V::I Bf16StochasticOf(typename V::F x, typename V::I random16) {
  const auto bits = V::AsInt(x);
  const auto magnitude = V::And(bits, V::Set(kNarrow.magnitude));
  const auto largest = V::Set(kNarrow.largest);
  const auto sum = V::Add(bits, random16);
  const auto is_large = V::Less(largest, magnitude);
  if (V::Any(is_large)) {
    const auto code =
        V::Or(V::Min(V::Add(magnitude, random16), largest), V::And(bits, V::Set(~kMagnitude)));
    return V::Select(V::IsNan(x), V::Set(kNarrow.nan), V::Select(is_large, code, sum));
  }
  return sum;
}

// Values of codes from 0 to 0x7F without sign, of which 0x7F is no value.
template <typename V>
typename V::F MagnitudeOf(typename V::I code) {
  const auto normal = V::template Left<20>(V::Add(code, V::Set(scalar::E4M3::kRebias)));
  const auto small = V::Mul(V::ToFloat(code), V::Set(0x1p-9f));
  return V::Select(V::Less(code, V::Set(8u)), small, V::AsFloat(normal));
}

// E4M3Value.
template <typename V>
typename V::F E4M3ValueOf(typename V::I code) {
  const auto magnitude = V::And(code, V::Set(0x7Fu));
  const auto sign = V::template Left<24>(V::And(code, V::Set(0x80u)));
  const auto nan = V::Less(V::Set(scalar::kLargestE4M3), magnitude);
  const auto bits = V::Select(nan, V::Set(0x7FC00000u), V::AsInt(MagnitudeOf<V>(magnitude)));
  return V::AsFloat(V::Or(bits, sign));
}

// E4M3Value * scale of words of codes, as a pair. A code's bits at the top of a float are its value
// in units of 2^-120, subnormal or not, and 2^120 times that is exact.
template <typename V>
void E4M3PairOf(typename V::I words, typename V::F scale, typename V::F& even, typename V::F& odd) {
  if (V::AnyWord(V::And(words, V::Set(kNarrow.codes)), V::Set(kNarrow.codes))) {
    even = V::Mul(E4M3ValueOf<V>(LowWord<V>(words)), scale);
    odd = V::Mul(E4M3ValueOf<V>(V::template Right<16>(words)), scale);
    return;
  }
  const auto value = [&](typename V::I magnitude, typename V::I sign) {
    const auto small = V::AsFloat(V::And(magnitude, V::Set(kNarrow.code_bits)));
    const auto whole = V::AsInt(V::Mul(V::Mul(small, V::Set(0x1p120f)), scale));
    return V::AsFloat(V::Merge(V::Set(kNarrow.magnitude), whole, sign));
  };
  even = value(V::template Left<20>(words), V::template Left<24>(words));
  odd = value(V::template Left<4>(words), V::template Left<8>(words));
}

// E4M3Stochastic.
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
  return V::Select(V::IsNan(x), V::Set(0x7Fu), V::Or(code, sign));
}

// E4M3Stochastic of a pair, as words; `random` has the random bits as words. Codes between the
// smallest normal one and the largest are the top of a sum, less a constant.
template <typename V>
typename V::I E4M3WordsOf(typename V::F even, typename V::F odd, typename V::I random) {
  const auto above = [](typename V::F x) {
    return V::Sub(V::And(V::AsInt(x), V::Set(kNarrow.magnitude)), V::Set(kNarrow.smallest_normal));
  };
  const auto range = V::Set(kNarrow.normal_range);
  if (V::AnyAbove(above(even), range) || V::AnyAbove(above(odd), range)) {
    return V::Or(E4M3StochasticOf<V>(even, LowWord<V>(random)),
                 V::template Left<16>(E4M3StochasticOf<V>(odd, V::template Right<16>(random))));
  }
  const auto draw_bits = V::Set(kNarrow.draw_bits);
  const auto even_sum = V::Add(V::AsInt(even), V::And(V::template Left<4>(random), draw_bits));
  const auto odd_sum = V::Add(V::AsInt(odd), V::And(V::template Right<12>(random), draw_bits));
  const auto tops = V::MergeHigh(V::template Right<4>(odd_sum), V::template Right<20>(even_sum));
  static_assert(scalar::E4M3::kRebias % 0x80u == 0x40u);
  const auto codes = V::Xor(tops, V::Set(kNarrow.top_code_bits));
  const auto signs = V::And(V::template RightWords<4>(tops), V::Set(kNarrow.signs));
  return V::Merge(V::Set(kNarrow.codes), codes, signs);
}

// EncodeSquare of x = v * k * k, in the bits of a float, where some roots are not normal, or v is
// 0.
template <typename V>
typename V::I EncodeSmallSquare(typename V::F v,
                                typename V::F x,
                                typename V::I root,
                                typename V::I random16) {
  const auto square = [](typename V::I code) {
    const auto value = MagnitudeOf<V>(code);
    return V::Mul(value, value);
  };
  const auto normal = V::Sub(V::template Right<20>(root), V::Set(scalar::E4M3::kRebias));
  const auto small = V::Truncate(V::Mul(V::AsFloat(root), V::Set(512.0f)));
  const auto is_small = V::Less(root, V::Set(scalar::E4M3::kSmallestNormal));
  const auto guess = V::Min(V::Select(is_small, small, normal), V::Set(scalar::kLargestE4M3));
  const auto code = V::AddWhere(V::Less(x, square(guess)), guess, V::Set(~0u));
  const auto low = square(code);
  const auto high = square(V::Add(code, V::Set(1u)));
  const auto draw = V::Mul(V::ToFloat(random16), V::Set(0x1p-16f));
  const auto up = V::Both(V::Less(V::Mul(draw, V::Sub(high, low)), V::Sub(x, low)),
                          V::Less(code, V::Set(scalar::kLargestE4M3)));
  const auto chosen = V::AddWhere(up, code, V::Set(1u));
  const auto is_lost = V::Both(V::Less(chosen, V::Set(1u)), V::Less(V::Set(0.0f), v));
  return V::template Left<20>(
      V::Add(V::AddWhere(is_lost, chosen, V::Set(1u)), V::Set(scalar::E4M3::kRebias)));
}

// EncodeSquare, of v that are not below 0, with k = E8M0Multiplier(scale): the code and kRebias
// from bit 20 on. Without a root: half of the bits of x are those of sqrt(x), up to 6 % too large,
// which is less than a code; so the guess is the code below the root, or the one above it, whose
// square says so. The bits of a normal code's value are its own, shifted. The square from which on
// a draw goes up has 24 bits at most (8 of squares, 16 of the draw), so it is exact.
template <typename V>
typename V::I EncodeSquareOf(typename V::F v, typename V::F k, typename V::I random16) {
  const auto x = V::Mul(V::Mul(v, k), k);
  const auto root = V::template Right<1>(
      V::Add(V::And(V::AsInt(x), V::Set(kNarrow.magnitude)), V::Set(kNarrow.one_float)));
  if (V::Any(V::Less(root, V::Set(kNarrow.smallest_root)))) {
    return EncodeSmallSquare<V>(v, x, root, random16);
  }
  const auto code = V::Set(kNarrow.code);
  const auto guess = V::And(root, V::Set(kNarrow.grid));
  const auto guessed = V::Mul(V::AsFloat(guess), V::AsFloat(guess));
  const auto below = V::AddWhere(V::Less(x, guessed), guess, V::Set(kNarrow.minus_code));
  const auto above = V::AsFloat(V::Add(below, code));
  const auto low = V::Mul(V::AsFloat(below), V::AsFloat(below));
  const auto gap = V::Sub(V::Mul(above, above), low);
  const auto draw = V::Mul(V::ToFloat(random16), V::Set(0x1p-16f));
  const auto chosen = V::AddWhere(V::Less(V::Fma(draw, gap, low), x), below, code);
  return V::Min(chosen, V::Set(kNarrow.largest_root));
}

// EncodeSquare of a pair, as words; `random` has the random bits as words.
template <typename V>
typename V::I EncodeSquareWordsOf(typename V::F even,
                                  typename V::F odd,
                                  typename V::F k,
                                  typename V::I random) {
  const auto first = EncodeSquareOf<V>(even, k, LowWord<V>(random));
  const auto second = EncodeSquareOf<V>(odd, k, V::template Right<16>(random));
  const auto tops = V::MergeHigh(V::template Right<4>(second), V::template Right<20>(first));
  return V::SubWords(tops, V::Set(kNarrow.rebias_words));
}

// Philox4x32-10 of the draws of a run of elements, whose counters differ in word 0 alone: what does
// not change from draw to draw in the first two rounds is computed once, and so are all keys.
struct PhiloxRounds {
  explicit PhiloxRounds(uint64_t seed, const scalar::PhiloxWords& counter) {
    uint32_t key0 = static_cast<uint32_t>(seed);
    uint32_t key1 = static_cast<uint32_t>(seed >> 32);
    for (size_t round = 0; round < 10; ++round) {
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

  uint64_t keys0[10];
  uint64_t keys1[10];
  uint64_t first2;       // what word 2 is exclusive-or'd with in round 1
  uint64_t second_key0;  // the same of words 0 and 2 in round 2
  uint64_t second2;
  uint64_t second3;  // word 3 after round 2
};

// The 16 random bits of each element for the first state and for the second, in kVectors vectors of
// draws from that at `position` on. A 64-bit lane has a draw; its words are the low halves of four
// registers, and what a product leaves above them is never read.
template <typename V, bool kMean, bool kSquare, int64_t kVectors>
__attribute__((noinline)) void DrawHalves(const PhiloxRounds& rounds,
                                          uint64_t position,
                                          uint64_t* mean,
                                          uint64_t* square) {
  constexpr int64_t kLanes = V::kLanes / 2;
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
  for (int round = 2; round < 9; ++round) {
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
    if constexpr (kMean) {
      const auto words = V::SwapHalves(V::MulWide(m1, c2[i]));
      V::StoreAll(mean + i * kLanes, V::Xor(words, V::And(c1[i], low), V::Set64(rounds.keys0[9])));
    }
    if constexpr (kSquare) {
      const auto words = V::SwapHalves(V::MulWide(m0, c0[i]));
      V::StoreAll(square + i * kLanes,
                  V::Xor(words, V::And(c3[i], low), V::Set64(rounds.keys1[9])));
    }
  }
}

}  // namespace ravel::kernels::cpu
