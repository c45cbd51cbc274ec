#pragma once

// What scalar/bfloat16.h, fp8_state.h and philox.h compute, a vector of elements at a time, with
// the same bits. V: Avx2Lanes or Avx512Lanes.

#include <cstdint>

#include "kernels/scalar/bfloat16.h"
#include "kernels/scalar/float16.h"
#include "kernels/scalar/fp8_state.h"
#include "kernels/scalar/philox.h"

namespace ravel::kernels::cpu {

inline constexpr uint32_t kMagnitude = 0x7FFFFFFFu;

// Bf16Nearest.
template <typename V>
typename V::I Bf16NearestOf(typename V::F x) {
  const auto bits = V::AsInt(x);
  const auto odd = V::And(V::template Right<16>(bits), V::Set(1u));
  const auto rounded = V::template Right<16>(V::Add(V::Add(bits, V::Set(0x7FFFu)), odd));
  const auto nan = V::Less(V::Set(scalar::kInfinityBits), V::And(bits, V::Set(kMagnitude)));
  return V::Select(nan, V::Set(0x7FFFu), rounded);
}

// Bf16HalfAway.
template <typename V>
typename V::I Bf16HalfAwayOf(typename V::F x) {
  return V::template Right<16>(V::Add(V::AsInt(x), V::Set(0x8000u)));
}

// Bf16Stochastic.
template <typename V>
typename V::I Bf16StochasticOf(typename V::F x, typename V::I random16) {
  const auto bits = V::AsInt(x);
  const auto magnitude = V::And(bits, V::Set(kMagnitude));
  const auto rounded = V::template Right<16>(V::Add(magnitude, random16));
  const auto sign = V::And(V::template Right<16>(bits), V::Set(0x8000u));
  const auto code = V::Or(V::Min(rounded, V::Set(0x7F7Fu)), sign);
  return V::Select(V::Less(V::Set(scalar::kInfinityBits), magnitude), V::Set(0x7FFFu), code);
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

// E4M3Stochastic. From 448 on the sum of normal codes ends at the largest code, too.
template <typename V>
typename V::I E4M3StochasticOf(typename V::F x, typename V::I random16) {
  const auto bits = V::AsInt(x);
  const auto magnitude = V::And(bits, V::Set(kMagnitude));
  const auto sum = V::Add(magnitude, V::template Left<4>(random16));
  auto code = V::Sub(V::template Right<20>(sum), V::Set(scalar::E4M3::kRebias));
  const auto is_small = V::Less(magnitude, V::Set(scalar::E4M3::kSmallestNormal));
  if (V::Any(is_small)) {
    const auto steps = V::Add(V::Mul(V::AsFloat(magnitude), V::Set(512.0f)),
                              V::Mul(V::ToFloat(random16), V::Set(0x1p-16f)));
    code = V::Select(is_small, V::Truncate(steps), code);
  }
  code = V::Min(code, V::Set(scalar::kLargestE4M3));
  const auto sign = V::And(V::template Right<24>(bits), V::Set(0x80u));
  const auto nan = V::Less(V::Set(scalar::kInfinityBits), magnitude);
  return V::Select(nan, V::Set(0x7Fu), V::Or(code, sign));
}

// True where x is above the share `draw` of the way from one square to the next.
template <typename V>
typename V::Mask IsUp(typename V::I random16,
                      typename V::F low,
                      typename V::F high,
                      typename V::F x) {
  const auto draw = V::Mul(V::ToFloat(random16), V::Set(0x1p-16f));
  return V::Less(V::Mul(draw, V::Sub(high, low)), V::Sub(x, low));
}

// EncodeSquare of x = v * k * k where some roots are not normal, or v is 0.
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
  const auto guessed = square(guess);
  const auto is_above = V::Less(x, guessed);
  const auto code = V::AddWhere(is_above, guess, ~0u);
  const auto other = square(V::AddWhere(is_above, V::Add(guess, V::Set(1u)), ~1u));
  const auto low = V::Select(is_above, other, guessed);
  const auto high = V::Select(is_above, guessed, other);
  const auto up =
      V::Both(IsUp<V>(random16, low, high, x), V::Less(code, V::Set(scalar::kLargestE4M3)));
  const auto chosen = V::AddWhere(up, code, 1u);
  const auto is_lost = V::Both(V::Less(chosen, V::Set(1u)), V::Less(V::Set(0.0f), v));
  return V::AddWhere(is_lost, chosen, 1u);
}

// EncodeSquare, of v that are not below 0, with k = E8M0Multiplier(scale). Without a root: half of
// the bits of x are those of sqrt(x), up to 6 % too large, which is less than a code; so the first
// guess is the code below the root, or the one above it, whose square says so. The bits of a normal
// code's value are its own, shifted.
template <typename V>
typename V::I EncodeSquareOf(typename V::F v, typename V::F k, typename V::I random16) {
  constexpr uint32_t kCode = 1u << scalar::E4M3::kShift;
  constexpr uint32_t kLargestBits = (scalar::kLargestE4M3 + scalar::E4M3::kRebias)
                                    << scalar::E4M3::kShift;
  const auto x = V::Mul(V::Mul(v, k), k);
  const auto root =
      V::template Right<1>(V::Add(V::And(V::AsInt(x), V::Set(kMagnitude)), V::Set(0x3F800000u)));
  if (V::Any(V::Less(root, V::Set(scalar::E4M3::kSmallestNormal + kCode)))) {
    return EncodeSmallSquare<V>(v, x, root, random16);
  }
  const auto guess = V::And(V::Min(root, V::Set(kLargestBits)), V::Set(~(kCode - 1)));
  const auto guessed = V::Mul(V::AsFloat(guess), V::AsFloat(guess));
  const auto is_above = V::Less(x, guessed);
  const auto other_bits = V::AddWhere(is_above, V::Add(guess, V::Set(kCode)), 0u - 2 * kCode);
  const auto other = V::Mul(V::AsFloat(other_bits), V::AsFloat(other_bits));
  const auto low = V::Select(is_above, other, guessed);
  const auto high = V::Select(is_above, guessed, other);
  const auto below = V::AddWhere(is_above, guess, 0u - kCode);
  const auto chosen = V::AddWhere(IsUp<V>(random16, low, high, x), below, kCode);
  return V::Sub(V::template Right<20>(V::Min(chosen, V::Set(kLargestBits))),
                V::Set(scalar::E4M3::kRebias));
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

// The 16 random bits of each element for the first state and for the second, from the draw at
// `position` on. A 64-bit lane has a draw; its words are the low halves of four registers, and what
// a product leaves above them is never read.
template <typename V, bool kMean, bool kSquare>
void DrawHalves(const PhiloxRounds& rounds,
                uint64_t position,
                int64_t draws,
                uint64_t* mean,
                uint64_t* square) {
  const auto m0 = V::Set64(0xD2511F53u);
  const auto m1 = V::Set64(0xCD9E8D57u);
  const auto low = V::Set64(0xFFFFFFFFu);
  for (int64_t i = 0; i < draws; i += V::kLanes / 2) {
    auto c3 = V::MulWide(m0, V::Count64(position + static_cast<uint64_t>(i)));
    auto c1 = V::MulWide(m1, V::Xor(V::HighHalf(c3), V::Set64(rounds.first2)));
    auto c0 = V::Xor(V::HighHalf(c1), V::Set64(rounds.second_key0));
    auto c2 = V::Xor(c3, V::Set64(rounds.second2));
    c3 = V::Set64(rounds.second3);
#pragma GCC unroll 8
    for (int round = 2; round < 9; ++round) {
      const auto product0 = V::MulWide(m0, c0);
      const auto product1 = V::MulWide(m1, c2);
      c0 = V::Xor(V::HighHalf(product1), c1, V::Set64(rounds.keys0[round]));
      c1 = product1;
      c2 = V::Xor(V::HighHalf(product0), c3, V::Set64(rounds.keys1[round]));
      c3 = product0;
    }
    // Words 0 and 1 are the halves of one register in the order of elements, 2 and 3 of another.
    if constexpr (kMean) {
      const auto words = V::SwapHalves(V::MulWide(m1, c2));
      V::Store(mean + i, V::Xor(words, V::And(c1, low), V::Set64(rounds.keys0[9])));
    }
    if constexpr (kSquare) {
      const auto words = V::SwapHalves(V::MulWide(m0, c0));
      V::Store(square + i, V::Xor(words, V::And(c3, low), V::Set64(rounds.keys1[9])));
    }
  }
}

}  // namespace ravel::kernels::cpu
