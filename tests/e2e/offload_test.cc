// State of the optimizer on the workers' disks: the same history, also after a worker is killed in
// the middle of an update; folders that cannot be used; the memory that it saves.

#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <functional>
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

constexpr double kMiB = 1024.0 * 1024.0;
constexpr char kField[] = "training.optimizer.offload.path";
constexpr int64_t kReportedBefore = 9;

class OffloadTest : public ::testing::Test {
 protected:
  void SetUp() override {
    absl::StatusOr<std::unique_ptr<MiniCluster>> started = MiniCluster::Start();
    ASSERT_TRUE(started.ok()) << started.status();
    cluster_ = std::move(*started);
    std::filesystem::create_directory(disk());
    WriteTokens(cluster_->folder() + "/tokens.bin", 20000, TinyJob().vocabulary);
  }

  std::string disk() const { return cluster_->folder() + "/disk"; }
  TinyJob Job(const std::string& name, const std::string& offload) const {
    return {.name = name,
            .tokens_path = cluster_->folder() + "/tokens.bin",
            .store = cluster_->folder() + "/store",
            .workers = 2,
            .sizes = {1, 2},
            .steps = 16,
            .save_every_steps = 4,
            .optimizer = offload.empty() ? "" : absl::StrCat("offload: {", offload, "}")};
  }
  std::string Everything() const { return absl::StrCat("fraction: 1, path: ", disk()); }
  absl::StatusOr<std::vector<StepRow>> Train(const TinyJob& job) {
    RETURN_IF_ERROR(cluster_->Submit(job));
    RETURN_IF_ERROR(cluster_->WaitForSuccess(job.name, seconds(60)));
    return cluster_->Metrics(job.name);
  }

  // State digests of the committed steps.
  std::map<int64_t, std::string> Digests(const std::string& job) const {
    std::map<int64_t, std::string> digests;
    const auto steps = cluster_->Checkpoints(job);
    EXPECT_TRUE(steps.ok()) << steps.status();
    for (const auto& [step, directory] : steps.value_or(std::map<int64_t, std::string>())) {
      const absl::StatusOr<std::string> digest = cluster_->StateDigest(directory);
      EXPECT_TRUE(digest.ok()) << digest.status();
      digests[step] = digest.value_or(absl::StrCat(directory, " has none"));
    }
    return digests;
  }

  // Kills a worker of a job of this kind while one is held at a call of `fault`, after the report
  // of step kReportedBefore.
  void KillIn(const std::string& fault, int64_t call, const std::function<void(TinyJob&)>& make);

  std::unique_ptr<MiniCluster> cluster_;
};

void OffloadTest::KillIn(const std::string& fault,
                         int64_t call,
                         const std::function<void(TinyJob&)>& make) {
  const std::string hold = cluster_->folder() + "/hold";
  ASSERT_EQ(cluster_->StartWorkers(2, {{"RAVEL_FAULTS", absl::StrCat(fault, "@*:hold=", hold)}}),
            absl::OkStatus());
  TinyJob memory = Job("memory", "");
  make(memory);
  const absl::StatusOr<std::vector<StepRow>> expected = Train(memory);
  ASSERT_TRUE(expected.ok()) << expected.status();

  const std::string held = absl::StrCat(hold, ".", call);
  WriteText(held, "");
  TinyJob disk_job = Job("disk", Everything());
  make(disk_job);
  ASSERT_EQ(cluster_->Submit(disk_job), absl::OkStatus());
  ASSERT_EQ(cluster_->WaitForStep("disk", kReportedBefore, seconds(60)), absl::OkStatus());
  const absl::StatusOr<JobView> before = cluster_->Get("disk");
  ASSERT_TRUE(before.ok()) << before.status();
  EXPECT_EQ(before->step, kReportedBefore);
  EXPECT_TRUE(std::filesystem::is_empty(disk()));
  ASSERT_EQ(cluster_->AllTrainers().size(), 2u);
  ::kill(cluster_->AllTrainers().back(), SIGKILL);
  std::filesystem::remove(held);

  ASSERT_EQ(cluster_->WaitForSuccess("disk", seconds(60)), absl::OkStatus());
  const absl::StatusOr<std::vector<StepRow>> history = cluster_->Metrics("disk");
  ASSERT_TRUE(history.ok()) << history.status();
  EXPECT_EQ(FirstDifference(*history, *expected), "");
  EXPECT_GT(history->back().epoch, before->epoch) << "the kill came too late";
  const std::map<int64_t, std::string> digests = Digests("disk");
  EXPECT_TRUE(digests.contains(history->back().step)) << "the last step is committed";
  EXPECT_GT(digests.size(), 1u);
  EXPECT_EQ(digests, Digests("memory"));
  EXPECT_TRUE(std::filesystem::is_empty(disk()));
}

// A TinyJob has five groups, each of one chunk: the third of the tenth step.
TEST_F(OffloadTest, AWorkerKilledInAnUpdateLeavesNothingAndTheHistoryStays) {
  KillIn("offload.chunk", 48, [](TinyJob&) {});
}

// Main weights of codes lie outside, too.
void MakeQuantized(TinyJob& job) {
  job.sequence_length = 32;
  job.hidden = 128;
  job.intermediate = 256;
  job.layers = 2;
  job.heads = 2;
  job.key_value_heads = 2;
  job.more_spec = "  precision: {recipe: mxfp8}\n";
}

// Six groups, each of one chunk: some are updated, and all codes are still the old ones.
TEST_F(OffloadTest, AWorkerOfARecipeKilledInAnUpdateLeavesNothingAndTheHistoryStays) {
  KillIn("offload.chunk", 57, MakeQuantized);
}

// All are updated, and some codes are new. Scales follow from all of a tensor, so codes are made
// after the update: one worker stores eight matrices, which it reads once in a step and twice at
// the start. It is held at its third code of the ninth step, which the other one reports.
TEST_F(OffloadTest, AWorkerKilledWhileCodesAreMadeLeavesNothingAndTheHistoryStays) {
  KillIn("offload.read", 83, [](TinyJob& job) {
    MakeQuantized(job);
    job.more_spec = "  precision: {recipe: fp8_tensor, scaling: current}\n";
  });
}

TEST_F(OffloadTest, AFolderThatCannotBeUsedFailsTheJobByItsField) {
  ASSERT_EQ(cluster_->StartWorkers(2), absl::OkStatus());
  WriteText(cluster_->folder() + "/file", "no folder");
  // No one may make files in the last one, not even root.
  const std::vector<std::string> paths = {
      cluster_->folder() + "/missing", cluster_->folder() + "/file", "/proc"};
  for (size_t i = 0; i < paths.size(); ++i) {
    const std::string name = absl::StrCat("refused-", i);
    ASSERT_EQ(cluster_->Submit(Job(name, absl::StrCat("fraction: 0.5, path: ", paths[i]))),
              absl::OkStatus());
    const absl::StatusOr<JobView> end = cluster_->WaitForEnd(name, seconds(60));
    ASSERT_TRUE(end.ok()) << end.status();
    EXPECT_EQ(end->state, "FAILED") << paths[i];
    EXPECT_EQ(end->reason, "DataError") << paths[i];
    EXPECT_THAT(end->message, ::testing::HasSubstr(absl::StrCat(kField, ": ", paths[i])));
  }
  // Before anything is started, what is wrong in the file.
  for (const auto& [offload, text] : std::vector<std::pair<std::string, std::string>>{
           {"fraction: 2, path: /disk", "fraction"}, {"fraction: 0.5", "path"}}) {
    EXPECT_THAT(std::string(cluster_->Submit(Job("wrong", offload)).message()),
                ::testing::HasSubstr("spec.training.optimizer.offload." + text));
  }
}

// What a trainer holds before its last step: after the updates of all others.
TEST_F(OffloadTest, ATrainerHoldsLessMemoryByAboutWhatIsOffloaded) {
  ASSERT_EQ(cluster_->StartWorkers(1, cluster_->HoldFaults()), absl::OkStatus());
  const auto held_mib = [&](const std::string& name, const std::string& offload) {
    TinyJob job = Job(name, offload);
    job.workers = 1;
    job.sizes.clear();
    job.steps = 4;
    job.save_every_steps = 100;
    job.virtual_ranks = 4;
    job.global_batch = 4;
    job.vocabulary = 512;  // 15.15 M parameters, 115.6 MiB of moments
    job.hidden = 320;
    job.intermediate = 860;
    job.layers = 12;
    job.heads = 5;
    job.key_value_heads = 5;
    cluster_->HoldTrainersAt(job.steps);
    EXPECT_EQ(cluster_->Submit(job), absl::OkStatus());
    EXPECT_EQ(cluster_->WaitForStep(name, job.steps - 1, seconds(60)), absl::OkStatus());
    // Pages of the last update may still be leaving: until none has left for a second.
    const auto held = [&] {
      const std::vector<pid_t> trainers = cluster_->AllTrainers();
      return trainers.empty() ? 0 : PssBytes(trainers.front());
    };
    constexpr int64_t kLittle = 1 << 17;
    int64_t bytes = held();
    EXPECT_TRUE(Eventually(seconds(60),
                           [&] {
                             const int64_t before = bytes;
                             PauseBetweenLooks(seconds(1));
                             bytes = held();
                             return std::abs(bytes - before) < kLittle;
                           }))
        << name << " still gives memory back";
    cluster_->LetTrainersGo();
    EXPECT_EQ(cluster_->WaitForSuccess(name, seconds(60)), absl::OkStatus());
    return static_cast<double>(bytes) / kMiB;
  };
  const double whole = held_mib("memory", "");
  const double half = held_mib("half", absl::StrCat("fraction: 0.5, path: ", disk()));
  const double none = held_mib("disk", Everything());
  std::printf("a trainer holds %.1f MiB, %.1f with half of its moments on disk, %.1f with all\n",
              whole,
              half,
              none);
  EXPECT_GT(none, 0);
  EXPECT_NEAR(whole - half, 50, 8);  // five layers and the head
  EXPECT_NEAR(whole - none, 115.6, 8);
}

}  // namespace
}  // namespace ravel::testing
