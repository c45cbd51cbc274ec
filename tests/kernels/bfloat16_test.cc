// The roundings of bf16 against the neighbours of a value in fp64, and a weight with its remainder.
// With RAVEL_ALL all 2^32 inputs, else every 61st.

#include "kernels/scalar/bfloat16.h"

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <random>

#include <gtest/gtest.h>

namespace ravel::kernels::scalar {
namespace {

bool TakesAll() {
  const char* all = std::getenv("RAVEL_ALL");
  return all != nullptr && *all == '1';
}
float FloatOf(uint64_t bits) {
  return std::bit_cast<float>(static_cast<uint32_t>(bits));
}
// A magnitude of bf16 as a double; that behind the largest finite one is 2^128, not infinity.
double MagnitudeOf(uint32_t high) {
  return high == 0x7F80 ? 0x1p128 : static_cast<double>(FloatOf(uint64_t{high} << 16));
}

TEST(Bfloat16, CastsGoToTheNearestValue) {
  const uint64_t step = TakesAll() ? 1 : 61;
  for (uint64_t bits = 0; bits < 0x7F800000u; bits += step) {
    const auto low = static_cast<uint32_t>(bits >> 16);
    const double middle = (MagnitudeOf(low) + MagnitudeOf(low + 1)) / 2;
    const auto x = static_cast<double>(FloatOf(bits));
    const bool even_up = x > middle || (x == middle && low % 2 == 1);
    ASSERT_EQ(Bf16Nearest(FloatOf(bits)), low + (even_up ? 1 : 0)) << bits;
    ASSERT_EQ(Bf16Nearest(-FloatOf(bits)), (low + (even_up ? 1 : 0)) | 0x8000u) << bits;
    ASSERT_EQ(Bf16HalfAway(FloatOf(bits)), low + (x >= middle ? 1 : 0)) << bits;
    ASSERT_EQ(Bf16HalfAway(-FloatOf(bits)), (low + (x >= middle ? 1 : 0)) | 0x8000u) << bits;
  }
  for (uint64_t bits = 0x7F800001u; bits <= 0x7FFFFFFFu; bits += step) {
    ASSERT_EQ(Bf16Nearest(FloatOf(bits)), 0x7FFF);
    ASSERT_EQ(Bf16Nearest(FloatOf(bits | 0x80000000u)), 0x7FFF);
  }
}

TEST(Bfloat16, AWeightAndItsRemainderAreTheMainWeight) {
  const uint64_t step = TakesAll() ? 1 : 61;
  for (uint64_t bits = 0; bits <= 0xFFFFFFFFu; bits += step) {
    if ((bits & 0x7FFFFFFFu) < 0x7F800000u) {
      const SplitWeight split = SplitOf(FloatOf(bits));
      ASSERT_EQ(std::bit_cast<uint32_t>(JoinOf(split)), bits);
      ASSERT_EQ(split.weight, Bf16HalfAway(FloatOf(bits)));
    }
  }
}

// All draws of ten thousand values, or of a hundred: as many go up as the cut-off bits say.
TEST(Bfloat16, AsManyDrawsGoUpAsTheFractionSays) {
  std::mt19937 random(1);
  for (int i = 0; i < (TakesAll() ? 10'000 : 100); ++i) {
    const auto bits = static_cast<uint32_t>(random() % 0x7F7F0000u);
    uint32_t up = 0;
    for (uint32_t draw = 0; draw < 65536; ++draw) {
      const uint32_t rounded = Bf16Stochastic(FloatOf(bits), draw);
      ASSERT_TRUE(rounded == bits >> 16 || rounded == (bits >> 16) + 1) << bits;
      up += rounded - (bits >> 16);
    }
    ASSERT_EQ(up, bits & 0xFFFFu) << bits;
  }
}

}  // namespace
}  // namespace ravel::kernels::scalar
