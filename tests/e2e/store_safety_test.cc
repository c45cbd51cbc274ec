// The checkpoint store goes away, is emptied, replaced, damaged or shared: progress never falls by
// itself.

#include <chrono>
#include <csignal>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_split.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/testing/eventually.h"
#include "tests/testing/mini_cluster.h"

namespace ravel::testing {
namespace {

using std::chrono::seconds;
using ::testing::HasSubstr;

class StoreSafetyTest : public ::testing::Test {
 protected:
  void SetUp() override { cluster_ = StartCluster(); }
  static std::unique_ptr<MiniCluster> StartCluster() {
    absl::StatusOr<std::unique_ptr<MiniCluster>> started =
        MiniCluster::Start({}, kPatientDetection);
    EXPECT_TRUE(started.ok()) << started.status();
    EXPECT_EQ((*started)->StartWorkers(1, (*started)->HoldFaults()), absl::OkStatus());
    return std::move(*started);
  }
  // Runs until it is cancelled; a step takes milliseconds.
  TinyJob Job(const std::string& name) const {
    const std::string tokens = cluster_->folder() + "/tokens.bin";
    if (!std::filesystem::exists(tokens)) {
      WriteTokens(tokens, 20000, TinyJob().vocabulary);
    }
    return {.name = name,
            .tokens_path = tokens,
            .store = cluster_->folder() + "/store",
            .workers = 1,
            .steps = 1'000'000,
            .global_batch = 2,
            .virtual_ranks = 2,
            .save_every_steps = 20,
            .keep_last = 3};
  }
  std::string Folder(const std::string& job) const { return cluster_->folder() + "/store/" + job; }
  void WaitForCommit(const std::string& job, int64_t step) {
    ASSERT_TRUE(Eventually(seconds(60), [&] {
      const absl::StatusOr<JobView> view = cluster_->Get(job);
      return view.ok() && view->committed_step >= step;
    })) << cluster_->Report(job);
  }
  bool Reaches(const std::string& job, const std::string& state, const std::string& reason) {
    return Eventually(seconds(60), [&] {
      const absl::StatusOr<JobView> view = cluster_->Get(job);
      return view.ok() && view->state == state && (reason.empty() || view->reason == reason);
    });
  }
  void KillTrainers() {
    for (const pid_t trainer : cluster_->AllTrainers()) {
      ::kill(trainer, SIGKILL);
    }
  }
  // Lines of the job's events that hold `text`.
  std::vector<std::string> EventLines(const std::string& job, const std::string& text) {
    std::vector<std::string> found;
    for (const absl::string_view line :
         absl::StrSplit(cluster_->Ctl({"events", job}).out, '\n', absl::SkipEmpty())) {
      if (absl::StrContains(line, text)) {
        found.emplace_back(line);
      }
    }
    return found;
  }
  // Directories of steps, but for attempts.
  static int64_t StepsIn(const std::string& folder) {
    int64_t steps = 0;
    for (const auto& entry : std::filesystem::directory_iterator(folder)) {
      const std::string name = entry.path().filename().string();
      steps += absl::StartsWith(name, "step-") && !absl::EndsWith(name, ".tmp") ? 1 : 0;
    }
    return steps;
  }
  // Flips a bit in every manifest; what is not committed yet goes.
  void DamageEveryStep(const std::string& job) {
    std::vector<std::string> folders;
    for (const auto& entry : std::filesystem::directory_iterator(Folder(job))) {
      folders.push_back(entry.path().string());
    }
    for (const std::string& folder : folders) {
      if (absl::EndsWith(folder, ".tmp")) {
        std::filesystem::remove_all(folder);
      } else if (std::filesystem::exists(folder + "/manifest.pb")) {
        std::string bytes = ReadText(folder + "/manifest.pb");
        ASSERT_GT(bytes.size(), 100U) << folder;
        bytes[60] = static_cast<char>(bytes[60] ^ 1);
        WriteText(folder + "/manifest.pb", bytes);
      }
    }
  }
  int64_t Committed(const std::string& job) {
    const absl::StatusOr<JobView> view = cluster_->Get(job);
    return view.ok() ? view->committed_step : -1;
  }

  std::unique_ptr<MiniCluster> cluster_;
};

TEST_F(StoreSafetyTest, AJobNeverStartsFromNothingBecauseItsStoreIsAway) {
  ASSERT_EQ(cluster_->Submit(Job("a")), absl::OkStatus());
  WaitForCommit("a", 40);
  const std::string away = Folder("a") + ".away";
  std::filesystem::rename(Folder("a"), away);  // unmounted
  KillTrainers();
  ASSERT_TRUE(Reaches("a", "RECOVERING", "StoreUnavailable")) << cluster_->Report("a");
  const int64_t committed = Committed("a");
  EXPECT_GE(committed, 40);
  std::filesystem::create_directory(Folder("a"));  // mounted, but emptied
  PauseBetweenLooks(seconds(2));
  WriteText(Folder("a") + "/OWNER",
            "{\"format\": \"ravel-checkpoint-owner\", \"version\": 1, \"cluster\": \"x\", "
            "\"job\": \"y\", \"name\": \"default/a\"}\n");  // replaced by another's
  EXPECT_TRUE(Eventually(seconds(60), [&] {
    return absl::StrContains(cluster_->Get("a")->message, "of another cluster");
  })) << cluster_->Report("a");
  EXPECT_TRUE(Reaches("a", "RECOVERING", "StoreUnavailable"));
  std::filesystem::remove_all(Folder("a"));
  std::filesystem::rename(away, Folder("a"));  // back
  ASSERT_TRUE(Reaches("a", "RUNNING", "")) << cluster_->Report("a");
  WaitForCommit("a", committed + 1);
  EXPECT_EQ(EventLines("a", "waits for the store").size(), 1U) << cluster_->Report("a");
  EXPECT_EQ(EventLines("a", "initial weights").size(), 1U) << cluster_->Report("a");
  EXPECT_EQ(EventLines("a", "RolledBack").size(), 0U);
}

TEST_F(StoreSafetyTest, ADamagedOnlyStepFailsTheJobByName) {
  TinyJob job = Job("a");
  job.keep_last = 1;
  ASSERT_EQ(cluster_->Submit(job), absl::OkStatus());
  WaitForCommit("a", 40);
  cluster_->KillWorker("w0");
  ASSERT_TRUE(Reaches("a", "QUEUED", "")) << cluster_->Report("a");
  const int64_t step = Committed("a");
  ASSERT_TRUE(Eventually(seconds(60), [&] { return StepsIn(Folder("a")) == 1; }))
      << "steps before the last one go";
  DamageEveryStep("a");
  ASSERT_EQ(cluster_->StartWorkers(1), absl::OkStatus());
  ASSERT_TRUE(Reaches("a", "FAILED", "NoGoodCheckpoint")) << cluster_->Report("a");
  EXPECT_THAT(cluster_->Get("a")->message,
              HasSubstr(absl::StrCat("step ", step, ": manifest.pb: checksum")));
  EXPECT_EQ(EventLines("a", "initial weights").size(), 1U);
}

TEST_F(StoreSafetyTest, TheSecondClusterOnAFolderIsRefusedAndTheFirstIsNotDisturbed) {
  ASSERT_EQ(cluster_->Submit(Job("a")), absl::OkStatus());
  WaitForCommit("a", 20);
  const std::unique_ptr<MiniCluster> other = StartCluster();
  const absl::Status refused = other->Submit(Job("a"));
  EXPECT_FALSE(refused.ok());
  EXPECT_THAT(std::string(refused.message()), HasSubstr("of another cluster"));
  WaitForCommit("a", Committed("a") + 60);
  EXPECT_EQ(EventLines("a", "CheckpointFailed").size(), 0U) << cluster_->Report("a");
}

TEST_F(StoreSafetyTest, WhatAWaitingJobBeginsFromIsNotDeleted) {
  TinyJob source = Job("a");
  source.keep_last = 1;
  ASSERT_EQ(cluster_->Submit(source), absl::OkStatus());
  WaitForCommit("a", 20);
  cluster_->KillWorker("w0");
  ASSERT_TRUE(Reaches("a", "QUEUED", ""));
  const int64_t step = Committed("a");
  TinyJob next = Job("b");
  next.resume_from = cluster_->Get("a")->committed_path;
  ASSERT_EQ(cluster_->Submit(next), absl::OkStatus());
  ASSERT_EQ(cluster_->StartWorkers(1), absl::OkStatus());
  WaitForCommit("a", step + 60);  // on the only device, so that b waits
  EXPECT_TRUE(std::filesystem::exists(next.resume_from + "/COMMIT"));
  EXPECT_EQ(cluster_->Ctl({"cancel", "a", "--wait"}).exit_code, 0);
  WaitForCommit("b", step + 20);
  EXPECT_EQ(EventLines("b", next.resume_from).size(), 1U) << cluster_->Report("b");
  EXPECT_TRUE(Eventually(seconds(60), [&] {
    return std::filesystem::is_empty(Folder("a") + "/pins");
  })) << "its own commit lets it go";
}

TEST_F(StoreSafetyTest, RollbackGoesOnFromTheStepThatIsNamed) {
  TinyJob job = Job("a");
  job.keep_last = 1000;
  cluster_->HoldTrainersAt(70);  // and, of the epoch after it, past its first save
  ASSERT_EQ(cluster_->Submit(job), absl::OkStatus());
  WaitForCommit("a", 60);
  const RunResult wrong = cluster_->Ctl({"rollback", "a", "--to", "step=33"});
  EXPECT_NE(wrong.exit_code, 0) << "not a committed step";
  const RunResult back = cluster_->Ctl({"rollback", "a", "--to", "step=20", "--reason", "spike"});
  ASSERT_EQ(back.exit_code, 0) << back.err;
  WaitForCommit("a", 40);
  EXPECT_EQ(EventLines("a", "RolledBack").size(), 1U) << cluster_->Report("a");
  EXPECT_THAT(EventLines("a", "RolledBack").front(), HasSubstr("to 20: spike"));
  EXPECT_EQ(EventLines("a", "/step-0000000020").size(), 2U) << "committed, then launched from";
  EXPECT_THAT(cluster_->Ctl({"checkpoints", "list", "a"}).out, HasSubstr("rolled back"));
  EXPECT_EQ(EventLines("a", "initial weights").size(), 1U);
}

}  // namespace
}  // namespace ravel::testing
