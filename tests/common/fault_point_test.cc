#include "common/fault_point.h"

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <filesystem>
#include <string>
#include <thread>

#include <gtest/gtest.h>
#include <sys/ioctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/testing/eventually.h"
#include "tests/testing/process.h"

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
  for (const char* text :
       {"x", "x:burn", "x:exit=", "x:stall=5", "x:hold=", "x@0:kill", "x@y:kill"}) {
    const absl::Status status = fault::Configure(text);
    EXPECT_FALSE(status.ok()) << text;
    EXPECT_EQ(std::string(status.message()).rfind(text, 0), 0u) << status;
  }
}

TEST_F(FaultPointTest, EntriesOfOnePlaceAllAct) {
  ASSERT_TRUE(fault::Configure("x@*:stall=1ms,x@2:error=torn").ok());
  EXPECT_TRUE(FaultPoint("x").ok());
  EXPECT_EQ(FaultPoint("x").message(), "x: torn");
}

TEST_F(FaultPointTest, HoldsWhileTheFileOfThatOccurrenceIsThere) {
  const testing::ScratchFolder scratch;
  const std::string gate = scratch.path() + "/gate";
  ASSERT_TRUE(fault::Configure("x@*:hold=" + gate).ok());
  testing::WriteText(gate + ".2", "");
  std::atomic<int> passed = 0;
  std::thread other([&passed] {
    for (int i = 0; i < 3; ++i) {
      EXPECT_TRUE(FaultPoint("x").ok());
      ++passed;
    }
  });
  EXPECT_TRUE(testing::Eventually(std::chrono::seconds(20), [&] { return passed == 1; }));
  EXPECT_FALSE(testing::Eventually(std::chrono::milliseconds(20), [&] { return passed > 1; }));
  std::filesystem::remove(gate + ".2");
  other.join();
  EXPECT_EQ(passed, 3);
}

// Whoever stops does so there, also on a thread that is not the first: nothing after the place
// happens before the process goes on.
TEST(FaultPointStopTest, StopsOnTheSpotAndGoesOn) {
  int ends[2] = {};
  ASSERT_EQ(pipe(ends), 0);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    (void)fault::Configure("x@*:stop");
    std::thread([&ends] {
      for (uint8_t i = 0; i < 50; ++i) {
        (void)FaultPoint("x");
        (void)!write(ends[1], &i, 1);
      }
    }).join();
    _exit(0);
  }
  close(ends[1]);
  int state = 0;
  for (int i = 0; i < 50; ++i) {
    ASSERT_EQ(waitpid(child, &state, WUNTRACED), child);
    ASSERT_TRUE(WIFSTOPPED(state)) << i;
    char written[64];
    int in_pipe = 0;
    ASSERT_EQ(ioctl(ends[0], FIONREAD, &in_pipe), 0);
    EXPECT_EQ(in_pipe, i == 0 ? 0 : 1) << i;
    if (in_pipe > 0) {
      EXPECT_EQ(read(ends[0], written, sizeof written), 1);
    }
    ASSERT_EQ(kill(child, SIGCONT), 0);
  }
  ASSERT_EQ(waitpid(child, &state, 0), child);
  EXPECT_TRUE(WIFEXITED(state) && WEXITSTATUS(state) == 0) << state;
  close(ends[0]);
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
