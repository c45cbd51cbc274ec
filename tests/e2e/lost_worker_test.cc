// A worker is lost with SIGKILL, or joins: the job goes on, and its history equals the
// uninterrupted one bit for bit.

#include <chrono>
#include <csignal>
#include <cstdio>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>
#include <gtest/gtest.h>

#include "tests/testing/eventually.h"
#include "tests/testing/mini_cluster.h"

namespace ravel::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using SteadyClock = std::chrono::steady_clock;

constexpr int64_t kSteps = 40;

class LostWorkerTest : public ::testing::Test {
 protected:
  void SetUp() override {
    absl::StatusOr<std::unique_ptr<MiniCluster>> started = MiniCluster::Start();
    ASSERT_TRUE(started.ok()) << started.status();
    cluster_ = std::move(*started);
    WriteTokens(cluster_->folder() + "/tokens.bin", 100000, TinyJob().vocabulary);
  }

  TinyJob Job(const std::string& name) const {
    return {.name = name,
            .tokens_path = cluster_->folder() + "/tokens.bin",
            .store = cluster_->folder() + "/store",
            .workers = 3,
            .sizes = {1, 2, 3},
            .steps = kSteps,
            .global_batch = 16,
            .sequence_length = 128,
            .save_every_steps = 4,
            .hidden = 96,
            .intermediate = 260};
  }

  absl::StatusOr<std::vector<StepRow>> Train(const TinyJob& job) {
    RETURN_IF_ERROR(cluster_->Submit(job));
    RETURN_IF_ERROR(cluster_->WaitForSuccess(job.name, seconds(120)));
    return cluster_->Metrics(job.name);
  }

  // Seconds from now until a step of a later epoch than `epoch` is in the history.
  double SecondsToNextStep(const std::string& job, int64_t epoch) {
    const auto start = SteadyClock::now();
    Eventually(seconds(60), [&] {
      const absl::StatusOr<std::vector<StepRow>> rows = cluster_->Metrics(job);
      return rows.ok() && !rows->empty() && rows->back().epoch > epoch;
    });
    return std::chrono::duration<double>(SteadyClock::now() - start).count();
  }

  // Trainers can be held, so that a loss is in the middle of a job on every machine.
  absl::Status StartWorkers(int count) {
    return cluster_->StartWorkers(count, cluster_->HoldFaults());
  }
  // Submits a job whose trainers wait before their step after `step`, which they have reported.
  absl::Status SubmitHeldAfter(const TinyJob& job, int64_t step) {
    cluster_->HoldTrainersAt(step + 1);
    RETURN_IF_ERROR(cluster_->Submit(job));
    return cluster_->WaitForStep(job.name, step, seconds(60));
  }

  std::unique_ptr<MiniCluster> cluster_;
};

TEST_F(LostWorkerTest, HistoryAfterSigkillEqualsTheUninterruptedOne) {
  ASSERT_EQ(StartWorkers(3), absl::OkStatus());
  const absl::StatusOr<std::vector<StepRow>> expected = Train(Job("uninterrupted"));
  ASSERT_TRUE(expected.ok()) << expected.status();
  ASSERT_EQ(expected->size(), static_cast<size_t>(kSteps));

  const int64_t seeds = EnvironmentNumber("RAVEL_SEEDS", 2);
  for (int64_t seed = 0; seed < seeds; ++seed) {
    ASSERT_EQ(StartWorkers(3), absl::OkStatus());
    std::mt19937 random(static_cast<unsigned>(seed));
    const int64_t step = std::uniform_int_distribution<int64_t>(1, kSteps - 6)(random);
    const bool kill_daemon = seed % 2 == 0;
    const std::string job = absl::StrCat("seed-", seed);
    ASSERT_EQ(SubmitHeldAfter(Job(job), step), absl::OkStatus());

    const absl::StatusOr<JobView> before = cluster_->Get(job);
    ASSERT_TRUE(before.ok()) << before.status();
    const std::vector<std::string> names = cluster_->worker_names();
    const std::string victim = names[random() % names.size()];
    if (kill_daemon) {
      cluster_->KillWorker(victim);
    } else {
      const std::vector<pid_t> trainers = cluster_->Trainers(victim);
      ASSERT_FALSE(trainers.empty()) << victim << " has no trainer at step " << before->step;
      ::kill(trainers[random() % trainers.size()], SIGKILL);
    }
    cluster_->LetTrainersGo();
    const double recovery_s = SecondsToNextStep(job, before->epoch);

    ASSERT_EQ(cluster_->WaitForSuccess(job, seconds(120)), absl::OkStatus()) << "seed " << seed;
    const absl::StatusOr<std::vector<StepRow>> history = cluster_->Metrics(job);
    ASSERT_TRUE(history.ok()) << history.status();
    EXPECT_EQ(FirstDifference(*history, *expected), "") << "seed " << seed;
    EXPECT_GT(history->back().epoch, before->epoch) << "the kill came too late";
    std::printf("seed %2ld: %s killed at step %2ld: %.2f s to the next step, %ld -> %ld workers\n",
                static_cast<long>(seed),
                kill_daemon ? "daemon " : "trainer",
                static_cast<long>(before->step),
                recovery_s,
                static_cast<long>(before->world_size),
                static_cast<long>(history->back().world_size));
  }
}

TEST_F(LostWorkerTest, JobGrowsAtACheckpointWhenAWorkerJoins) {
  ASSERT_EQ(StartWorkers(3), absl::OkStatus());
  TinyJob job = Job("alone");
  job.steps = 80;
  const absl::StatusOr<std::vector<StepRow>> expected = Train(job);
  ASSERT_TRUE(expected.ok()) << expected.status();

  cluster_->KillWorker("w2");
  ASSERT_EQ(cluster_->WaitForReadyNodes(2), absl::OkStatus());
  job.name = "grows";
  ASSERT_EQ(SubmitHeldAfter(job, 9), absl::OkStatus());
  ASSERT_EQ(StartWorkers(3), absl::OkStatus());
  ASSERT_TRUE(Eventually(seconds(60), [&] {
    return absl::StrContains(cluster_->Ctl({"events", job.name}).out, "2 → 3 devices");
  })) << cluster_->Report(job.name);
  cluster_->LetTrainersGo();
  ASSERT_EQ(cluster_->WaitForSuccess(job.name, seconds(120)), absl::OkStatus());

  const absl::StatusOr<std::vector<StepRow>> history = cluster_->Metrics(job.name);
  ASSERT_TRUE(history.ok()) << history.status();
  EXPECT_EQ(FirstDifference(*history, *expected), "");
  EXPECT_EQ(history->front().world_size, 2);
  EXPECT_EQ(history->back().world_size, 3);
}

TEST_F(LostWorkerTest, FixedSizeJobWaitsForAReplacement) {
  ASSERT_EQ(StartWorkers(2), absl::OkStatus());
  TinyJob job = Job("fixed-alone");
  job.workers = 2;
  job.sizes = {};
  const absl::StatusOr<std::vector<StepRow>> expected = Train(job);
  ASSERT_TRUE(expected.ok()) << expected.status();

  job.name = "fixed";
  ASSERT_EQ(SubmitHeldAfter(job, 6), absl::OkStatus());
  cluster_->KillWorker(cluster_->worker_names().front());
  cluster_->LetTrainersGo();
  ASSERT_EQ(StartWorkers(2), absl::OkStatus());
  ASSERT_EQ(cluster_->WaitForSuccess(job.name, seconds(120)), absl::OkStatus());
  const absl::StatusOr<std::vector<StepRow>> history = cluster_->Metrics(job.name);
  ASSERT_TRUE(history.ok()) << history.status();
  EXPECT_EQ(FirstDifference(*history, *expected), "");
}

}  // namespace
}  // namespace ravel::testing
