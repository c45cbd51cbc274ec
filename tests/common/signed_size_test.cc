#include "common/signed_size.h"

#include <string>
#include <vector>

#include <gtest/gtest.h>

namespace ravel {
namespace {

TEST(SignedSize, APartIsASpanOfTheSameElements) {
  std::vector<int> values = {1, 2, 3, 4};
  Part(values, 1, 2)[0] = 9;
  EXPECT_EQ(values, (std::vector<int>{1, 9, 3, 4}));
  EXPECT_TRUE(Part(values, 4, 0).empty());
}

TEST(SignedSize, APositionFindsItsElement) {
  std::vector<bool> flags(2, false);
  At(flags, 1) = true;
  EXPECT_TRUE(flags[1]);
  EXPECT_EQ(At(std::string("abc"), 2), 'c');
}

using SignedSizeDeathTest = ::testing::Test;

TEST(SignedSizeDeathTest, NegativeCountsAndForeignPositionsAreBugs) {
  const std::vector<int> values = {1, 2};
  EXPECT_DEATH(Size(-1), "a negative size");
  EXPECT_DEATH(At(values, -1), "outside its container");
  EXPECT_DEATH(At(values, 2), "outside its container");
}

}  // namespace
}  // namespace ravel
