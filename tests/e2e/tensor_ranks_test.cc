// Trainers that share each layer: losses, weights and moments are those of one, on any number of
// groups, with any strategy, over any transport, and across restarts that change both. A group
// that has lost a trainer is let go, and whole groups go on.

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <absl/strings/str_cat.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include "tests/testing/eventually.h"
#include "tests/testing/mini_cluster.h"

namespace ravel::testing {
namespace {

using std::chrono::seconds;

constexpr int kDevices = 8;

// Groups of so many ranks.
struct RankMesh {
  int64_t groups = 1;
  int64_t tensor = 1;
  bool sequence = false;  // ranks of a group have their own tokens alone between products
  int64_t chunks = 1;     // of tokens, in which they exchange sums
};

struct TrainedState {
  std::vector<StepRow> history;
  std::string digest;
};

// Physical memory, as a node reports it for its cpu devices.
int64_t HostMemoryBytes() {
  return int64_t{sysconf(_SC_PHYS_PAGES)} * sysconf(_SC_PAGESIZE);
}

class TensorRanksTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    absl::StatusOr<std::unique_ptr<MiniCluster>> started = MiniCluster::Start();
    ASSERT_TRUE(started.ok()) << started.status();
    cluster_ = std::move(*started).release();
    const absl::Status workers = cluster_->StartWorkers(kDevices, cluster_->HoldFaults());
    ASSERT_TRUE(workers.ok()) << workers;
    WriteTokens(cluster_->folder() + "/tokens.bin", 20000, TinyJob().vocabulary);
  }
  static void TearDownTestSuite() {
    delete cluster_;
    cluster_ = nullptr;
  }

  // Four parts; two key heads, so that four ranks have copies of them.
  static TinyJob Job(const std::string& name, RankMesh mesh, const std::string& strategy) {
    return {.name = name,
            .tokens_path = cluster_->folder() + "/tokens.bin",
            .store = cluster_->folder() + "/store",
            .workers = mesh.groups * mesh.tensor,
            .steps = 12,
            .tensor_parts = 4,
            .save_every_steps = 4,
            .parallelism = absl::StrCat("strategy: ",
                                        strategy,
                                        ", tensor: ",
                                        mesh.tensor,
                                        mesh.sequence ? ", sequenceParallel: true" : "",
                                        ", tensorChunks: ",
                                        mesh.chunks),
            .hidden = 32,
            .intermediate = 64,
            .layers = 2,
            .heads = 4};
  }

  static absl::StatusOr<TrainedState> Train(const TinyJob& job) {
    RETURN_IF_ERROR(cluster_->Submit(job));
    RETURN_IF_ERROR(cluster_->WaitForSuccess(job.name, seconds(90)));
    TrainedState state;
    ASSIGN_OR_RETURN(state.history, cluster_->Metrics(job.name));
    ASSIGN_OR_RETURN(const JobView view, cluster_->Get(job.name));
    ASSIGN_OR_RETURN(state.digest, cluster_->StateDigest(view.committed_path));
    return state;
  }
  // That of one trainer.
  static const TrainedState& Alone() {
    static const TrainedState& state = *new TrainedState([] {
      absl::StatusOr<TrainedState> made = Train(Job("alone", {}, "no_shard"));
      EXPECT_TRUE(made.ok()) << made.status();
      return made.ok() ? *std::move(made) : TrainedState();
    }());
    return state;
  }
  static void ExpectAlone(const TinyJob& job, size_t first_step = 0) {
    const absl::StatusOr<TrainedState> state = Train(job);
    ASSERT_TRUE(state.ok()) << job.name << ": " << state.status() << cluster_->Report(job.name);
    const std::vector<StepRow>& all = Alone().history;
    const std::vector<StepRow> expected(all.begin() + static_cast<std::ptrdiff_t>(first_step),
                                        all.end());
    EXPECT_EQ(FirstDifference(state->history, expected), "") << job.name;
    EXPECT_EQ(state->digest, Alone().digest) << job.name;
    EXPECT_EQ(state->history.back().world_size, job.workers);
  }

  static MiniCluster* cluster_;
};

MiniCluster* TensorRanksTest::cluster_ = nullptr;

TEST_F(TensorRanksTest, EveryMeshGivesTheBitsOfOneTrainer) {
  ASSERT_EQ(Alone().history.size(), 12u);
  EXPECT_LT(Alone().history.back().loss, Alone().history.front().loss);
  const bool all = std::getenv("RAVEL_ALL") != nullptr;
  const char* const strategies[] = {"optim_grads_params", "optim", "no_shard", "optim_grads"};
  size_t turn = 0;
  for (const int64_t tensor : {1, 2, 4}) {
    for (const int64_t groups : {1, 2, 3}) {
      if (groups * tensor > kDevices || (groups == 3 && !all) || (groups * tensor == 1)) {
        continue;
      }
      for (size_t i = 0; i < (all ? 4u : 1u); ++i) {
        const std::string name = absl::StrCat("mesh-", groups, "x", tensor, "-", i);
        const int64_t chunks = tensor == 4 ? 2 : 1;
        ExpectAlone(Job(name, {groups, tensor, false, chunks}, strategies[(turn + i) % 4]));
        if (tensor > 1 && (all || groups == 2 || tensor == 4)) {
          ExpectAlone(Job(
              name + "-own", {groups, tensor, true, 3 - chunks}, strategies[(turn + i + 1) % 4]));
        }
      }
      ++turn;
    }
  }
}

TEST_F(TensorRanksTest, GlooGivesTheBitsOfSharedMemory) {
  for (const bool sequence : {false, true}) {
    TinyJob job = Job(sequence ? "by-gloo-own" : "by-gloo", {2, 2, sequence}, "optim_grads_params");
    job.transport = "gloo";
    ExpectAlone(job);
  }
}

TEST_F(TensorRanksTest, OtherGroupsGoOnFromACheckpoint) {
  ExpectAlone(Job("two-by-two", {2, 2}, "optim_grads_params"));
  TinyJob four = Job("four-by-one", {4, 1}, "optim");
  four.resume_from = cluster_->Checkpoints("two-by-two")->at(4);
  ExpectAlone(four, 4);
  TinyJob one = Job("one-by-four", {1, 4, true}, "optim_grads");
  one.resume_from = cluster_->Checkpoints("four-by-one")->at(8);
  ExpectAlone(one, 8);
}

// A job of 2 x 2 is cancelled, and goes on as 4 x 1.
TEST_F(TensorRanksTest, AnotherTryGoesOnWithOtherGroups) {
  const TinyJob job = Job("regrouped", {2, 2, true}, "optim_grads_params");
  cluster_->HoldTrainersAt(6);
  ASSERT_EQ(cluster_->Submit(job), absl::OkStatus());
  ASSERT_EQ(cluster_->WaitForStep(job.name, 5, seconds(60)), absl::OkStatus());
  const RunResult cancelled = cluster_->Ctl({"cancel", job.name, "--wait"});
  ASSERT_EQ(cancelled.exit_code, 0) << cancelled.err;
  cluster_->LetTrainersGo();
  const RunResult refused = cluster_->Ctl({"retry", job.name, "--tensor", "3"});
  EXPECT_EQ(refused.exit_code, 2) << refused.err;
  EXPECT_THAT(refused.err, ::testing::HasSubstr("whole groups of 3 ranks"));
  const RunResult retried = cluster_->Ctl({"retry", job.name, "--tensor", "1"});
  ASSERT_EQ(retried.exit_code, 0) << retried.err;
  ASSERT_EQ(cluster_->WaitForSuccess(job.name, seconds(90)), absl::OkStatus())
      << cluster_->Report(job.name);
  const absl::StatusOr<std::vector<StepRow>> history = cluster_->Metrics(job.name);
  ASSERT_TRUE(history.ok()) << history.status();
  EXPECT_EQ(FirstDifference(*history, Alone().history), "");
  const absl::StatusOr<JobView> view = cluster_->Get(job.name);
  ASSERT_TRUE(view.ok());
  EXPECT_EQ(*cluster_->StateDigest(view->committed_path), Alone().digest);
  const RunResult saves = cluster_->Ctl({"checkpoints", "list", job.name});
  EXPECT_THAT(saves.out, ::testing::HasSubstr("shard 2, tensor 2")) << "of before";
  EXPECT_THAT(saves.out, ::testing::HasSubstr("shard 4"));
  const absl::StatusOr<std::vector<EventRow>> events = cluster_->Events(job.name);
  ASSERT_TRUE(events.ok()) << events.status();
  EXPECT_TRUE(std::any_of(events->begin(), events->end(), [](const EventRow& event) {
    return event.message.ends_with("with parallelism.tensor 1 after 2");
  }));
}

// A job that is too large for this host unless ranks share its layers, and waits for devices. The
// planner refuses another try that no device could hold; one that fits is accepted.
TEST_F(TensorRanksTest, AnotherTryThatNoDeviceCanHoldIsRefusedAtOnce) {
  TinyJob job = Job("too-large", {4, 4}, "no_shard");  // twice as many devices as there are
  job.global_batch = 16;
  job.virtual_ranks = 16;
  job.hidden = 4096;
  job.intermediate = 4 * job.hidden;
  job.key_value_heads = job.heads;
  // Weights, gradients and moments of a rank alone take about twice this host's memory.
  const int64_t layer_bytes = 16 * job.hidden * job.hidden * 18;
  job.layers = 1 + 2 * HostMemoryBytes() / layer_bytes;
  ASSERT_EQ(cluster_->Submit(job), absl::OkStatus());
  const RunResult cancelled = cluster_->Ctl({"cancel", job.name, "--wait"});
  ASSERT_EQ(cancelled.exit_code, 0) << cancelled.err;
  const absl::StatusOr<std::vector<EventRow>> before = cluster_->Events(job.name);
  ASSERT_TRUE(before.ok()) << before.status();
  const RunResult refused = cluster_->Ctl({"retry", job.name, "--tensor", "1"});
  EXPECT_NE(refused.exit_code, 0);
  EXPECT_THAT(refused.err, ::testing::HasSubstr("spec.parallelism.tensor"));
  EXPECT_THAT(refused.err, ::testing::HasSubstr("does not fit"));
  EXPECT_EQ(cluster_->Get(job.name)->state, "CANCELLED");
  EXPECT_EQ(cluster_->Events(job.name)->size(), before->size());
  const RunResult retried = cluster_->Ctl({"retry", job.name, "--tensor", "4"});
  EXPECT_EQ(retried.exit_code, 0) << retried.err;
  EXPECT_EQ(cluster_->Get(job.name)->state, "QUEUED");
  EXPECT_EQ(cluster_->Ctl({"cancel", job.name, "--wait"}).exit_code, 0);
}

// A job of 2 x 2 loses a trainer and has no device in its place.
TEST_F(TensorRanksTest, WholeGroupsGoOnAfterALoss) {
  TinyJob job = Job("loses-one", {2, 2}, "optim_grads_params");
  job.sizes = {2, 4};
  cluster_->HoldTrainersAt(6);
  ASSERT_EQ(cluster_->Submit(job), absl::OkStatus());
  ASSERT_EQ(cluster_->WaitForStep(job.name, 5, seconds(60)), absl::OkStatus());
  std::string victim;
  int64_t spare = 0;
  for (const std::string& worker : cluster_->worker_names()) {
    if (cluster_->Trainers(worker).empty()) {
      cluster_->KillWorker(worker);
      ++spare;
    } else {
      victim = worker;
    }
  }
  ASSERT_EQ(spare, kDevices - 4);
  cluster_->KillWorker(victim);
  cluster_->LetTrainersGo();
  ASSERT_EQ(cluster_->WaitForSuccess(job.name, seconds(120)), absl::OkStatus())
      << cluster_->Report(job.name);
  const absl::StatusOr<std::vector<StepRow>> history = cluster_->Metrics(job.name);
  ASSERT_TRUE(history.ok()) << history.status();
  EXPECT_EQ(FirstDifference(*history, Alone().history), "");
  EXPECT_EQ(history->front().world_size, 4);
  EXPECT_EQ(history->back().world_size, 2);
}

TEST_F(TensorRanksTest, WhatHasNotRunIsRefusedByField) {
  const struct {
    const char* parallelism;
    const char* spec;
    const char* field;
    int64_t devices = 2;
    int64_t parts = 4;
  } refused[] = {
      {"sequenceParallel: true", "", "spec.parallelism.sequenceParallel", 1},
      {"tensor: 2", "  precision: {recipe: fp8_tensor}\n", "precision.recipe"},
      {"tensor: 2, tensorChunks: 3", "", "spec.parallelism.tensorChunks"},
      {"tensorChunks: 2", "", "spec.parallelism.tensorChunks", 1},
      {"tensor: 3", "", "spec.parallelism.tensor"},
      {"tensor: 8", "", "spec.parallelism.tensor", 8, 8},  // of four heads
      {"tensor: 4", "", "tensorParts", 4, 2},
  };
  int number = 0;
  for (const auto& one : refused) {
    TinyJob job = Job(absl::StrCat("refused-", number++), {1, one.devices}, "optim");
    job.tensor_parts = one.parts;
    job.parallelism = one.parallelism;
    job.more_spec = one.spec;
    const absl::Status status = cluster_->Submit(job);
    EXPECT_FALSE(status.ok()) << one.parallelism;
    EXPECT_THAT(std::string(status.message()), ::testing::HasSubstr(one.field));
  }
}

}  // namespace
}  // namespace ravel::testing
