// Slow input and output delays no other request: long histories, readers that do not read, heavy
// and hostile checks of job files, a full disk.

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include <absl/strings/str_cat.h>
#include <gtest/gtest.h>
#include <sys/mount.h>
#include <sys/stat.h>

#include "common/json.h"
#include "tests/testing/eventually.h"
#include "tests/testing/mini_cluster.h"
#include "tests/testing/required.h"

namespace ravel::testing {
namespace {

using std::chrono::seconds;
using SteadyClock = std::chrono::steady_clock;

constexpr int64_t kMiB = 1 << 20;
// Far more than a save or an exit takes, and half of the time for which the heavy dry runs below
// would hold them up.
constexpr seconds kUndisturbed{10};

class ControlIoTest : public ::testing::Test {
 protected:
  void SetUp() override {
    absl::StatusOr<std::unique_ptr<MiniCluster>> started =
        MiniCluster::Start({}, kPatientDetection);
    ASSERT_TRUE(started.ok()) << started.status();
    cluster_ = std::move(*started);
    WriteTokens(cluster_->folder() + "/tokens.bin", 100000, TinyJob().vocabulary);
  }
  TinyJob Job(const std::string& name) const {
    return {.name = name,
            .tokens_path = cluster_->folder() + "/tokens.bin",
            .store = cluster_->folder() + "/store",
            .workers = 1,
            .steps = 1'000'000,
            .save_every_steps = 50,
            .keep_last = 3};
  }
  // A job that waits for devices, with a history of that many steps.
  void WriteHistory(const TinyJob& job, int64_t steps) {
    ASSERT_EQ(cluster_->Submit(job), absl::OkStatus());
    const RunResult got = cluster_->Ctl({"get", job.name, "-o", "json"});
    const absl::StatusOr<json::Value> document = json::Parse(got.out);
    ASSERT_TRUE(document.ok()) << got.out << got.err;
    const json::Value* uid = document->Find("uid");
    ASSERT_NE(uid, nullptr) << got.out;
    std::ofstream file(
        absl::StrCat(cluster_->folder(), "/state/metrics/", uid->AsString(), ".jsonl"));
    for (int64_t step = 1; step <= steps; ++step) {
      file << "{\"step\":" << step << ",\"loss\":1.5,\"loss_bits\":\"3fc00000\",\"epoch\":1}\n";
    }
  }
  // A save that is asked for: the time until it is committed, and told.
  double SecondsToSave(const std::string& job) const {
    const auto start = SteadyClock::now();
    const RunResult saved = cluster_->Ctl({"checkpoint", job, "--wait", "--timeout", "50s"});
    EXPECT_EQ(saved.exit_code, 0) << saved.err;
    return std::chrono::duration<double>(SteadyClock::now() - start).count();
  }
  std::unique_ptr<ChildProcess> StartCtl(std::vector<std::string> arguments,
                                         const std::string& output) {
    ProcessOptions options;
    options.arguments = {BinaryPath("ravelctl"), "--coordinator", cluster_->address()};
    options.arguments.insert(options.arguments.end(), arguments.begin(), arguments.end());
    options.output_path = output;
    options.error_path = output + ".err";
    absl::StatusOr<std::unique_ptr<ChildProcess>> started = ChildProcess::Start(options);
    EXPECT_TRUE(started.ok()) << started.status();
    return started.ok() ? std::move(*started) : nullptr;
  }
  static int64_t LinesOf(const std::string& path) {
    std::ifstream file(path);
    std::string line;
    int64_t lines = 0;
    while (std::getline(file, line)) {
      ++lines;
    }
    return lines;
  }

  // In memory where the machine has room for that: for saves that tell nothing about the disk.
  const ScratchFolder fast_{std::filesystem::exists("/dev/shm") ? "/dev/shm" : ""};
  std::unique_ptr<MiniCluster> cluster_;
};

TEST_F(ControlIoTest, ALongHistoryStreamsWholeByRangeAndToReadersThatDoNotRead) {
  const int64_t steps = EnvironmentNumber("RAVEL_METRIC_STEPS", 120'000);
  WriteHistory(Job("long"), steps);
  const int64_t before = PssBytes(cluster_->coordinator_pid());
  // Readers that are stopped before they have read anything.
  std::vector<std::unique_ptr<ChildProcess>> stopped;
  for (int i = 0; i < 4; ++i) {
    stopped.push_back(StartCtl({"metrics", "long", "-f", "-o", "jsonl"},
                               absl::StrCat(cluster_->folder(), "/stopped-", i)));
    ASSERT_NE(stopped.back(), nullptr);
    const std::string path = absl::StrCat(cluster_->folder(), "/stopped-", i);
    ASSERT_TRUE(Eventually(seconds(60), [&] { return !ReadText(path).empty(); }));
    stopped.back()->Signal(SIGSTOP);
  }
  const std::string whole = cluster_->folder() + "/whole";
  const std::unique_ptr<ChildProcess> all = StartCtl({"metrics", "long", "-o", "jsonl"}, whole);
  ASSERT_EQ(all->Wait(seconds(200)), 0) << ReadText(whole + ".err");
  EXPECT_EQ(LinesOf(whole), steps);

  const auto start = SteadyClock::now();
  const RunResult range = cluster_->Ctl({"metrics",
                                         "long",
                                         "-o",
                                         "jsonl",
                                         "--from",
                                         absl::StrCat(steps / 2),
                                         "--to",
                                         absl::StrCat(steps / 2 + 9)});
  const RunResult last = cluster_->Ctl({"metrics", "long", "-o", "jsonl", "--last", "3"});
  const RunResult every =
      cluster_->Ctl({"metrics", "long", "-o", "jsonl", "--every", absl::StrCat(steps / 4)});
  const double took = std::chrono::duration<double>(SteadyClock::now() - start).count();
  EXPECT_EQ(std::count(range.out.begin(), range.out.end(), '\n'), 10) << range.err;
  EXPECT_NE(range.out.find(absl::StrCat("\"step\":", steps / 2, ",")), std::string::npos);
  EXPECT_EQ(std::count(last.out.begin(), last.out.end(), '\n'), 3) << last.err;
  EXPECT_NE(last.out.find(absl::StrCat("\"step\":", steps, ",")), std::string::npos);
  EXPECT_EQ(std::count(every.out.begin(), every.out.end(), '\n'), 4) << every.err;
  const int64_t grown = PssBytes(cluster_->coordinator_pid()) - before;
  EXPECT_LT(grown, 32 * kMiB);
  std::printf("%ld steps streamed, memory grew by %.1f MiB, three ranges in %.2f s\n",
              static_cast<long>(steps),
              static_cast<double>(grown) / kMiB,
              took);
}

TEST_F(ControlIoTest, HeavyAndHostileDryRunsLeaveOthersAndTheExitUndisturbed) {
  ASSERT_EQ(cluster_->StartWorkers(1), absl::OkStatus());
  TinyJob well = Job("well");
  well.store = fast_.path() + "/store";
  ASSERT_EQ(cluster_->Submit(well), absl::OkStatus());
  ASSERT_EQ(cluster_->WaitForStep("well", 5, seconds(60)), absl::OkStatus());
  const double undisturbed_s = SecondsToSave("well");

  TinyJob fifo = Job("fifo");
  fifo.tokens_path = cluster_->folder() + "/fifo.bin";
  ASSERT_EQ(mkfifo(fifo.tokens_path.c_str(), 0600), 0);
  TinyJob heavy = Job("heavy");
  heavy.workers = 4096;
  heavy.virtual_ranks = 4096;
  heavy.global_batch = 4096;
  for (int64_t size = 1; size <= 4096; ++size) {
    heavy.sizes.push_back(size);
  }
  std::vector<std::unique_ptr<ChildProcess>> dry_runs;
  for (const TinyJob& job : {fifo, fifo, heavy, heavy, heavy}) {
    const std::string path = absl::StrCat(cluster_->folder(), "/dry-", dry_runs.size(), ".yaml");
    WriteText(path, ToYaml(job));
    dry_runs.push_back(StartCtl({"submit", "-f", path, "--dry-run=server"}, path + ".out"));
  }
  // The FIFO is refused at once, and told.
  const std::optional<int> refused = dry_runs[0]->Wait(seconds(60));
  EXPECT_TRUE(refused.has_value() && *refused != 0);
  EXPECT_NE(ReadText(cluster_->folder() + "/dry-0.yaml.out.err").find("regular file"),
            std::string::npos)
      << ReadText(cluster_->folder() + "/dry-0.yaml.out.err");

  const double commit_s = SecondsToSave("well");
  EXPECT_LT(commit_s, std::chrono::duration<double>(kUndisturbed).count());
  const absl::StatusOr<JobView> before = cluster_->Get("well");
  ASSERT_TRUE(before.ok()) << before.status();
  ::kill(cluster_->AllTrainers().at(0), SIGKILL);
  const auto killed = SteadyClock::now();
  EXPECT_TRUE(Eventually(seconds(60), [&] {
    const absl::StatusOr<JobView> now = cluster_->Get("well");
    return now.ok() && now->epoch > before->epoch && now->state == "RUNNING";
  }));
  const double recovery_s = std::chrono::duration<double>(SteadyClock::now() - killed).count();

  const auto stopping = SteadyClock::now();
  EXPECT_EQ(cluster_->StopCoordinator(kUndisturbed), 0);
  std::printf(
      "with two FIFOs and three heavy dry runs: commit %.2f s (%.2f s before), recovery %.2f s, "
      "exit %.2f s\n",
      commit_s,
      undisturbed_s,
      recovery_s,
      std::chrono::duration<double>(SteadyClock::now() - stopping).count());
}

TEST_F(ControlIoTest, AFullStateDiskKeepsJobsTrainingAndCommittingAndSaysSo) {
  const std::string state = cluster_->folder() + "/state";
  cluster_->KillCoordinator();
  if (mount("tmpfs", state.c_str(), "tmpfs", 0, "size=24m") != 0) {
    SkipWithout("mounts", "a small disk needs the right to mount");
    return;
  }
  const std::unique_ptr<const std::string, void (*)(const std::string*)> mounted(
      &state, [](const std::string* path) { umount2(path->c_str(), MNT_DETACH); });
  ASSERT_EQ(cluster_->RestartCoordinator(), absl::OkStatus());
  ASSERT_EQ(cluster_->StartWorkers(1), absl::OkStatus());
  ASSERT_EQ(cluster_->Submit(Job("job")), absl::OkStatus());
  ASSERT_EQ(cluster_->WaitForStep("job", 5, seconds(60)), absl::OkStatus());
  ASSERT_TRUE(Eventually(seconds(60), [&] { return std::filesystem::exists(state + "/ballast"); }));
  // Stopped meanwhile: what it does about a full disk makes room, and that is not to be filled too.
  cluster_->coordinator().Signal(SIGSTOP);
  {
    std::ofstream fill(state + "/fill", std::ios::binary);
    const std::string block(4096, 'x');
    while (fill.write(block.data(), 4096).flush()) {
    }
  }
  cluster_->coordinator().Signal(SIGCONT);
  // Saves go on, from the room that the ballast leaves.
  const absl::StatusOr<JobView> full = cluster_->Get("job");
  ASSERT_TRUE(full.ok()) << full.status();
  EXPECT_TRUE(Eventually(seconds(120), [&] {
    const absl::StatusOr<JobView> now = cluster_->Get("job");
    return now.ok() && now->committed_step >= full->committed_step + 150 && now->state == "RUNNING";
  })) << cluster_->Report("job");
  EXPECT_NE(ReadText(cluster_->folder() + "/coordinator.log").find("the disk is full"),
            std::string::npos);
  const absl::Status refused = cluster_->Submit(Job("another"));
  EXPECT_NE(std::string(refused.message()).find("full"), std::string::npos) << refused;
  // With room again, so are new jobs.
  std::filesystem::remove(state + "/fill");
  EXPECT_TRUE(Eventually(seconds(60), [&] { return cluster_->Submit(Job("another")).ok(); }));
}

}  // namespace
}  // namespace ravel::testing
