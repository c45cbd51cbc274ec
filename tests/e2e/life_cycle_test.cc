// A job and all that it left: submitted, done, deleted, and submitted again under the same name.
// Also the modes of private files, and addresses that are refused.

#include <chrono>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include "tests/testing/eventually.h"
#include "tests/testing/mini_cluster.h"

namespace ravel::testing {
namespace {

namespace fs = std::filesystem;
using std::chrono::seconds;

class LifeCycleTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    absl::StatusOr<std::unique_ptr<MiniCluster>> started = MiniCluster::Start();
    ASSERT_TRUE(started.ok()) << started.status();
    cluster_ = std::move(*started).release();
    ASSERT_EQ(cluster_->StartWorkers(2), absl::OkStatus());
    WriteTokens(Path("tokens.bin"), 5000, TinyJob().vocabulary);
  }
  static void TearDownTestSuite() {
    delete cluster_;
    cluster_ = nullptr;
  }
  static std::string Path(const std::string& name) { return cluster_->folder() + "/" + name; }
  static TinyJob Job(const std::string& name) {
    return {.name = name, .tokens_path = Path("tokens.bin"), .store = Path("store"), .steps = 6};
  }
  static mode_t ModeOf(const fs::path& path) {
    struct stat facts = {};
    EXPECT_EQ(lstat(path.c_str(), &facts), 0) << path;
    return facts.st_mode & 07777;
  }
  // Folders below `root` whose name is this job's uid.
  static int Traces(const std::string& root, const std::string& uid) {
    int found = 0;
    for (const fs::directory_entry& entry : EntriesUnder(root)) {
      found += absl::StrContains(entry.path().filename().string(), uid) ? 1 : 0;
    }
    return found;
  }

  static MiniCluster* cluster_;
};

MiniCluster* LifeCycleTest::cluster_ = nullptr;

TEST_F(LifeCycleTest, ADeletedJobLeavesItsNameAndNothingElse) {
  ASSERT_EQ(cluster_->Submit(Job("again")), absl::OkStatus());
  ASSERT_EQ(cluster_->WaitForSuccess("again", seconds(60)), absl::OkStatus());
  const RunResult shown = cluster_->Ctl({"get", "again", "-o", "json"});
  const absl::StatusOr<json::Value> document = json::Parse(shown.out);
  ASSERT_TRUE(document.ok()) << shown.out;
  const std::string uid = document->Find("uid")->AsString();
  EXPECT_TRUE(Eventually(seconds(30), [&] { return Traces(cluster_->folder(), uid) > 2; }))
      << "metrics here, logs here and on nodes";

  const RunResult deleted = cluster_->Ctl({"delete", "again", "--checkpoints"});
  EXPECT_EQ(deleted.exit_code, 0) << deleted.out << deleted.err;
  EXPECT_EQ(cluster_->Ctl({"get", "again"}).exit_code, 3);
  EXPECT_EQ(cluster_->Ctl({"delete", "again"}).exit_code, 3);
  EXPECT_TRUE(Eventually(seconds(60), [&] { return Traces(cluster_->folder(), uid) == 0; }))
      << Traces(cluster_->folder(), uid) << " of " << uid;
  for (const auto& entry : fs::directory_iterator(Path("store/again"))) {
    EXPECT_FALSE(absl::StrContains(entry.path().filename().string(), "step-")) << entry.path();
  }

  ASSERT_EQ(cluster_->Submit(Job("again")), absl::OkStatus());
  ASSERT_EQ(cluster_->WaitForSuccess("again", seconds(60)), absl::OkStatus());
  const auto metrics = cluster_->Metrics("again");
  ASSERT_TRUE(metrics.ok()) << metrics.status();
  EXPECT_EQ(metrics->size(), 6u);  // from the first step on
}

// The folders are as large after many jobs as after a few.
TEST_F(LifeCycleTest, JobsThatCameAndWentLeaveFoldersAsTheyWere) {
  struct Size {
    int64_t files = 0;
    int64_t bytes = 0;
  };
  const auto size_of = [](const std::string& folder) {
    Size size;
    for (const fs::directory_entry& entry : EntriesUnder(folder)) {
      // The journal is left out: its rows count once they are in the database.
      const bool journal = absl::StrContains(entry.path().filename().string(), "ravel.db-");
      std::error_code gone;
      size.files += journal ? 0 : 1;
      size.bytes += !journal && entry.is_regular_file(gone)
                        ? static_cast<int64_t>(fs::file_size(entry.path(), gone))
                        : 0;
    }
    return size;
  };
  // Files of jobs, here and on a node: those of a deleted job go some time after it.
  const auto kept = [] {
    return EntriesUnder(Path("w0/logs")).size() + EntriesUnder(Path("state/logs")).size() +
           EntriesUnder(Path("state/metrics")).size();
  };
  const auto others = kept();  // of jobs that stay
  Size state;
  Size node;
  for (int i = 0; i < 10; ++i) {
    TinyJob job = Job(absl::StrCat("short-", i));
    job.steps = 400;  // of metrics alone 120 KB
    job.save_every_steps = 200;
    ASSERT_EQ(cluster_->Submit(job), absl::OkStatus());
    ASSERT_EQ(cluster_->WaitForSuccess(job.name, seconds(60)), absl::OkStatus());
    ASSERT_EQ(cluster_->Ctl({"delete", job.name, "--checkpoints"}).exit_code, 0);
    if (i == 3) {
      ASSERT_TRUE(Eventually(seconds(60), [&] { return kept() <= others; })) << kept();
      state = size_of(Path("state"));
      node = size_of(Path("w0"));
    }
  }
  ASSERT_TRUE(Eventually(seconds(60), [&] { return kept() <= others; })) << kept();
  EXPECT_LE(size_of(Path("w0")).files, node.files);
  EXPECT_LE(size_of(Path("w0")).bytes, node.bytes + 4096);
  EXPECT_LE(size_of(Path("state")).files, state.files);
  EXPECT_LE(size_of(Path("state")).bytes, state.bytes + (256 << 10));
}

TEST_F(LifeCycleTest, AJobThatRunsIsDeletedOnlyByForce) {
  TinyJob job = Job("endless");
  job.steps = 1'000'000;
  job.save_every_steps = 100'000;
  ASSERT_EQ(cluster_->Submit(job), absl::OkStatus());
  ASSERT_EQ(cluster_->WaitForStep("endless", 3, seconds(60)), absl::OkStatus());
  const RunResult refused = cluster_->Ctl({"delete", "endless"});
  EXPECT_EQ(refused.exit_code, 4) << refused.err;
  EXPECT_TRUE(absl::StrContains(refused.err, "RUNNING")) << refused.err;
  EXPECT_EQ(cluster_->Ctl({"delete", "endless", "--force"}).exit_code, 0);
  EXPECT_TRUE(cluster_->AllTrainers().empty());
}

TEST_F(LifeCycleTest, NobodyElseReadsStateCheckpointsOrLogs) {
  ASSERT_EQ(cluster_->Submit(Job("private")), absl::OkStatus());
  ASSERT_EQ(cluster_->WaitForSuccess("private", seconds(60)), absl::OkStatus());
  EXPECT_EQ(ModeOf(Path("state")), mode_t{0700});
  EXPECT_EQ(ModeOf(Path("state/ravel.db")), mode_t{0600});
  for (const std::string& folder : {Path("state"), Path("store"), Path("w0")}) {
    if (!fs::exists(folder)) {
      continue;
    }
    for (const fs::directory_entry& entry : EntriesUnder(folder)) {
      struct stat facts = {};
      if (lstat(entry.path().c_str(), &facts) == 0) {  // others come and go
        EXPECT_EQ(facts.st_mode & 0027, mode_t{0}) << entry.path();
      }
    }
  }
}

TEST_F(LifeCycleTest, AnAddressIsLoopbackOnlyIfItIs) {
  const auto run = [](std::vector<std::string> arguments) {
    arguments.front() = BinaryPath(arguments.front());
    return RunProgram({.arguments = std::move(arguments)}, cluster_->folder(), seconds(20));
  };
  const std::string trick = "127.0.0.1.example.invalid:7070";
  const RunResult ctl = run({"ravelctl", "--coordinator", trick, "list"});
  EXPECT_EQ(ctl.exit_code, 2) << ctl.err;
  const RunResult worker = run({"ravel-worker",
                                "--dev-loopback",
                                "--coordinator",
                                trick,
                                "--node-id",
                                "x",
                                "--work-dir",
                                Path("x")});
  EXPECT_EQ(worker.exit_code, 93) << worker.err;
  const RunResult coordinator = run(
      {"ravel-coordinator", "--dev-loopback", "--listen", trick, "--state-dir", Path("state4")});
  EXPECT_EQ(coordinator.exit_code, 2) << coordinator.err;
  for (const RunResult& result : {ctl, worker, coordinator}) {
    EXPECT_TRUE(absl::StrContains(result.err, trick)) << result.err;
  }
}

TEST_F(LifeCycleTest, HostileTextIsRefusedAndNotRepeated) {
  const RunResult reason = cluster_->Ctl({"cancel", "nobody", "--reason", "\x1b]0;owned\a\x1b[2J"});
  EXPECT_EQ(reason.exit_code, 2);
  EXPECT_TRUE(absl::StrContains(reason.err, "reason: ")) << reason.err;
  const RunResult name = cluster_->Ctl({"get", "a\x1b[2J"});
  EXPECT_EQ(name.exit_code, 2);
  EXPECT_FALSE(absl::StrContains(name.err, "\x1b")) << name.err;
  // 120 files that are not there: each is named.
  TinyJob job = Job("scattered");
  std::string files;
  for (int i = 0; i < 120; ++i) {
    absl::StrAppend(&files, i == 0 ? "" : ", ", "{path: ", Path("a-corpus/part-"), i, "}");
  }
  std::string text = ToYaml(job);
  const size_t at = text.find("{path:");
  ASSERT_NE(at, std::string::npos) << text;
  text.replace(at, text.find('}', at) + 1 - at, files);
  WriteText(Path("scattered.yaml"), text);
  const RunResult missing = cluster_->Ctl({"submit", "-f", Path("scattered.yaml")});
  EXPECT_EQ(missing.exit_code, 2) << missing.out << missing.err;
  for (int i = 0; i < 120; ++i) {
    EXPECT_TRUE(absl::StrContains(missing.err, absl::StrCat("train[", i, "]")))
        << i << ": " << missing.err;
  }
}

}  // namespace
}  // namespace ravel::testing
