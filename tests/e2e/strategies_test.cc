// Every sharding strategy gives the same bits, and a job may stop under one and go on under
// another.

#include <chrono>
#include <map>
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

struct Outcome {
  std::vector<StepRow> history;
  std::string digest;
};

struct Case {
  std::string name;
  std::string parallelism;
  int64_t workers = 1;
  std::string transport = {};
};

class StrategiesTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    absl::StatusOr<std::unique_ptr<MiniCluster>> started = MiniCluster::Start();
    ASSERT_TRUE(started.ok()) << started.status();
    cluster_ = std::move(*started).release();
    const absl::Status workers = cluster_->StartWorkers(6);
    ASSERT_TRUE(workers.ok()) << workers;
    WriteTokens(cluster_->folder() + "/tokens.bin", 20000, TinyJob().vocabulary);
    absl::StatusOr<Outcome> reference = Train(Job({.name = "reference", .parallelism = {}}));
    ASSERT_TRUE(reference.ok()) << reference.status();
    reference_ = *std::move(reference);
    ASSERT_EQ(reference_.history.size(), 12u);
  }
  static void TearDownTestSuite() {
    delete cluster_;
    cluster_ = nullptr;
  }

  static TinyJob Job(const Case& test) {
    return {.name = test.name,
            .tokens_path = cluster_->folder() + "/tokens.bin",
            .store = cluster_->folder() + "/store",
            .workers = test.workers,
            .steps = 12,
            .global_batch = 16,
            .save_every_steps = 3,
            .transport = test.transport,
            .parallelism = test.parallelism,
            .more_spec = {}};
  }

  static absl::StatusOr<Outcome> Train(const TinyJob& job) {
    RETURN_IF_ERROR(cluster_->Submit(job));
    RETURN_IF_ERROR(cluster_->WaitForSuccess(job.name, seconds(90)));
    Outcome outcome;
    ASSIGN_OR_RETURN(outcome.history, cluster_->Metrics(job.name));
    ASSIGN_OR_RETURN(const JobView view, cluster_->Get(job.name));
    ASSIGN_OR_RETURN(outcome.digest, cluster_->StateDigest(view.committed_path));
    return outcome;
  }

  static MiniCluster* cluster_;
  static Outcome reference_;
};

MiniCluster* StrategiesTest::cluster_ = nullptr;
Outcome StrategiesTest::reference_;

TEST_F(StrategiesTest, AllGiveTheSameBits) {
  const std::vector<Case> cases = {
      {.name = "zero-zero", .parallelism = "strategy: no_shard", .workers = 2},
      {.name = "zero-one", .parallelism = "strategy: ZeRO-1", .workers = 4},
      {.name = "zero-two", .parallelism = "strategy: optim_grads", .workers = 3},
      {.name = "zero-three-gloo",
       .parallelism = "strategy: zero3, recompute: block",
       .workers = 3,
       .transport = "gloo"},
      {.name = "zero-zero-gloo",
       .parallelism = "strategy: zero0",
       .workers = 3,
       .transport = "gloo"},
      {.name = "hsdp", .parallelism = "strategy: hsdp, replicas: 2", .workers = 4},
      {.name = "hfsdp", .parallelism = "strategy: hfsdp, replicas: 2", .workers = 6},
      {.name = "hfsdp-gloo",
       .parallelism = "strategy: hfsdp, replicas: 2",
       .workers = 4,
       .transport = "gloo"}};
  for (const Case& test : cases) {
    const absl::StatusOr<Outcome> outcome = Train(Job(test));
    ASSERT_TRUE(outcome.ok()) << test.name << ": " << outcome.status();
    EXPECT_EQ(FirstDifference(outcome->history, reference_.history), "") << test.name;
    EXPECT_EQ(outcome->digest, reference_.digest) << test.name;
    EXPECT_EQ(outcome->history.back().world_size, test.workers);
  }
}

TEST_F(StrategiesTest, ResumeUnderAnotherStrategyAndWidth) {
  // Each goes on from what the one before saved at the step.
  struct Leg {
    Case test;
    int64_t from_step = 0;
  };
  const std::vector<Leg> legs = {
      {{.name = "leg-zero", .parallelism = "strategy: zero0", .workers = 3}, 0},
      {{.name = "leg-hfsdp", .parallelism = "strategy: hfsdp, replicas: 2", .workers = 4}, 3},
      {{.name = "leg-one", .parallelism = "strategy: zero1", .workers = 5}, 6},
      {{.name = "leg-hsdp", .parallelism = "strategy: hsdp, replicas: 2", .workers = 6}, 9}};
  std::string before;
  for (const Leg& leg : legs) {
    TinyJob job = Job(leg.test);
    if (leg.from_step > 0) {
      const absl::StatusOr<std::map<int64_t, std::string>> saved = cluster_->Checkpoints(before);
      ASSERT_TRUE(saved.ok()) << saved.status();
      ASSERT_EQ(saved->count(leg.from_step), 1u) << before << " has no step " << leg.from_step;
      job.resume_from = saved->at(leg.from_step);
    }
    const absl::StatusOr<Outcome> outcome = Train(job);
    ASSERT_TRUE(outcome.ok()) << job.name << ": " << outcome.status();
    const std::vector<StepRow> rest(reference_.history.begin() + leg.from_step,
                                    reference_.history.end());
    EXPECT_EQ(FirstDifference(outcome->history, rest), "") << job.name;
    EXPECT_EQ(outcome->digest, reference_.digest) << job.name;
    before = job.name;
  }
}

TEST_F(StrategiesTest, MicroBatchesOfALaneAreSummedAlikeEverywhere) {
  const auto in_two = [](Case test) {
    TinyJob job = Job(test);
    job.micro_batch = 1;  // of two sequences a lane
    return job;
  };
  const absl::StatusOr<Outcome> one = Train(in_two({.name = "split-one", .parallelism = {}}));
  const absl::StatusOr<Outcome> three = Train(in_two(
      {.name = "split-three", .parallelism = "strategy: zero1, recompute: block", .workers = 3}));
  const absl::StatusOr<Outcome> four = Train(
      in_two({.name = "split-four", .parallelism = "strategy: hsdp, replicas: 2", .workers = 4}));
  ASSERT_TRUE(one.ok()) << one.status();
  ASSERT_TRUE(three.ok()) << three.status();
  ASSERT_TRUE(four.ok()) << four.status();
  EXPECT_EQ(FirstDifference(three->history, one->history), "");
  EXPECT_EQ(three->digest, one->digest);
  EXPECT_EQ(FirstDifference(four->history, one->history), "");
  EXPECT_EQ(four->digest, one->digest);
}

}  // namespace
}  // namespace ravel::testing
