// Variables and secrets of jobs, with the real programs: a secret's text reaches the environment of
// trainers and nothing else; a job that no node serves is refused, one that some node serves goes
// there.

#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_split.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include "common/crypto.h"
#include "tests/testing/eventually.h"
#include "tests/testing/mini_cluster.h"

namespace ravel::testing {
namespace {

using std::chrono::seconds;
using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::Not;
namespace fs = std::filesystem;

class JobEnvironmentE2eTest : public ::testing::Test {
 protected:
  void SetUp() override {
    absl::StatusOr<std::unique_ptr<MiniCluster>> started =
        MiniCluster::Start({}, kPatientDetection);
    ASSERT_TRUE(started.ok()) << started.status();
    cluster_ = *std::move(started);
    fs::create_directories(At("data"));
    fs::create_directories(At("stores"));
    WriteTokens(At("data/tokens.bin"), 5000, TinyJob().vocabulary);
    ASSERT_EQ(chmod(secrets_.path().c_str(), 0700), 0);
    Put("default/team/key", text_);
    Put("other/team/key", other_);
    cluster_->SetWorkerFlags({"--read-root",
                              At("data"),
                              "--write-root",
                              At("stores"),
                              "--secrets-root",
                              secrets_.path(),
                              "--job-environment",
                              "NCCL_*,MY_*"});
    ASSERT_EQ(cluster_->StartWorkers(1, cluster_->HoldFaults()), absl::OkStatus());
  }
  std::string At(const std::string& rest) const { return cluster_->folder() + "/" + rest; }
  void Put(const std::string& name, const std::string& text) const {
    const std::string path = secrets_.path() + "/" + name;
    fs::create_directories(fs::path(path).parent_path());
    WriteText(path, text);
    ASSERT_EQ(chmod(path.c_str(), 0600), 0);
  }
  TinyJob Job(const std::string& name, const std::string& environment) const {
    return {.name = name,
            .tokens_path = At("data/tokens.bin"),
            .store = At("stores"),
            .workers = 1,
            .steps = 6,
            .save_every_steps = 3,
            .more_spec = absl::StrCat("  environment: [", environment, "]\n")};
  }
  // Files beneath the cluster's folder that hold the text: the coordinator's, the daemons' and the
  // store.
  std::vector<std::string> FilesWith(const std::string& text) const {
    std::vector<std::string> found;
    for (const fs::directory_entry& entry : EntriesUnder(cluster_->folder())) {
      if (entry.is_regular_file() && absl::StrContains(ReadText(entry.path()), text)) {
        found.push_back(entry.path());
      }
    }
    return found;
  }
  // All that ravelctl tells of the job.
  std::string Told(const std::string& job) const {
    std::string all;
    const std::vector<std::vector<std::string>> asks = {{"describe", job},
                                                        {"get", job, "-o", "json"},
                                                        {"events", job, "-o", "jsonl"},
                                                        {"logs", job},
                                                        {"metrics", job, "-o", "jsonl"}};
    for (const std::vector<std::string>& ask : asks) {
      const RunResult result = cluster_->Ctl(ask);
      absl::StrAppend(&all, result.out, result.err);
    }
    return all;
  }
  // ravelctl's words about a job that no node runs.
  std::string Refused(const TinyJob& job, bool dry_run = false) const {
    WriteText(At("job.yaml"), ToYaml(job));
    std::vector<std::string> words = {"submit", "-f", At("job.yaml")};
    if (dry_run) {
      words.emplace_back("--dry-run=server");
    }
    const RunResult refused = cluster_->Ctl(words);
    EXPECT_EQ(refused.exit_code, 2) << refused.out;
    return refused.err;
  }

  const std::string text_ = absl::StrCat("text-", RandomHex(16));
  const std::string other_ = absl::StrCat("other-", RandomHex(16));
  ScratchFolder secrets_;
  std::unique_ptr<MiniCluster> cluster_;
};

TEST_F(JobEnvironmentE2eTest, ASecretReachesTheTrainersEnvironmentAndNothingElse) {
  cluster_->HoldTrainersAt(3);
  ASSERT_EQ(cluster_->Submit(Job("one",
                                 "{name: NCCL_DEBUG, value: INFO}, "
                                 "{name: MY_KEY, secret: team/key}")),
            absl::OkStatus());
  ASSERT_EQ(cluster_->WaitForStep("one", 2, seconds(60)), absl::OkStatus());
  const std::vector<pid_t> trainers = cluster_->AllTrainers();
  ASSERT_EQ(trainers.size(), 1u);
  const std::string all = ReadText(absl::StrCat("/proc/", trainers[0], "/environ"));
  const std::vector<std::string> variables = absl::StrSplit(all, '\0');
  EXPECT_THAT(variables, Contains("NCCL_DEBUG=INFO"));
  EXPECT_THAT(variables, Contains("MY_KEY=" + text_));
  const std::string daemon =
      ReadText(absl::StrCat("/proc/", cluster_->Worker("w0").pid(), "/environ"));
  EXPECT_THAT(daemon, Not(HasSubstr(text_)));
  cluster_->LetTrainersGo();
  ASSERT_EQ(cluster_->WaitForSuccess("one", seconds(60)), absl::OkStatus());
  EXPECT_THAT(FilesWith(text_), ::testing::IsEmpty());
  EXPECT_THAT(FilesWith("team/key"), Not(::testing::IsEmpty())) << "the reference is stored";
  const std::string told = Told("one");
  EXPECT_THAT(told, Not(HasSubstr(text_)));
  EXPECT_THAT(told, HasSubstr("team/key"));
}

TEST_F(JobEnvironmentE2eTest, WhatNoNodeAllowsOrHasIsRefusedByFieldAndNode) {
  const TinyJob absent = Job("absent", "{name: MY_KEY, secret: team/none}");
  EXPECT_THAT(Refused(absent),
              ::testing::AllOf(HasSubstr("spec.environment[0].secret: node w0: "),
                               HasSubstr("team/none of namespace default")));
  EXPECT_THAT(Refused(absent, true), HasSubstr("spec.environment[0].secret: node w0: "));
  EXPECT_THAT(Refused(Job("name", "{name: THEIR_KEY, value: x}")),
              HasSubstr("spec.environment[0].name: node w0: THEIR_KEY"));
  fs::create_symlink("../../other/team/key", secrets_.path() + "/default/team/link");
  EXPECT_THAT(Refused(Job("link", "{name: MY_KEY, secret: team/link}")), HasSubstr("leads out of"));
  TinyJob network = Job("network", "");
  network.more_spec = "  communication: {network: fast}\n";
  EXPECT_THAT(Refused(network),
              HasSubstr("spec.communication.network: node w0: this node has no network 'fast'"));
  EXPECT_THAT(Refused(Job("up", "{name: MY_KEY, secret: ../other/team/key}")),
              HasSubstr("spec.environment[0].secret"));
  const RunResult list = cluster_->Ctl({"get", "-o", "json"});
  EXPECT_THAT(list.out, Not(HasSubstr("MY_KEY"))) << "nothing was accepted";
  EXPECT_THAT(FilesWith(text_), ::testing::IsEmpty());
  EXPECT_THAT(FilesWith(other_), ::testing::IsEmpty());
}

TEST_F(JobEnvironmentE2eTest, ASecretThatGoesBeforeTheLaunchEndsTheJobByFieldAndNode) {
  cluster_->HoldTrainersAt(3);
  ASSERT_EQ(cluster_->Submit(Job("first", "")), absl::OkStatus());
  ASSERT_EQ(cluster_->WaitForStep("first", 2, seconds(60)), absl::OkStatus());
  ASSERT_EQ(cluster_->Submit(Job("second", "{name: MY_KEY, secret: team/key}")), absl::OkStatus());
  fs::remove(secrets_.path() + "/default/team/key");
  cluster_->LetTrainersGo();
  const absl::StatusOr<JobView> end = cluster_->WaitForEnd("second", seconds(60));
  ASSERT_TRUE(end.ok()) << end.status();
  EXPECT_EQ(end->state, "FAILED") << cluster_->Report("second");
  EXPECT_EQ(end->reason, "EnvironmentRefused");
  EXPECT_EQ(end->step, 0);
  EXPECT_THAT(end->message,
              ::testing::AllOf(HasSubstr("node w0"),
                               HasSubstr("environment[0].secret"),
                               HasSubstr("team/key of namespace default")));
}

TEST_F(JobEnvironmentE2eTest, AJobWaitsForANodeThatServesIt) {
  cluster_->SetWorkerFlags({"--read-root",
                            At("data"),
                            "--write-root",
                            At("stores"),
                            "--secrets-root",
                            secrets_.path(),
                            "--network",
                            "fast=lo"});
  ASSERT_EQ(cluster_->StartWorkers(2, cluster_->HoldFaults()), absl::OkStatus());
  cluster_->HoldTrainersAt(3);
  TinyJob job = Job("first", "");
  job.more_spec = "  communication: {network: fast}\n";
  WriteText(At("job.yaml"), ToYaml(job));
  const RunResult submitted = cluster_->Ctl({"submit", "-f", At("job.yaml")});
  ASSERT_EQ(submitted.exit_code, 0) << submitted.err;
  EXPECT_THAT(submitted.out + submitted.err,
              HasSubstr("spec.communication.network: node w0: this node has no network 'fast'"));
  ASSERT_EQ(cluster_->WaitForStep("first", 2, seconds(60)), absl::OkStatus());
  EXPECT_EQ(cluster_->Trainers("w1").size(), 1u);
  job.name = "second";  // while w0 is free
  ASSERT_EQ(cluster_->Submit(job), absl::OkStatus());
  cluster_->LetTrainersGo();
  ASSERT_EQ(cluster_->WaitForSuccess("second", seconds(60)), absl::OkStatus());
  const absl::StatusOr<JobView> end = cluster_->Get("second");
  ASSERT_TRUE(end.ok()) << end.status();
  EXPECT_EQ(end->restarts, 0) << cluster_->Report("second");
  EXPECT_THAT(cluster_->Ctl({"events", "second"}).out, Not(HasSubstr("NodeAvoided")));
}

}  // namespace
}  // namespace ravel::testing
