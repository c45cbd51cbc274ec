#include "tests/testing/required.h"

#include <cstdlib>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest-spi.h>
#include <gtest/gtest.h>

namespace ravel::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::TestPartResult;
using ::testing::TestPartResultArray;

// Collects what SkipWithout("tbf", "no tbf here") does where RAVEL_REQUIRE is `listed`.
void Collect(const char* listed, TestPartResultArray& results) {
  const char* const before = std::getenv("RAVEL_REQUIRE");
  const std::string kept = before == nullptr ? "" : before;
  setenv("RAVEL_REQUIRE", listed, 1);
  {
    const ::testing::ScopedFakeTestPartResultReporter reporter(&results);
    SkipWithout("tbf", "no tbf here");
  }
  setenv("RAVEL_REQUIRE", kept.c_str(), 1);
}

TEST(RequiredTest, WhatIsNotListedIsSkipped) {
  for (const char* listed : {"", "namespaces", "namespaces,moto"}) {
    TestPartResultArray results;
    Collect(listed, results);
    ASSERT_EQ(results.size(), 1) << listed;
    EXPECT_TRUE(results.GetTestPartResult(0).skipped());
    EXPECT_THAT(results.GetTestPartResult(0).message(), HasSubstr("no tbf here"));
  }
}

TEST(RequiredTest, WhatIsListedFailsWithItsReason) {
  TestPartResultArray results;
  Collect("namespaces,tbf", results);
  ASSERT_EQ(results.size(), 1);
  EXPECT_TRUE(results.GetTestPartResult(0).fatally_failed());
  EXPECT_THAT(results.GetTestPartResult(0).message(),
              HasSubstr("no tbf here; RAVEL_REQUIRE lists tbf"));
}

TEST(RequiredTest, AMisspeltNameFails) {
  TestPartResultArray results;
  Collect("tbff", results);
  ASSERT_EQ(results.size(), 2);
  EXPECT_TRUE(results.GetTestPartResult(0).nonfatally_failed());
  EXPECT_THAT(results.GetTestPartResult(0).message(), HasSubstr("'tbff'"));
}

}  // namespace
}  // namespace ravel::testing
