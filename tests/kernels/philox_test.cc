// Random bits by counter: the published vectors, the layout of the counter, and the draws that
// round optimizer states.

#include "kernels/scalar/philox.h"

#include <cmath>
#include <cstdint>
#include <set>
#include <vector>

#include <gtest/gtest.h>

#include "kernels/quantize.h"

namespace ravel::kernels {
namespace {

TEST(PhiloxTest, KnownAnswers) {
  constexpr uint32_t kOnes = 0xFFFFFFFF;
  EXPECT_EQ(scalar::Philox4x32(0, {0, 0, 0, 0}),
            (scalar::PhiloxWords{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(scalar::Philox4x32(~uint64_t{0}, {kOnes, kOnes, kOnes, kOnes}),
            (scalar::PhiloxWords{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
}

// The vectors of Random123 for seven rounds.
TEST(PhiloxTest, KnownAnswersOfSevenRounds) {
  constexpr uint32_t kOnes = 0xFFFFFFFF;
  EXPECT_EQ(scalar::Philox4x32<7>(0, {0, 0, 0, 0}),
            (scalar::PhiloxWords{0x5f6fb709, 0x0d893f64, 0x4f121f81, 0x4f730a48}));
  EXPECT_EQ(scalar::Philox4x32<7>(~uint64_t{0}, {kOnes, kOnes, kOnes, kOnes}),
            (scalar::PhiloxWords{0x5207ddc2, 0x45165e59, 0x4d8ee751, 0x8c52f662}));
  EXPECT_EQ(
      scalar::Philox4x32<7>(0x299f31d0a4093822u, {0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}),
      (scalar::PhiloxWords{0x4dfccaba, 0x190a87f0, 0xc47362ba, 0xb6b5242a}));
}

// A position's fields do not meet in its counter.
TEST(PhiloxTest, PiecesOfASiteHaveDrawsOfTheirOwn) {
  const auto counter = [](uint64_t block, uint32_t sample, uint32_t piece) {
    return scalar::PhiloxCounter({.block = block, .sample = sample, .site = 7, .piece = piece});
  };
  constexpr uint32_t kMostPieces = ActivationDraws::kMostPieces;
  std::set<scalar::PhiloxWords> seen;
  size_t positions = 0;
  for (const uint64_t block :
       {uint64_t{0}, uint64_t{1}, uint64_t{1} << 32, (uint64_t{1} << 33) - 1}) {
    for (const uint32_t sample : {0u, 1u, 0xFFFFFu}) {
      for (uint32_t piece = 0; piece < kMostPieces; ++piece) {
        seen.insert(counter(block, sample, piece));
        ++positions;
      }
    }
  }
  EXPECT_EQ(seen.size(), positions);
}

// 32 halves are those of 64 elements: each once as it is, once with its bytes exchanged.
TEST(PhiloxTest, ABlockOf64ElementsSharesFourDraws) {
  for (const uint64_t block : {uint64_t{0}, uint64_t{1}, uint64_t{1} << 38}) {
    std::vector<int> seen(2 * scalar::kBlockHalves);
    for (uint64_t e = 0; e < 64; ++e) {
      const uint64_t index = 64 * block + e;
      const uint64_t draw = scalar::StateDraw(index) - 4 * block;
      ASSERT_LT(draw, 4u) << index;
      EXPECT_EQ(8 * draw + index % scalar::kDrawHalves, e % 32);
      EXPECT_EQ(scalar::IsExchanged(index), e >= 32);
      seen[2 * (e % 32) + (scalar::IsExchanged(index) ? 1 : 0)] += 1;
    }
    EXPECT_EQ(seen, std::vector<int>(seen.size(), 1));
  }
}

// Of two states that one half rounds, either goes up in each 256th of the other's chances equally
// often.
TEST(PhiloxTest, AHalfAndItsBytesExchangedAreTwoDraws) {
  std::vector<int> seen(1 << 16);
  for (uint32_t half = 0; half < 1 << 16; ++half) {
    const uint32_t exchanged = scalar::ExchangeBytes(half);
    EXPECT_EQ(scalar::ExchangeBytes(exchanged), half);
    seen[(half & 0xFF00u) | exchanged >> 8] += 1;
  }
  EXPECT_EQ(seen, std::vector<int>(1 << 16, 1));
  EXPECT_EQ(scalar::ExchangeBytes(uint64_t{0x0102030405060708}), 0x0201040306050807u);
}

// Bytes of draws, and nibbles of neighbours, of steps and of tensors beside each other, are equally
// often each of 256: their chi-square is within six deviations of its mean.
TEST(PhiloxTest, DrawsOfStatesAreUniform) {
  constexpr uint64_t kDraws = 1 << 16;
  std::vector<std::vector<double>> counts(5, std::vector<double>(256));
  for (uint64_t block = 0; block < kDraws; ++block) {
    const auto draw = [&](uint32_t step, uint32_t site) {
      return scalar::DrawStates(7, {.block = block, .step = step, .site = site});
    };
    const scalar::PhiloxWords words = draw(3, 5);
    const scalar::PhiloxWords next_step = draw(4, 5);
    const scalar::PhiloxWords next_site = draw(3, 6);
    for (uint32_t i = 0; i < 8; ++i) {
      const uint32_t half = scalar::PhiloxHalf(words, i);
      const auto beside = [&](uint32_t other) { return half >> 12 << 4 | other >> 12; };
      counts[0][half >> 8] += 1;
      counts[1][half & 0xFFu] += 1;
      counts[2][beside(scalar::PhiloxHalf(words, (i + 1) % 8))] += 1;
      counts[3][beside(scalar::PhiloxHalf(next_step, i))] += 1;
      counts[4][beside(scalar::PhiloxHalf(next_site, i))] += 1;
    }
  }
  for (const std::vector<double>& bins : counts) {
    constexpr double kExpected = 8.0 * kDraws / 256;
    double chi_square = 0;
    for (const double count : bins) {
      chi_square += (count - kExpected) * (count - kExpected) / kExpected;
    }
    EXPECT_NEAR(chi_square, 255, 6 * std::sqrt(2.0 * 255));
  }
}

TEST(PhiloxTest, CounterHoldsEveryFieldInItsPlace) {
  EXPECT_EQ(scalar::PhiloxCounter({.block = 0xABC'12345678,
                                   .sample = 0x54321,
                                   .step = 77,
                                   .site = 0x123456,
                                   .purpose = scalar::PhiloxPurpose::kOptimizerState}),
            (scalar::PhiloxWords{0x12345678, 0x54321ABC, 77, 0x02123456}));
}

}  // namespace
}  // namespace ravel::kernels
