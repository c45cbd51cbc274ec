// Trainers die at random moments while they save at every step: no torn step is ever accepted, and
// what is accepted is right.

#include <chrono>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <map>
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

class TornCheckpointTest : public ::testing::Test {
 protected:
  void SetUp() override {
    // A process that was taken for lost would count its steps anew, and holds count them.
    absl::StatusOr<std::unique_ptr<MiniCluster>> started =
        MiniCluster::Start({}, kPatientDetection);
    ASSERT_TRUE(started.ok()) << started.status();
    cluster_ = std::move(*started);
    ASSERT_EQ(cluster_->StartWorkers(2, cluster_->HoldFaults()), absl::OkStatus());
    WriteTokens(cluster_->folder() + "/tokens.bin", 20000, TinyJob().vocabulary);
  }

  // Little to compute, some MiB to write, at every step.
  TinyJob Job(const std::string& name, int64_t steps) const {
    return {.name = name,
            .tokens_path = cluster_->folder() + "/tokens.bin",
            .store = cluster_->folder() + "/store",
            .workers = 2,
            .steps = steps,
            .global_batch = 2,
            .virtual_ranks = 2,
            .save_every_steps = 1,
            .hidden = 144,
            .intermediate = 400};
  }

  // Runs a job to its end with every step committed. A trainer that has four newer saves which the
  // coordinator has not answered removes the oldest: training may be at most four steps ahead.
  void TrainAtThePaceOfCommits(const std::string& job, int64_t steps) {
    constexpr int64_t kAhead = 4;
    cluster_->HoldTrainersAt(kAhead + 1);
    ASSERT_EQ(cluster_->Submit(Job(job, steps)), absl::OkStatus());
    for (int64_t step = kAhead; step < steps; step += kAhead) {
      ASSERT_TRUE(Eventually(seconds(60), [&] {
        const absl::StatusOr<JobView> view = cluster_->Get(job);
        return view.ok() && view->committed_step >= step;
      })) << cluster_->Report(job);
      cluster_->HoldTrainersAt(step + kAhead + 1);
      cluster_->LetTrainersGoAt(step + 1);
    }
    cluster_->LetTrainersGo();
    ASSERT_EQ(cluster_->WaitForSuccess(job, seconds(120)), absl::OkStatus());
  }

  // Every directory of a step that is in the store, committed or not.
  std::vector<std::string> StepDirectories(const std::string& job) const {
    std::vector<std::string> found;
    std::error_code error;  // steps are renamed and removed while this looks
    std::filesystem::directory_iterator entry(cluster_->folder() + "/store/" + job, error);
    for (; !error && entry != std::filesystem::directory_iterator(); entry.increment(error)) {
      if (absl::StartsWith(entry->path().filename().string(), "step-")) {
        found.push_back(entry->path().string());
      }
    }
    return found;
  }

  // Waits until an epoch after `epoch` has a step; which one that is.
  int64_t NextEpoch(const std::string& job, int64_t epoch) const {
    int64_t next = epoch;
    EXPECT_TRUE(Eventually(seconds(60), [&] {
      const absl::StatusOr<std::vector<StepRow>> rows = cluster_->Metrics(job);
      next = rows.ok() && !rows->empty() ? rows->back().epoch : epoch;
      return next > epoch;
    })) << cluster_->Report(job);
    return next;
  }

  // Unfinished attempts that lie there now: `verify` must refuse each, or find it renamed to a
  // committed step. (All committed steps are verified when the job is over.)
  int CountRefused(const std::string& job) const {
    int refused = 0;
    for (const std::string& directory : StepDirectories(job)) {
      if (absl::StrContains(directory, ".tmp")) {
        const RunResult verify = cluster_->Ctl({"checkpoints", "verify", directory});
        refused += verify.exit_code != 0 ? 1 : 0;
        EXPECT_NE(verify.exit_code, 0) << directory << " is accepted";
      }
    }
    return refused;
  }

  std::unique_ptr<MiniCluster> cluster_;
};

TEST_F(TornCheckpointTest, KilledWritersNeverLeaveAStepThatVerifyAccepts) {
  const int64_t moments = EnvironmentNumber("RAVEL_MOMENTS", 4);
  const int64_t steps = 10 + 10 * moments;
  ASSERT_NO_FATAL_FAILURE(TrainAtThePaceOfCommits("whole", steps));
  const absl::StatusOr<std::map<int64_t, std::string>> good = cluster_->Checkpoints("whole");
  ASSERT_TRUE(good.ok()) << good.status();
  ASSERT_EQ(good->size(), static_cast<size_t>(steps)) << "every step is saved and kept";

  const unsigned seed = static_cast<unsigned>(EnvironmentNumber("RAVEL_SEED", 1));
  std::printf("seed %u\n", seed);
  std::mt19937 random(seed);
  // Each epoch waits before its third step, and again before its eighth: it is killed on its way
  // from one to the other, or there, however fast it is. So the job outlasts the kills.
  cluster_->HoldTrainersAt(8);
  cluster_->HoldTrainersAt(3);
  ASSERT_EQ(cluster_->Submit(Job("torn", steps)), absl::OkStatus());
  int64_t epoch = 0;
  int refused = 0;
  for (int64_t moment = 0; moment < moments; ++moment) {
    epoch = NextEpoch("torn", epoch);
    std::vector<pid_t> trainers;  // those of the epoch before are going
    ASSERT_TRUE(Eventually(seconds(60), [&] {
      trainers = cluster_->AllTrainers();
      return trainers.size() == 2;
    })) << cluster_->Report("torn");
    cluster_->LetTrainersGoAt(3);
    PauseBetweenLooks(milliseconds(random() % 60));  // the random moment itself
    ::kill(trainers[random() % trainers.size()], SIGKILL);
    cluster_->HoldTrainersAt(3);
    refused += CountRefused("torn");
  }
  cluster_->LetTrainersGo();
  ASSERT_EQ(cluster_->WaitForSuccess("torn", seconds(120)), absl::OkStatus());

  const absl::StatusOr<std::map<int64_t, std::string>> listed = cluster_->Checkpoints("torn");
  ASSERT_TRUE(listed.ok()) << listed.status();
  std::map<std::string, int64_t> committed;
  for (const auto& [step, path] : *listed) {
    committed[path] = step;
  }
  int accepted = 0;
  for (const std::string& directory : StepDirectories("torn")) {
    const RunResult verify = cluster_->Ctl({"checkpoints", "verify", directory});
    if (verify.exit_code != 0) {
      ++refused;
      EXPECT_FALSE(committed.contains(directory)) << directory << ": " << verify.out << verify.err;
      EXPECT_NE(verify.err + verify.out, "") << "a refusal says why";
      continue;
    }
    ++accepted;
    ASSERT_TRUE(committed.contains(directory)) << directory << " is accepted but not committed";
    const absl::StatusOr<std::string> digest = cluster_->StateDigest(directory);
    const absl::StatusOr<std::string> whole = cluster_->StateDigest(good->at(committed[directory]));
    ASSERT_TRUE(digest.ok() && whole.ok()) << digest.status() << whole.status();
    EXPECT_EQ(*digest, *whole) << directory;
  }
  EXPECT_EQ(static_cast<size_t>(accepted), committed.size());
  std::printf(
      "%ld kills: %d steps accepted, %d refused\n", static_cast<long>(moments), accepted, refused);
}

// Cuts, flips and removes: each is refused with the file's name, and the job resumes from the step
// before.
TEST_F(TornCheckpointTest, DamagedStepIsNamedAndThePreviousOneIsUsed) {
  ASSERT_EQ(cluster_->Submit(Job("whole", 8)), absl::OkStatus());
  ASSERT_EQ(cluster_->WaitForSuccess("whole", seconds(60)), absl::OkStatus());
  const absl::StatusOr<std::map<int64_t, std::string>> saved = cluster_->Checkpoints("whole");
  ASSERT_TRUE(saved.ok()) << saved.status();

  const std::string last = saved->at(8);
  std::string data_file;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(last)) {
    if (entry.path().extension() == ".safetensors") {
      data_file = entry.path().string();
    }
  }
  ASSERT_NE(data_file, "");
  const std::string bytes = ReadText(data_file);
  std::string flipped = bytes;
  flipped[flipped.size() - 100] = static_cast<char>(flipped[flipped.size() - 100] ^ 1);
  for (const std::string& damaged : {bytes.substr(0, bytes.size() - 1), flipped, std::string()}) {
    WriteText(data_file, damaged);
    const RunResult verify = cluster_->Ctl({"checkpoints", "verify", last});
    EXPECT_NE(verify.exit_code, 0) << damaged.size() << " bytes";
    EXPECT_TRUE(absl::StrContains(verify.out + verify.err,
                                  std::filesystem::path(data_file).filename().string()))
        << verify.out << verify.err;
  }
  WriteText(data_file, bytes);
  EXPECT_EQ(cluster_->Ctl({"checkpoints", "verify", last}).exit_code, 0);
}

}  // namespace
}  // namespace ravel::testing
