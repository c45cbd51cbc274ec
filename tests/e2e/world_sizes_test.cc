// Any number of workers gives the same bits: losses, weights and moments; and any transport does.

#include <chrono>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <absl/strings/str_cat.h>
#include <gmock/gmock.h>
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

class WorldSizesTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    absl::StatusOr<std::unique_ptr<MiniCluster>> started = MiniCluster::Start();
    ASSERT_TRUE(started.ok()) << started.status();
    cluster_ = std::move(*started).release();
    const absl::Status workers = cluster_->StartWorkers(5);
    ASSERT_TRUE(workers.ok()) << workers;
    WriteTokens(cluster_->folder() + "/tokens.bin", 20000, TinyJob().vocabulary);
  }
  static void TearDownTestSuite() {
    delete cluster_;
    cluster_ = nullptr;
  }

  static TinyJob Job(const std::string& name, int64_t workers) {
    return {.name = name,
            .tokens_path = cluster_->folder() + "/tokens.bin",
            .store = cluster_->folder() + "/store",
            .workers = workers,
            .steps = 12,
            .save_every_steps = 6,
            // Eight rows of 32 elements are a block of 256, so tensors of layers, too, are cut
            // between ranks.
            .hidden = 32,
            .heads = 4};
  }

  static absl::StatusOr<Outcome> Train(const TinyJob& job) {
    RETURN_IF_ERROR(cluster_->Submit(job));
    RETURN_IF_ERROR(cluster_->WaitForSuccess(job.name, seconds(60)));
    Outcome outcome;
    ASSIGN_OR_RETURN(outcome.history, cluster_->Metrics(job.name));
    ASSIGN_OR_RETURN(const JobView view, cluster_->Get(job.name));
    if (view.committed_step != job.steps) {
      return absl::InternalError(absl::StrCat("last commit is step ", view.committed_step));
    }
    ASSIGN_OR_RETURN(outcome.digest, cluster_->StateDigest(view.committed_path));
    return outcome;
  }

  static MiniCluster* cluster_;
};

MiniCluster* WorldSizesTest::cluster_ = nullptr;

TEST_F(WorldSizesTest, OneToFiveWorkersGiveTheSameBits) {
  const absl::StatusOr<Outcome> one = Train(Job("one", 1));
  ASSERT_TRUE(one.ok()) << one.status();
  ASSERT_EQ(one->history.size(), 12u);
  EXPECT_LT(one->history.back().loss, one->history.front().loss);

  for (int64_t workers = 2; workers <= 5; ++workers) {
    const absl::StatusOr<Outcome> many = Train(Job(absl::StrCat("w", workers), workers));
    ASSERT_TRUE(many.ok()) << workers << " workers: " << many.status();
    EXPECT_EQ(FirstDifference(many->history, one->history), "") << workers << " workers";
    EXPECT_EQ(many->digest, one->digest) << workers << " workers";
    EXPECT_EQ(many->history.back().world_size, workers);
  }
}

TEST_F(WorldSizesTest, TiedHeadGivesTheSameBitsToo) {
  TinyJob alone = Job("tied-one", 1);
  alone.tied = true;
  TinyJob together = Job("tied-three", 3);
  together.tied = true;
  const absl::StatusOr<Outcome> one = Train(alone);
  const absl::StatusOr<Outcome> three = Train(together);
  ASSERT_TRUE(one.ok()) << one.status();
  ASSERT_TRUE(three.ok()) << three.status();
  EXPECT_EQ(FirstDifference(three->history, one->history), "");
  EXPECT_EQ(three->digest, one->digest);
}

TEST_F(WorldSizesTest, GlooGivesTheBitsOfSharedMemory) {
  TinyJob shm = Job("by-shm", 3);
  shm.transport = "shm";
  TinyJob gloo = Job("by-gloo", 3);
  gloo.transport = "gloo";
  const absl::StatusOr<Outcome> a = Train(shm);
  const absl::StatusOr<Outcome> b = Train(gloo);
  ASSERT_TRUE(a.ok()) << a.status();
  ASSERT_TRUE(b.ok()) << b.status();
  EXPECT_EQ(FirstDifference(b->history, a->history), "");
  EXPECT_EQ(b->digest, a->digest);
}

TEST_F(WorldSizesTest, ResumesOnAnotherNumberOfWorkersWithTheSameBits) {
  TinyJob whole = Job("whole", 2);
  const absl::StatusOr<Outcome> straight = Train(whole);
  ASSERT_TRUE(straight.ok()) << straight.status();
  TinyJob resumed = Job("resumed", 5);
  absl::StatusOr<std::map<int64_t, std::string>> saved = cluster_->Checkpoints("whole");
  ASSERT_TRUE(saved.ok()) << saved.status();
  resumed.resume_from = (*saved)[6];
  const absl::StatusOr<Outcome> rest = Train(resumed);
  ASSERT_TRUE(rest.ok()) << rest.status();
  ASSERT_EQ(rest->history.size(), 6u);
  const std::vector<StepRow> tail(straight->history.begin() + 6, straight->history.end());
  EXPECT_EQ(FirstDifference(rest->history, tail), "");
  EXPECT_EQ(rest->digest, straight->digest);
}

// A job of bf16 with its narrowest states, through the whole service: other workers, transports and
// strategies, a resume with fp32 main weights, an export.
TEST_F(WorldSizesTest, Bf16GivesTheSameBitsOnAnyNumberOfWorkers) {
  const auto bf16 = [](const std::string& name, int64_t workers) {
    TinyJob job = Job(name, workers);
    job.optimizer = "stateDtype: bf16, mainWeights: bf16_remainder";
    job.parallelism = "gradientWire: bf16";
    job.more_spec = "  precision: {compute: bf16}\n";
    return job;
  };
  const absl::StatusOr<Outcome> one = Train(bf16("narrow-one", 1));
  ASSERT_TRUE(one.ok()) << one.status();
  EXPECT_LT(one->history.back().loss, one->history.front().loss);
  const absl::StatusOr<Outcome> four = Train(bf16("narrow-four", 4));
  TinyJob apart = bf16("narrow-gloo", 3);
  apart.transport = "gloo";
  apart.parallelism = "gradientWire: bf16, strategy: optim";
  const absl::StatusOr<Outcome> gloo = Train(apart);
  for (const absl::StatusOr<Outcome>* other : {&four, &gloo}) {
    ASSERT_TRUE(other->ok()) << other->status();
    EXPECT_EQ(FirstDifference((*other)->history, one->history), "");
    EXPECT_EQ((*other)->digest, one->digest);
  }
  TinyJob resumed = bf16("narrow-resumed", 2);
  resumed.optimizer = "stateDtype: bf16";
  const std::string saved = cluster_->Checkpoints("narrow-four")->at(6);
  resumed.resume_from = saved;
  const absl::StatusOr<Outcome> rest = Train(resumed);
  ASSERT_TRUE(rest.ok()) << rest.status();
  EXPECT_EQ(FirstDifference(rest->history, {one->history.begin() + 6, one->history.end()}), "");
  EXPECT_EQ(rest->digest, one->digest);
  EXPECT_THAT(cluster_->Ctl({"checkpoints", "show", saved}).out,
              ::testing::HasSubstr("numerics      compute=bf16 determinism=exact device=cpu "));
  const std::string exported = cluster_->folder() + "/exported";
  const RunResult made = cluster_->Ctl({"checkpoints", "export", saved, "--to", exported});
  EXPECT_EQ(made.exit_code, 0) << made.err;
}

}  // namespace
}  // namespace ravel::testing
