#include "common/fault_point.h"

#include <csignal>

#include <gtest/gtest.h>

namespace ravel {
namespace {

class FaultPointTest : public ::testing::Test {
 protected:
  void TearDown() override { ASSERT_TRUE(fault::Configure("").ok()); }
};

TEST_F(FaultPointTest, OffUnlessConfigured) {
  EXPECT_FALSE(fault::Enabled());
  EXPECT_TRUE(FaultPoint("save.rename").ok());
}

TEST_F(FaultPointTest, FailsAtTheAskedOccurrenceOnly) {
  ASSERT_TRUE(fault::Configure("save.rename@2:error=torn,other:error").ok());
  EXPECT_TRUE(FaultPoint("save.rename").ok());
  EXPECT_EQ(FaultPoint("save.rename").message(), "save.rename: torn");
  EXPECT_TRUE(FaultPoint("save.rename").ok());
  EXPECT_FALSE(FaultPoint("other").ok());
}

TEST_F(FaultPointTest, DiskFullHasItsOwnCode) {
  ASSERT_TRUE(fault::Configure("w@*:error=disk full").ok());
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(FaultPoint("w").code(), absl::StatusCode::kResourceExhausted);
  }
}

TEST_F(FaultPointTest, BadEntriesAreNamed) {
  for (const char* text : {"x", "x:burn", "x:exit=", "x:stall=5", "x@0:kill", "x@y:kill"}) {
    const absl::Status status = fault::Configure(text);
    EXPECT_FALSE(status.ok()) << text;
    EXPECT_EQ(std::string(status.message()).rfind(text, 0), 0u) << status;
  }
}

TEST(FaultPointDeathTest, KillsAndExits) {
  ::testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_EXIT(
      {
        (void)fault::Configure("x:kill");
        (void)FaultPoint("x");
      },
      ::testing::KilledBySignal(SIGKILL),
      "");
  EXPECT_EXIT(
      {
        (void)fault::Configure("x:exit=3");
        (void)FaultPoint("x");
      },
      ::testing::ExitedWithCode(3),
      "");
}

}  // namespace
}  // namespace ravel
