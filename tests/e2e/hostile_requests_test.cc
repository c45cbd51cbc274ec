// Requests that try to hold others up: paths that never open or answer, plans without end, a store
// that hangs. Commits go on, answers come, and the coordinator stops when it is told.

#include <algorithm>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_replace.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tests/testing/eventually.h"
#include "tests/testing/hung_mount.h"
#include "tests/testing/mini_cluster.h"
#include "tests/testing/required.h"

namespace ravel::testing {
namespace {

using std::chrono::seconds;
using SteadyClock = std::chrono::steady_clock;

// Between two commits of a job that commits every 0.1 s and more: most of the time, and at most. A
// coordinator that waits for a hostile request stands still for the 5 s of a look, or for ever.
constexpr seconds kUsualPause{2};
constexpr seconds kLongestPause{4};
// A coordinator that is told to stop gives calls 4 s and then ends without them, by its last resort
// at 4.5 s; one without that waits for the hostile requests, which do not end.
constexpr seconds kLongestStop{15};

class HostileRequestsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    absl::StatusOr<std::unique_ptr<MiniCluster>> started =
        MiniCluster::Start({}, kPatientDetection);
    ASSERT_TRUE(started.ok()) << started.status();
    cluster_ = std::move(*started);
    WriteTokens(Path("tokens.bin"), 20000, TinyJob().vocabulary);
  }

  std::string Path(const std::string& name) const { return cluster_->folder() + "/" + name; }

  TinyJob Job(const std::string& name) const {
    return {.name = name,
            .tokens_path = Path("tokens.bin"),
            .store = fast_.path() + "/store",
            .workers = 1,
            .steps = 1'000'000,
            .save_every_steps = 20,
            .keep_last = 3};
  }

  int64_t CommittedStep(const std::string& job) const {
    const absl::StatusOr<JobView> view = cluster_->Get(job);
    return view.ok() ? view->committed_step : -1;
  }

  // Some dry runs of a job file at once, while `then` runs.
  template <typename Then>
  void WhileDryRuns(const std::string& yaml, int count, Then then) {
    WriteText(Path("hostile.yaml"), yaml);
    for (int i = 0; i < count; ++i) {
      absl::StatusOr<std::unique_ptr<ChildProcess>> client =
          ChildProcess::Start({.arguments = {BinaryPath("ravelctl"),
                                             "--coordinator",
                                             cluster_->address(),
                                             "submit",
                                             "-f",
                                             Path("hostile.yaml"),
                                             "--dry-run=server"},
                               .error_path = Path(absl::StrCat("hostile-", i, ".err"))});
      ASSERT_TRUE(client.ok()) << client.status();
      clients_.push_back(std::move(*client));
    }
    then();
  }

  // Commits of a job go on, and nobody holds them up.
  void ExpectCommitsGoOn(const std::string& job) {
    int64_t last = CommittedStep(job);
    std::vector<SteadyClock::duration> pauses;
    for (int i = 0; i < 7; ++i) {
      const SteadyClock::time_point start = SteadyClock::now();
      const bool committed = Eventually(seconds(20), [&] { return CommittedStep(job) > last; });
      EXPECT_TRUE(committed) << "no commit after step " << last;
      pauses.push_back(SteadyClock::now() - start);
      last = CommittedStep(job);
    }
    std::sort(pauses.begin(), pauses.end());
    EXPECT_LE(pauses[pauses.size() / 2], kUsualPause);
    EXPECT_LE(pauses.back(), kLongestPause);
  }

  void ExpectStops() {
    cluster_->coordinator().Signal(SIGTERM);
    EXPECT_TRUE(cluster_->coordinator().Wait(kLongestStop).has_value());
  }

  // In memory where the machine has room for that: a save is two dozen fsyncs, and pauses between
  // commits are to tell how the coordinator fares, not the disk.
  const ScratchFolder fast_{std::filesystem::exists("/dev/shm") ? "/dev/shm" : ""};
  std::unique_ptr<MiniCluster> cluster_;
  std::vector<std::unique_ptr<ChildProcess>> clients_;
};

TEST_F(HostileRequestsTest, APathThatNeverOpensHoldsNobodyUp) {
  ASSERT_EQ(cluster_->StartWorkers(1, {{"RAVEL_FAULTS", "trainer.step@*:stall=5ms"}}),
            absl::OkStatus());
  ASSERT_EQ(cluster_->Submit(Job("good")), absl::OkStatus());
  ASSERT_TRUE(Eventually(seconds(60), [&] { return CommittedStep("good") >= 20; }));
  ASSERT_EQ(mkfifo(Path("fifo.bin").c_str(), 0600), 0);
  TinyJob hostile = Job("hostile");
  hostile.tokens_path = Path("fifo.bin");
  WhileDryRuns(ToYaml(hostile), 4, [&] {
    ExpectCommitsGoOn("good");
    ExpectStops();
  });
}

TEST_F(HostileRequestsTest, PlansWithoutEndHoldNobodyUp) {
  ASSERT_EQ(cluster_->StartWorkers(1, {{"RAVEL_FAULTS", "trainer.step@*:stall=5ms"}}),
            absl::OkStatus());
  ASSERT_EQ(cluster_->Submit(Job("good")), absl::OkStatus());
  ASSERT_TRUE(Eventually(seconds(60), [&] { return CommittedStep("good") >= 20; }));
  const std::string heavy =
      absl::StrReplaceAll(ToYaml(Job("heavy")),
                          {{"devices: {kind: cpu, count: 1}",
                            "devices: {kind: cpu, count: 4096}\n  elastic: {min: 1, max: 4096}"},
                           {"virtualRanks: 8", "virtualRanks: 4096"},
                           {"globalBatch: 8", "globalBatch: 4096"}});
  ASSERT_TRUE(absl::StrContains(heavy, "max: 4096"));
  WhileDryRuns(heavy, 4, [&] {
    ExpectCommitsGoOn("good");
    ExpectStops();
  });
}

// The store of two jobs hangs: another job's commits go on, and so do its restarts. Two jobs,
// because a pool of two threads would survive one.
TEST_F(HostileRequestsTest, AHungStoreHoldsNobodyElseUp) {
  ASSERT_EQ(cluster_->StartWorkers(3, {{"RAVEL_FAULTS", "trainer.step@*:stall=5ms"}}),
            absl::OkStatus());
  ASSERT_EQ(cluster_->Submit(Job("good")), absl::OkStatus());
  for (const char* name : {"bad", "worse"}) {
    TinyJob job = Job(name);
    job.store = Path("bad-store");
    ASSERT_EQ(cluster_->Submit(job), absl::OkStatus());
  }
  ASSERT_TRUE(Eventually(seconds(60), [&] {
    return CommittedStep("good") >= 20 && CommittedStep("bad") >= 20 &&
           CommittedStep("worse") >= 20;
  }));
  const HungMount hung(Path("bad-store"));
  if (!hung.mounted()) {
    SkipWithout("fuse", "a mount that hangs needs FUSE and the right to mount");
    return;
  }
  for (const pid_t trainer : cluster_->AllTrainers()) {
    ::kill(trainer, SIGKILL);
  }
  const int64_t before = CommittedStep("good");
  // The store hangs for as long as it is mounted: whatever waits for it never goes on.
  EXPECT_TRUE(Eventually(seconds(60), [&] { return CommittedStep("good") > before; }))
      << cluster_->Report("good");
  ExpectCommitsGoOn("good");
  ExpectStops();
}

// A mount that does not answer on a node: the job that names it is refused, by the field and the
// node, and nobody else notices.
TEST_F(HostileRequestsTest, AMountThatHangsIsNamedAndHoldsNobodyUp) {
  // The third look at a path is the hostile one's first.
  ASSERT_EQ(cluster_->StartWorkers(
                1, {{"RAVEL_FAULTS", "trainer.step@*:stall=5ms,path_look@3:stall=1h"}}),
            absl::OkStatus());
  ASSERT_EQ(cluster_->Submit(Job("good")), absl::OkStatus());
  ASSERT_TRUE(Eventually(seconds(60), [&] { return CommittedStep("good") >= 20; }));
  TinyJob hostile = Job("hostile");
  hostile.tokens_path = Path("mount/tokens.bin");
  std::filesystem::create_directories(Path("mount"));
  WriteTokens(hostile.tokens_path, 20000, hostile.vocabulary);
  WhileDryRuns(ToYaml(hostile), 1, [&] {
    ExpectCommitsGoOn("good");
    const SteadyClock::time_point start = SteadyClock::now();
    EXPECT_EQ(cluster_->Submit(Job("another")), absl::OkStatus());
    EXPECT_LE(SteadyClock::now() - start, seconds(5));
    EXPECT_TRUE(clients_.front()->Wait(seconds(20)).value_or(0) != 0);
    const std::string said = ReadText(Path("hostile-0.err"));
    EXPECT_TRUE(absl::StrContains(said, "spec.data.train[0].path")) << said;
    EXPECT_TRUE(absl::StrContains(said, "no answer within 5 s on node w0")) << said;
    // The mount is not tried again while the first look hangs in it; others are looked at.
    const RunResult again =
        cluster_->Ctl({"submit", "-f", Path("hostile.yaml"), "--dry-run=server"}, seconds(4));
    EXPECT_TRUE(absl::StrContains(again.err, "an earlier look at " + Path("mount"))) << again.err;
    EXPECT_EQ(cluster_->Submit(Job("third")), absl::OkStatus());
    ExpectStops();
  });
}

// In a cluster of many hosts the coordinator's has neither data nor models.
TEST_F(HostileRequestsTest, TheCoordinatorNeedsNoneOfTheFiles) {
  if (RunProgram({.arguments = {"/usr/bin/unshare", "--mount", "/bin/true"}},
                 cluster_->folder(),
                 seconds(20))
          .exit_code != 0) {
    SkipWithout("namespaces", "a file system of its own for the coordinator needs root");
    return;
  }
  std::filesystem::create_directories(Path("data/model"));
  WriteTokens(Path("data/tokens.bin"), 20000, TinyJob().vocabulary);
  WriteText(Path("data/tokens.bin.tokenizer.json"), R"({"model": {}})");
  WriteText(Path("data/model/config.json"),
            R"({"model_type": "llama", "vocab_size": 97, "hidden_size": 36,
                "intermediate_size": 52, "num_hidden_layers": 1, "num_attention_heads": 6,
                "num_key_value_heads": 2, "max_position_embeddings": 64})");
  WriteText(Path("data/model/model.safetensors"), "weights");
  ASSERT_EQ(cluster_->RestartCoordinatorWithout(Path("data")), absl::OkStatus());
  ASSERT_FALSE(std::filesystem::exists(
      absl::StrCat("/proc/", cluster_->coordinator_pid(), "/root", Path("data/tokens.bin"))));
  TinyJob from = Job("from");
  from.tokens_path = Path("data/tokens.bin");
  from.model_from = Path("data/model");
  WriteText(Path("from.yaml"), ToYaml(from));
  const std::vector<std::string> dry_run = {"submit", "-f", Path("from.yaml"), "--dry-run=server"};
  const RunResult nobody = cluster_->Ctl(dry_run);
  EXPECT_EQ(nobody.exit_code, 6) << nobody.out << nobody.err;
  EXPECT_TRUE(absl::StrContains(nobody.err, "no cpu worker is here to look at spec.model.from"))
      << nobody.err;

  ASSERT_EQ(cluster_->StartWorkers(1), absl::OkStatus());
  const RunResult accepted = cluster_->Ctl(dry_run);
  EXPECT_EQ(accepted.exit_code, 0) << accepted.err;
  TinyJob job = Job("remote");
  job.tokens_path = Path("data/tokens.bin");
  job.steps = 20;
  ASSERT_EQ(cluster_->Submit(job), absl::OkStatus());
  EXPECT_EQ(cluster_->WaitForSuccess("remote", seconds(60)), absl::OkStatus());
  const RunResult shown = cluster_->Ctl({"get", "remote", "-o", "yaml"});
  EXPECT_TRUE(absl::StrContains(shown.out, Path("data/tokens.bin.tokenizer.json"))) << shown.out;

  std::filesystem::resize_file(Path("data/tokens.bin"), 4001);
  job.name = "odd";
  WriteText(Path("odd.yaml"), ToYaml(job));
  const RunResult refused = cluster_->Ctl({"submit", "-f", Path("odd.yaml")});
  EXPECT_EQ(refused.exit_code, 2) << refused.out;
  EXPECT_TRUE(absl::StrContains(refused.err, "spec.data.train[0].path: expected a token file"))
      << refused.err;
}

TEST_F(HostileRequestsTest, WhatIsNoFileIsRefusedByName) {
  ASSERT_EQ(cluster_->StartWorkers(1), absl::OkStatus());
  const std::string good = ToYaml(Job("named"));
  for (const char* path : {"/dev/zero", "/proc/self/mem", "/proc/kmsg"}) {
    SCOPED_TRACE(path);
    const std::string yaml = absl::StrReplaceAll(good, {{Path("tokens.bin"), path}});
    ASSERT_NE(yaml, good);
    WriteText(Path("hostile.yaml"), yaml);
    const SteadyClock::time_point start = SteadyClock::now();
    const RunResult result =
        cluster_->Ctl({"submit", "-f", Path("hostile.yaml"), "--dry-run=server"}, seconds(20));
    EXPECT_NE(result.exit_code, 0) << result.out;
    EXPECT_TRUE(absl::StrContains(result.err, "spec.data.train[0].path")) << result.err;
    EXPECT_LT(SteadyClock::now() - start, seconds(5));
  }
}

}  // namespace
}  // namespace ravel::testing
