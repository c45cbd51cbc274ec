// E2M1 over all inputs, against the table of its values in fp64, and every draw of its stochastic
// rounding.

#include "kernels/scalar/float4.h"

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <iterator>
#include <limits>
#include <random>

#include <gtest/gtest.h>

namespace ravel::kernels::scalar {
namespace {

constexpr double kTable[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
constexpr uint32_t kCodes = 8;

// Every magnitude in ascending order: the code moves on past the middle to the next value.
TEST(Float4, CastsGoToTheNearestValue) {
  const char* all = std::getenv("RAVEL_ALL");
  const uint32_t step = all != nullptr && *all == '1' ? 1 : 61;
  uint32_t code = 0;
  for (uint64_t bits = 0; bits <= 0x7F800000u; bits += step) {
    const float x = std::bit_cast<float>(static_cast<uint32_t>(bits));
    while (code + 1 < kCodes) {
      const double middle = (kTable[code] + kTable[code + 1]) / 2;
      if (x < middle || (x == middle && code % 2 == 0)) {
        break;
      }
      ++code;
    }
    ASSERT_EQ(E2M1Nearest(x), code) << x;
    ASSERT_EQ(E2M1Nearest(-x), code | 8u) << -x;
  }
  for (uint64_t bits = 0x7F800001u; bits <= 0x7FFFFFFFu; bits += step) {
    ASSERT_EQ(E2M1Nearest(std::bit_cast<float>(static_cast<uint32_t>(bits))), 7u);
    ASSERT_EQ(E2M1Nearest(std::bit_cast<float>(static_cast<uint32_t>(bits) | 0x80000000u)), 7u);
  }
}

TEST(Float4, RoundingWithoutACodeGivesTheValueOfTheCode) {
  const char* all = std::getenv("RAVEL_ALL");
  const uint64_t step = all != nullptr && *all == '1' ? 1 : 61;
  for (uint64_t bits = 0; bits <= 0xFFFFFFFFu; bits += step) {
    const float x = std::bit_cast<float>(static_cast<uint32_t>(bits));
    const float value = E2M1Value(E2M1Nearest(x));
    ASSERT_EQ(std::bit_cast<uint32_t>(E2M1Rounded(x)), std::bit_cast<uint32_t>(value)) << x;
  }
}

TEST(Float4, MiddlesGoToTheEvenCode) {
  for (uint32_t code = 0; code + 1 < kCodes; ++code) {
    const auto middle = static_cast<float>((kTable[code] + kTable[code + 1]) / 2);
    EXPECT_EQ(E2M1Nearest(middle), code % 2 == 0 ? code : code + 1) << middle;
    EXPECT_EQ(E2M1Nearest(std::nextafter(middle, 0.0f)), code) << middle;
    EXPECT_EQ(E2M1Nearest(std::nextafter(middle, 9.0f)), code + 1) << middle;
  }
}

TEST(Float4, ValuesAreThoseOfTheTableAndCastToThemselves) {
  for (uint32_t code = 0; code < 16; ++code) {
    const float value = E2M1Value(code);
    EXPECT_EQ(std::fabs(value), kTable[code % 8]);
    EXPECT_EQ(std::signbit(value), code >= 8);
    EXPECT_EQ(E2M1Nearest(value), code);
    EXPECT_EQ(E2M1Stochastic(value, 0), code);
    EXPECT_EQ(E2M1Stochastic(value, 255), code);
  }
}

// The largest magnitude that is at most a + draw * step, with the sum as fp32 has it.
uint32_t ExpectedStochastic(float a, uint32_t draw) {
  const double step = a < 2 ? 0.5 : a < 4 ? 1.0 : 2.0;
  const auto sum = static_cast<float>(static_cast<double>(a) + draw / 256.0 * step);
  uint32_t code = 0;
  while (code + 1 < kCodes && kTable[code + 1] <= static_cast<double>(sum)) {
    ++code;
  }
  return code;
}

TEST(Float4, AsManyDrawsGoUpAsTheFractionSays) {
  std::mt19937_64 random(1);
  std::uniform_real_distribution<float> uniform(0.0f, 7.0f);
  for (int i = 0; i < 10'000; ++i) {
    const float a = i % 2 == 0 ? uniform(random) : uniform(random) * uniform(random) * 0x1p-4f;
    uint32_t low = 0;
    while (low + 1 < kCodes && kTable[low + 1] <= static_cast<double>(a)) {
      ++low;
    }
    int up = 0;
    for (uint32_t draw = 0; draw < 256; ++draw) {
      const uint32_t code = E2M1Stochastic(a, draw);
      ASSERT_EQ(code, ExpectedStochastic(a, draw)) << a << " " << draw;
      ASSERT_EQ(E2M1Stochastic(-a, draw), code | 8u);
      up += code > low ? 1 : 0;
    }
    if (low + 1 < kCodes) {
      const double share = (static_cast<double>(a) - kTable[low]) / (kTable[low + 1] - kTable[low]);
      EXPECT_NEAR(up, share * 256.0, 1.0) << a;
    }
  }
  int up = 0;
  for (uint32_t draw = 0; draw < 256; ++draw) {
    up += E2M1Stochastic(1.2f, draw) == 3 ? 1 : 0;
  }
  EXPECT_EQ(up, 102);
}

TEST(Float4, SpecialValues) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (const uint32_t draw : {0u, 255u}) {
    EXPECT_EQ(E2M1Stochastic(kInfinity, draw), 7u);
    EXPECT_EQ(E2M1Stochastic(-kInfinity, draw), 15u);
    EXPECT_EQ(E2M1Stochastic(-std::numeric_limits<float>::quiet_NaN(), draw), 7u);
    EXPECT_EQ(E2M1Stochastic(-0.0f, draw), 8u);
    EXPECT_EQ(E2M1Stochastic(1e30f, draw), 7u);
  }
}

}  // namespace
}  // namespace ravel::kernels::scalar
