#include "worker/daemon/log_sweeper.h"

#include <cstdlib>
#include <fstream>

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

namespace ravel::daemon {
namespace {

namespace fs = std::filesystem;

class LogSweeperTest : public ::testing::Test {
 protected:
  LogSweeperTest() {
    std::string pattern = ::testing::TempDir() + "log-sweeper-XXXXXX";
    folder_ = mkdtemp(pattern.data());
  }
  ~LogSweeperTest() override { fs::remove_all(folder_); }

  // An attempt of 64 KiB whose last line is of that second.
  void Add(const std::string& job, int attempt, int64_t second) {
    const fs::path path = folder_ / job / ("attempt-" + std::to_string(attempt));
    fs::create_directories(path);
    std::ofstream(path / "rank-0.log") << std::string(64 << 10, 'x');
    const timespec times[2] = {{second, 0}, {second, 0}};
    ASSERT_EQ(utimensat(AT_FDCWD, (path / "rank-0.log").c_str(), times, 0), 0);
  }
  bool Has(const std::string& job, int attempt) const {
    return fs::exists(folder_ / job / ("attempt-" + std::to_string(attempt)));
  }

  fs::path folder_;
};

TEST_F(LogSweeperTest, TheOldestAttemptsThatEndedGoFirst) {
  Add("a", 1, 100);
  Add("a", 2, 200);
  Add("b", 1, 300);
  Add("b", 2, 50);  // runs
  const LogRules rules{.limit_bytes = 140 << 10, .max_age_ms = 1'000'000};
  const LogSweep sweep = SweepLogs(folder_, rules, {{"b", 2}}, 400'000);
  EXPECT_EQ(sweep.removed_attempts, 2);
  EXPECT_LE(sweep.kept_bytes, rules.limit_bytes);
  EXPECT_FALSE(fs::exists(folder_ / "a"));
  EXPECT_TRUE(Has("b", 1) && Has("b", 2));
  EXPECT_EQ(SweepLogs(folder_, rules, {{"b", 2}}, 400'000).removed_attempts, 0);
}

TEST_F(LogSweeperTest, OldAttemptsGoHoweverSmall) {
  Add("a", 1, 100);
  Add("a", 2, 5000);
  const LogRules rules{.limit_bytes = 1 << 30, .max_age_ms = 1'000'000};
  EXPECT_EQ(SweepLogs(folder_, rules, {}, 2'000'000).removed_attempts, 1);
  EXPECT_TRUE(!Has("a", 1) && Has("a", 2));
}

TEST_F(LogSweeperTest, WhatIsNotALogOfATrainerStays) {
  Add("a", 1, 100);
  std::ofstream(folder_ / "notes.txt") << "mine";
  fs::create_directories(folder_ / "a" / "attempt-x");
  fs::create_directory_symlink(folder_ / "a", folder_ / "link");
  SweepLogs(folder_, {.limit_bytes = 0, .max_age_ms = 0}, {}, 400'000);
  EXPECT_FALSE(Has("a", 1));
  EXPECT_TRUE(fs::exists(folder_ / "notes.txt"));
  EXPECT_TRUE(fs::exists(folder_ / "a" / "attempt-x"));
  EXPECT_TRUE(fs::is_symlink(folder_ / "link"));
  EXPECT_EQ(SweepLogs(folder_ / "absent", {}, {}, 0).removed_attempts, 0);
}

TEST_F(LogSweeperTest, LogsOfADeletedJobGoAtOnce) {
  Add("a", 1, 100);
  Add("a", 2, 100);
  Add("b", 1, 100);
  RemoveJobLogs(folder_, "..", {});
  RemoveJobLogs(folder_, "", {});
  RemoveJobLogs(folder_, "a", {{"a", 2}});
  EXPECT_TRUE(!Has("a", 1) && Has("a", 2) && Has("b", 1));
  RemoveJobLogs(folder_, "a", {});
  EXPECT_FALSE(fs::exists(folder_ / "a"));
}

}  // namespace
}  // namespace ravel::daemon
