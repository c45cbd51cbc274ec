// Scales by recipe: special amaxes, random ones against fp64, the golden block of the
// specification in all recipes, and the Hadamard matrix against its formula.

#include "kernels/scalar/block_scales.h"

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include <absl/strings/str_cat.h>
#include <gtest/gtest.h>

#include "kernels/scalar/float4.h"
#include "kernels/scalar/hadamard.h"

namespace ravel::kernels::scalar {
namespace {

using plan::Recipe;

uint32_t Bits(float x) {
  return std::bit_cast<uint32_t>(x);
}
float Float(uint32_t bits) {
  return std::bit_cast<float>(bits);
}

constexpr ScaleRule kPlain = {};
constexpr ScaleRule kPowers = {.power_of_two = true};

TEST(ScaleRule, SpecialAmaxes) {
  for (const uint32_t amax : {0u, 0x7F800000u, 0x7F800001u, 0x7FFFFFFFu}) {
    EXPECT_EQ(Bits(ScaleOf(kPlain, amax)), 0x3F800000u) << amax;
    EXPECT_EQ(Bits(ScaleOf(kPowers, amax)), 0x3F800000u) << amax;
  }
  for (const float amax : {1e-38f, 1e-40f, 0x1p-149f}) {
    EXPECT_EQ(Bits(ScaleOf(kPlain, Bits(amax))), 0x7F7FFFFFu) << amax;
    EXPECT_EQ(Bits(ScaleOf(kPowers, Bits(amax))), 0x7F000000u) << amax;
    const ScaleRule of_bf16 = {.power_of_two = true, .big = kLargestBf16Bits};
    EXPECT_EQ(Bits(ScaleOf(of_bf16, Bits(amax))), 0x7F000000u) << amax;
  }
  EXPECT_EQ(ScaleOf({.big = kLargestBf16Bits}, 1u), Float(0x7F7F0000));
  EXPECT_EQ(ScaleOf({.epsilon = 1.0f}, 0u), 448.0f);
  EXPECT_EQ(ScaleOf({.epsilon = 1.0f}, Bits(0.25f)), 448.0f);
  EXPECT_EQ(ScaleOf({.epsilon = 1.0f}, 0x7FC00000u), 1.0f);
  EXPECT_EQ(ScaleOf(kPowers, 0x7F7FFFFFu), 0x1p-120f);
}

// A quotient of fp32 is that of fp64, rounded; a power of two is that of its exponent.
TEST(ScaleRule, RandomAmaxesAndPowersOfTwo) {
  std::mt19937_64 random(1);
  std::vector<uint32_t> amaxes;
  for (int exponent = -118; exponent < 128; ++exponent) {
    const uint32_t power = Bits(std::ldexp(1.0f, exponent));
    amaxes.insert(amaxes.end(), {power - 1, power, power + 1});
  }
  for (int i = 0; i < 20'000; ++i) {
    amaxes.push_back(0x04800000u + static_cast<uint32_t>(random() % (0x7F800000u - 0x04800000u)));
  }
  for (const uint32_t amax : amaxes) {
    for (const float largest : {kLargestE4M3Value, kLargestE5M2Value}) {
      const double exact = static_cast<double>(largest) / static_cast<double>(Float(amax));
      if (exact > 0x1p127) {
        continue;
      }
      const auto quotient = static_cast<float>(exact);
      EXPECT_EQ(ScaleOf({.largest = largest}, amax), quotient);
      EXPECT_EQ(ScaleOf({.largest = largest, .power_of_two = true}, amax),
                std::ldexp(1.0f, std::ilogb(quotient)));
    }
  }
}

TEST(ScaleRule, ExponentsOfMxFp8AreRoundedUp) {
  for (int k = -120; k < 118; ++k) {
    const uint32_t amax = Bits(std::ldexp(448.0f, k));
    EXPECT_EQ(MxFp8BlockCode(amax), 127 + k);
    EXPECT_EQ(MxFp8BlockCode(amax + 1), 128 + k);
  }
  EXPECT_EQ(MxFp8BlockCode(0), 0);
  EXPECT_EQ(MxFp8BlockCode(kInfinityBits), 254);
  EXPECT_EQ(MxFp8BlockCode(0x7FC00000u), 255);
}

TEST(ScaleRule, NvFp4OfSpecialAmaxes) {
  EXPECT_EQ(NvFp4TensorScales(0).encode, 1.0f);
  EXPECT_EQ(NvFp4TensorScales(0).decode, 0.0f);
  EXPECT_EQ(NvFp4TensorScales(kInfinityBits).encode, 1.0f);
  EXPECT_TRUE(std::isinf(NvFp4TensorScales(kInfinityBits).decode));
  EXPECT_TRUE(std::isnan(NvFp4TensorScales(0x7FC00000u).encode));
  EXPECT_EQ(Bits(NvFp4TensorScales(1).encode), 0x7F7FFFFFu);
  EXPECT_EQ(Bits(NvFp4BlockScales(0, 896.0f).encode), 0x7F7FFFFFu);
  EXPECT_EQ(NvFp4BlockScales(0, 896.0f).decode, 0.0f);
  EXPECT_EQ(NvFp4BlockScales(kInfinityBits, 1.0f).decode, 448.0f);
  EXPECT_TRUE(std::isnan(NvFp4BlockScales(0x7FC00000u, 1.0f).decode));
}

// x_i = ((37 i mod 101) - 50) / 64; codes as the specification writes them.
class GoldenBlock : public ::testing::Test {
 protected:
  GoldenBlock() {
    for (int i = 0; i < 128; ++i) {
      x_.push_back(static_cast<float>((37 * i) % 101 - 50) / 64.0f);
    }
  }
  // The first 16 codes of mul(x, encode).
  template <typename Cast>
  std::string Codes(float encode, Cast cast) const {
    std::string text;
    for (size_t i = 0; i < 16; ++i) {
      absl::StrAppend(&text, i == 0 ? "" : " ", absl::Hex(cast(x_[i] * encode), absl::kZeroPad2));
    }
    return text;
  }

  std::vector<float> x_;
  uint32_t amax_ = Bits(0.78125f);
};

TEST_F(GoldenBlock, OneScaleForTheTensor) {
  const Scales current = TensorScales(Recipe::kCurrent, amax_, kLargestE4M3Value);
  EXPECT_EQ(Bits(current.encode), 0x440F5C29u);
  EXPECT_EQ(Bits(current.decode), 0x3AE49249u);
  EXPECT_EQ(Codes(current.encode, E4M3Nearest), "fe ef 75 fb dd 7a f8 68 7c f3 72 fd eb 77 fa 00");
  const Scales wide = TensorScales(Recipe::kCurrent, amax_, kLargestE5M2Value);
  EXPECT_EQ(Bits(wide.encode), 0x478F5C29u);
  EXPECT_EQ(Bits(wide.decode), 0x37649249u);
  EXPECT_EQ(Codes(wide.encode, E5M2Nearest), "fb f3 77 fa eb 79 f8 70 7a f6 75 fb f2 78 f9 00");
}

TEST_F(GoldenBlock, BlocksOfFp8) {
  constexpr const char* kCodes = "fc ed 74 fa dc 78 f7 66 7b f2 70 fc ea 76 f9 00";
  const Scales block = BlockScales<Recipe::kFloat8Block>(amax_, 1.0f, kLargestF32Bits);
  EXPECT_EQ(Bits(block.encode), 0x44000000u);
  EXPECT_EQ(Bits(block.decode), 0x3B000000u);
  EXPECT_EQ(Codes(block.encode, E4M3Nearest), kCodes);
  EXPECT_EQ(MxFp8BlockCode(amax_), 0x76);
  EXPECT_EQ(Codes(BlockScales<Recipe::kMxFp8>(amax_, 1.0f, 0).encode, E4M3Nearest), kCodes);
}

TEST_F(GoldenBlock, NvFp4) {
  const float tensor = NvFp4TensorScales(Bits(3.0f)).encode;
  EXPECT_EQ(Bits(tensor), 0x44600000u);
  EXPECT_EQ(NvFp4BlockCode(amax_, tensor), 0x6Fu);
  const Scales scales = BlockScales<Recipe::kNvFp4>(amax_, tensor, 0);
  EXPECT_EQ(Bits(scales.encode), 0x40EEEEEEu);
  // bf e5 69 2d c7 f4 5a 0e, the low nibbles first.
  EXPECT_EQ(Codes(scales.encode, E2M1Nearest), "0f 0b 05 0e 09 06 0d 02 07 0c 04 0f 0a 05 0e 00");
}

// Columns of the matrix are orthonormal, and the transform is its product with the input.
TEST(Hadamard, IsTheMatrixOfTheFormula) {
  constexpr const char* kSigns = "+++-+------+-+--";
  double matrix[16][16];
  for (unsigned j = 0; j < 16; ++j) {
    for (unsigned i = 0; i < 16; ++i) {
      matrix[j][i] = (std::popcount(i & j) % 2 == 0 ? 0.25 : -0.25) * (kSigns[i] == '+' ? 1 : -1);
    }
  }
  for (size_t i = 0; i < 16; ++i) {
    float unit[16] = {};
    unit[i] = 1;
    Hadamard16(unit);
    for (size_t j = 0; j < 16; ++j) {
      EXPECT_EQ(static_cast<double>(unit[j]), matrix[j][i]);
    }
  }
  std::mt19937 random(3);
  std::uniform_int_distribution<int> integers(-100, 100);
  float x[16];
  double expected[16] = {};
  for (size_t i = 0; i < 16; ++i) {
    x[i] = static_cast<float>(integers(random));
    for (size_t j = 0; j < 16; ++j) {
      expected[j] += matrix[j][i] * static_cast<double>(x[i]);
    }
  }
  Hadamard16(x);
  for (size_t j = 0; j < 16; ++j) {
    EXPECT_EQ(static_cast<double>(x[j]), expected[j]);
  }
}

}  // namespace
}  // namespace ravel::kernels::scalar
