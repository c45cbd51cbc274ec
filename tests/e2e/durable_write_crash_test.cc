// The coordinator is killed before and after a durable write, the N-th for N = 1, 2, ...: after a
// restart the job ends with the same bits, every committed checkpoint is whole, and epochs only
// rise. RAVEL_WRITES says how many of them (CI: a few; 0 with --all: until a run has no such
// write).

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include <absl/strings/str_cat.h>
#include <gtest/gtest.h>

#include "tests/testing/eventually.h"
#include "tests/testing/mini_cluster.h"

namespace ravel::testing {
namespace {

using std::chrono::seconds;

constexpr int64_t kSteps = 40;

TinyJob Job(const MiniCluster& cluster, const std::string& name) {
  return {.name = name,
          .tokens_path = cluster.folder() + "/tokens.bin",
          .store = cluster.folder() + "/store",
          .workers = 2,
          .steps = kSteps,
          .save_every_steps = 10};
}

void ExpectInvariants(const MiniCluster& cluster,
                      const std::string& job,
                      const std::vector<StepRow>& expected) {
  const absl::StatusOr<std::vector<StepRow>> history = cluster.Metrics(job);
  ASSERT_TRUE(history.ok()) << history.status();
  EXPECT_EQ(FirstDifference(*history, expected), "");
  for (size_t i = 1; i < history->size(); ++i) {
    EXPECT_GE((*history)[i].epoch, (*history)[i - 1].epoch) << "step " << (*history)[i].step;
  }
  const absl::StatusOr<std::map<int64_t, std::string>> checkpoints = cluster.Checkpoints(job);
  ASSERT_TRUE(checkpoints.ok()) << checkpoints.status();
  EXPECT_TRUE(checkpoints->contains(kSteps));
  for (const auto& [step, path] : *checkpoints) {
    const RunResult verified = cluster.Ctl({"checkpoints", "verify", path});
    EXPECT_EQ(verified.exit_code, 0) << "step " << step << ": " << verified.out << verified.err;
  }
}

// False when the run had fewer writes than that.
bool KilledAt(const std::string& place, int64_t number, std::vector<StepRow>& expected) {
  const std::string fault = absl::StrCat(place, "@", number, ":kill");
  SCOPED_TRACE(fault);
  absl::StatusOr<std::unique_ptr<MiniCluster>> started = MiniCluster::Start();
  EXPECT_TRUE(started.ok()) << started.status();
  MiniCluster& cluster = **started;
  EXPECT_EQ(cluster.StartWorkers(2), absl::OkStatus());
  WriteTokens(cluster.folder() + "/tokens.bin", 20000, TinyJob().vocabulary);
  if (expected.empty()) {
    EXPECT_EQ(cluster.Submit(Job(cluster, "undisturbed")), absl::OkStatus());
    EXPECT_EQ(cluster.WaitForSuccess("undisturbed", seconds(60)), absl::OkStatus());
    expected = cluster.Metrics("undisturbed").value_or(std::vector<StepRow>());
  }
  cluster.KillCoordinator();
  // It may die while it starts: then it never says its port.
  const absl::Status armed = cluster.RestartCoordinator({{"RAVEL_FAULTS", fault}});
  if (armed.ok()) {
    (void)cluster.Submit(Job(cluster, "killed"));  // may be cut off, and is then sent once more
  }
  Eventually(seconds(180), [&] {  // a whole job, where others use the disk
    const absl::StatusOr<JobView> view = cluster.coordinator().Running()
                                             ? cluster.Get("killed")
                                             : absl::UnavailableError("it is dead");
    return !cluster.coordinator().Running() || (view.ok() && view->Terminal());
  });
  const bool hit = !cluster.coordinator().Running();
  cluster.KillCoordinator();  // one that lives may still reach that write
  EXPECT_EQ(cluster.RestartCoordinator({}), absl::OkStatus());
  if (hit && !cluster.Get("killed").ok()) {
    EXPECT_EQ(cluster.Submit(Job(cluster, "killed")), absl::OkStatus());
  }
  EXPECT_EQ(cluster.WaitForSuccess("killed", seconds(60)), absl::OkStatus());
  ExpectInvariants(cluster, "killed", expected);
  return hit;
}

TEST(DurableWriteCrashTest, EveryWriteMayBeTheLast) {
  const int64_t most = EnvironmentNumber("RAVEL_WRITES", 2);
  std::vector<StepRow> expected;
  for (const char* place : {"coordinator.before_persist", "coordinator.after_persist"}) {
    int64_t number = 0;
    while ((most == 0 || number < most) && number < 200 && !::testing::Test::HasFailure()) {
      // In CI the writes in the middle of a run: the third, the sixth, ...
      ++number;
      if (!KilledAt(place, most == 0 ? number : 3 * number, expected)) {
        break;
      }
    }
    std::printf(
        "%s: %ld writes were the last of a coordinator\n", place, static_cast<long>(number));
    EXPECT_GT(number, 1) << place << " was hardly ever reached";
  }
}

}  // namespace
}  // namespace ravel::testing
