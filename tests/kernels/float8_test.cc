// fp8 casts over all inputs, against tables of the formats' values in fp64: between two neighbours
// an input goes to the nearer one, at their middle to the even code.

#include "kernels/scalar/float8.h"

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <random>
#include <vector>

#include <gtest/gtest.h>

#include "common/dtype.h"

namespace ravel::kernels::scalar {
namespace {

// Finite magnitudes by code.
std::vector<double> Table(int mantissa_bits, int bias, int codes) {
  std::vector<double> values;
  const int ones = 1 << mantissa_bits;
  for (int code = 0; code < codes; ++code) {
    const int exponent = code / ones;
    const int mantissa = code % ones;
    values.push_back(exponent == 0 ? std::ldexp(mantissa, 1 - bias - mantissa_bits)
                                   : std::ldexp(ones + mantissa, exponent - bias - mantissa_bits));
  }
  return values;
}

struct Format {
  const char* name;
  uint8_t (*cast)(float);
  float (*value)(uint8_t);
  std::vector<double> table;
};

std::vector<Format> Formats() {
  return {{"E4M3", E4M3Nearest, E4M3Value, Table(3, 7, 0x7F)},
          {"E5M2", E5M2Nearest, E5M2Value, Table(2, 15, 0x7C)}};
}

// Every magnitude in ascending order: the code moves on past the middle to the next value.
void ExpectAllMagnitudes(const Format& format, uint32_t step) {
  size_t code = 0;
  for (uint64_t bits = 0; bits <= 0x7F800000u; bits += step) {
    const float x = std::bit_cast<float>(static_cast<uint32_t>(bits));
    while (code + 1 < format.table.size()) {
      const double middle = (format.table[code] + format.table[code + 1]) / 2;
      const bool past = x > middle || (x == middle && code % 2 == 1);
      if (!past) {
        break;
      }
      ++code;
    }
    ASSERT_EQ(format.cast(x), code) << format.name << " " << x;
    ASSERT_EQ(format.cast(-x), code | 0x80u) << format.name << " " << -x;
  }
}

// With RAVEL_ALL all 2^32 inputs, else every 61st, and below all that lie around middles.
TEST(Float8, CastsGoToTheNearestValue) {
  const char* all = std::getenv("RAVEL_ALL");
  for (const Format& format : Formats()) {
    ExpectAllMagnitudes(format, all != nullptr && *all == '1' ? 1 : 61);
    for (size_t code = 0; code + 1 < format.table.size(); ++code) {
      const auto middle = static_cast<float>((format.table[code] + format.table[code + 1]) / 2);
      const size_t even = code % 2 == 0 ? code : code + 1;
      EXPECT_EQ(format.cast(middle), even) << format.name << " " << middle;
      EXPECT_EQ(format.cast(std::nextafter(middle, 0.0f)), code) << format.name << " " << middle;
      EXPECT_EQ(format.cast(std::nextafter(middle, 1e9f)), code + 1) << format.name << middle;
    }
  }
}

TEST(Float8, SpecialValues) {
  EXPECT_EQ(E4M3Nearest(465.0f), 0x7E);
  EXPECT_EQ(E4M3Nearest(0x1p-10f), 0x00);
  EXPECT_EQ(E4M3Nearest(std::nextafter(0x1p-10f, 1.0f)), 0x01);
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  EXPECT_EQ(E4M3Nearest(-kInfinity), 0xFE);
  EXPECT_EQ(E5M2Nearest(kInfinity), 0x7B);
  EXPECT_EQ(E5M2Nearest(-kInfinity), 0xFB);
  EXPECT_TRUE(std::isinf(E5M2Value(0x7C)));
  for (const uint32_t nan : {0x7F800001u, 0x7FC00000u, 0x7FFFFFFFu, 0xFFC00000u}) {
    EXPECT_EQ(E4M3Nearest(std::bit_cast<float>(nan)), 0x7F);
    EXPECT_EQ(E5M2Nearest(std::bit_cast<float>(nan)), 0x7F);
    EXPECT_EQ(E4M3Stochastic(std::bit_cast<float>(nan), 7), 0x7F);
  }
}

template <typename Format8>
void ExpectRoundedIsTheValueOfTheCode(uint64_t step) {
  for (uint64_t bits = 0; bits <= 0xFFFFFFFFu; bits += step) {
    const float x = std::bit_cast<float>(static_cast<uint32_t>(bits));
    const float value = Format8::ValueOfCode(Format8::NearestCode(x));
    ASSERT_EQ(std::bit_cast<uint32_t>(Format8::Rounded(x)), std::bit_cast<uint32_t>(value)) << x;
  }
}

// With RAVEL_ALL all 2^32 inputs, else every 61st.
TEST(Float8, RoundingWithoutACodeGivesTheValueOfTheCode) {
  const char* all = std::getenv("RAVEL_ALL");
  const uint64_t step = all != nullptr && *all == '1' ? 1 : 61;
  ExpectRoundedIsTheValueOfTheCode<E4M3>(step);
  ExpectRoundedIsTheValueOfTheCode<E5M2>(step);
}

TEST(Float8, ValuesAreThoseOfTheTableAndCastToThemselves) {
  for (const Format& format : Formats()) {
    for (int code = 0; code < 256; ++code) {
      const size_t magnitude = static_cast<size_t>(code) & 0x7Fu;
      const float value = format.value(static_cast<uint8_t>(code));
      if (magnitude < format.table.size()) {
        EXPECT_EQ(std::fabs(value), format.table[magnitude]) << format.name << code;
        EXPECT_EQ(std::signbit(value), code >= 128);
        EXPECT_EQ(format.cast(value), code) << format.name;
      } else if (magnitude > format.table.size() || format.table.size() == 0x7F) {
        EXPECT_TRUE(std::isnan(value)) << format.name << code;
      }
    }
  }
  for (int code = 0; code < 256; ++code) {
    const float value = Fp8E4M3ToFloat(static_cast<uint8_t>(code));
    const float expected = E4M3Value(static_cast<uint8_t>(code));
    EXPECT_TRUE(value == expected || (std::isnan(value) && std::isnan(expected))) << code;
  }
}

// All draws: in the normal range exactly the cut-off 16 bits of 20 go up; below it the sum in fp32
// decides, within one draw of the share.
TEST(Float8, AsManyDrawsGoUpAsTheFractionSays) {
  const std::vector<double> table = Table(3, 7, 0x7F);
  std::mt19937_64 random(1);
  for (int i = 0; i < 10'000; ++i) {
    const uint32_t bits =
        0x39000000u + static_cast<uint32_t>(random() % (0x43E00000u - 0x39000000u));
    const float x = std::bit_cast<float>(bits);
    size_t low = 0;
    while (low + 2 < table.size() && table[low + 1] <= static_cast<double>(x)) {
      ++low;
    }
    const double share = (static_cast<double>(x) - table[low]) / (table[low + 1] - table[low]);
    // Codes rise with the draw: the first draw that goes up tells how many do.
    uint32_t begin = 0;
    uint32_t end = 65536;
    while (begin < end) {
      const uint32_t middle = (begin + end) / 2;
      (E4M3Stochastic(x, middle) > low ? end : begin) =
          E4M3Stochastic(x, middle) > low ? middle : middle + 1;
    }
    const double up = 65536.0 - begin;
    if (bits >= 0x3C800000u) {
      EXPECT_EQ(up, std::floor(share * 65536.0)) << x;
    } else {
      EXPECT_NEAR(up, share * 65536.0, 1.0) << x;
    }
    for (int draw = 0; draw < 20; ++draw) {
      const auto r = static_cast<uint32_t>(random() % 65536);
      EXPECT_EQ(E4M3Stochastic(x, r), r >= begin ? low + 1 : low) << x << " " << r;
      EXPECT_EQ(E4M3Stochastic(-x, r), (r >= begin ? low + 1 : low) | 0x80u);
    }
  }
  EXPECT_EQ(E4M3Stochastic(1e30f, 0), 0x7E);
  EXPECT_EQ(E4M3Stochastic(-449.0f, 65535), 0xFE);
}

// What is not negative, in ascending order, has the least power of two that is not below it; what
// is above all of them has the last. Negative numbers are as NaN.
void ExpectLeastPowerOfTwo(uint64_t begin, uint64_t end, uint64_t step) {
  int code = 0;
  double power = 0x1p-127;
  for (uint64_t bits = begin; bits < end; bits += step) {
    const float v = std::bit_cast<float>(static_cast<uint32_t>(bits));
    if (bits > 0x7F800000u) {
      code = 255;
    }
    while (code < 254 && static_cast<double>(v) > power) {
      ++code;
      power *= 2;
    }
    ASSERT_EQ(E8M0RoundUp(v), code) << v << ", bits " << bits;
  }
}

// With RAVEL_ALL all 2^32 inputs, else every 61st, and all that lie around powers of two.
TEST(Float8, PowersOfTwoGoUpNeverDown) {
  const char* all = std::getenv("RAVEL_ALL");
  ExpectLeastPowerOfTwo(0, uint64_t{1} << 32, all != nullptr && *all == '1' ? 1 : 61);
  constexpr uint64_t kAround = 100;
  ExpectLeastPowerOfTwo(0, kAround, 1);
  for (uint64_t exponent = 0; exponent < 256; ++exponent) {
    const uint64_t power = exponent == 0 ? 0x400000u : exponent << 23;  // 2^-127 is subnormal
    ExpectLeastPowerOfTwo(power - kAround, power + kAround, 1);
  }
  EXPECT_EQ(E8M0RoundUp(0.0f), 0);
  EXPECT_EQ(E8M0RoundUp(std::numeric_limits<float>::infinity()), 254);
  EXPECT_EQ(E8M0RoundUp(std::numeric_limits<float>::quiet_NaN()), 255);
  for (int e = 0; e < 255; ++e) {
    EXPECT_EQ(E8M0Value(static_cast<uint8_t>(e)), std::ldexp(1.0, e - 127));
    EXPECT_EQ(E8M0Multiplier(static_cast<uint8_t>(e)), std::ldexp(1.0, 127 - e));
    EXPECT_EQ(E8M0RoundUp(E8M0Value(static_cast<uint8_t>(e))), e);
  }
  EXPECT_TRUE(std::isnan(E8M0Value(255)) && std::isnan(E8M0Multiplier(255)));
}

}  // namespace
}  // namespace ravel::kernels::scalar
