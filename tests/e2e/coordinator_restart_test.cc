// The coordinator dies and comes back with the same state folder: jobs go on with the same bits.

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tests/testing/mini_cluster.h"

namespace ravel::testing {
namespace {

using std::chrono::seconds;

TEST(CoordinatorRestartTest, JobGoesOnWithTheSameBits) {
  absl::StatusOr<std::unique_ptr<MiniCluster>> started = MiniCluster::Start({}, kPatientDetection);
  ASSERT_TRUE(started.ok()) << started.status();
  MiniCluster& cluster = **started;
  ASSERT_EQ(cluster.StartWorkers(2, cluster.HoldFaults()), absl::OkStatus());
  WriteTokens(cluster.folder() + "/tokens.bin", 100000, TinyJob().vocabulary);
  TinyJob job = {.name = "alone",
                 .tokens_path = cluster.folder() + "/tokens.bin",
                 .store = cluster.folder() + "/store",
                 .steps = 60,
                 .global_batch = 16,
                 .sequence_length = 128,
                 .hidden = 96,
                 .intermediate = 260};
  ASSERT_EQ(cluster.Submit(job), absl::OkStatus());
  ASSERT_EQ(cluster.WaitForSuccess(job.name, seconds(60)), absl::OkStatus());
  const absl::StatusOr<std::vector<StepRow>> expected = cluster.Metrics(job.name);
  ASSERT_TRUE(expected.ok()) << expected.status();

  // Held until the coordinator is gone, and again before the job is over.
  job.name = "interrupted";
  cluster.HoldTrainersAt(13);
  cluster.HoldTrainersAt(50);
  ASSERT_EQ(cluster.Submit(job), absl::OkStatus());
  ASSERT_EQ(cluster.WaitForStep(job.name, 12, seconds(60)), absl::OkStatus());
  const absl::StatusOr<JobView> before = cluster.Get(job.name);
  ASSERT_TRUE(before.ok()) << before.status();
  const std::vector<pid_t> trainers = cluster.AllTrainers();
  cluster.KillCoordinator();
  cluster.LetTrainersGoAt(13);
  ASSERT_EQ(cluster.RestartCoordinator(), absl::OkStatus());
  ASSERT_EQ(cluster.WaitForStep(job.name, 40, seconds(60)), absl::OkStatus());
  const absl::StatusOr<JobView> after = cluster.Get(job.name);
  ASSERT_TRUE(after.ok()) << after.status();
  EXPECT_EQ(after->epoch, before->epoch) << "the trainers were taken over, not started again";
  EXPECT_EQ(cluster.AllTrainers(), trainers);

  cluster.LetTrainersGo();
  ASSERT_EQ(cluster.WaitForSuccess(job.name, seconds(60)), absl::OkStatus());
  const absl::StatusOr<std::vector<StepRow>> history = cluster.Metrics(job.name);
  ASSERT_TRUE(history.ok()) << history.status();
  EXPECT_EQ(FirstDifference(*history, *expected), "");
  // What was finished before the crash is still known.
  const absl::StatusOr<JobView> earlier = cluster.Get("alone");
  ASSERT_TRUE(earlier.ok()) << earlier.status();
  EXPECT_EQ(earlier->state, "SUCCEEDED");
}

}  // namespace
}  // namespace ravel::testing
