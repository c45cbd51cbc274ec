// Hosts that go away with a notice: what was trained is saved, in whatever phase the job is. Saves
// by steps or time are off, so that nothing but the save of the notice can have kept a step.

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <vector>

#include <absl/strings/str_cat.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/testing/eventually.h"
#include "tests/testing/mini_cluster.h"

namespace ravel::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using SteadyClock = std::chrono::steady_clock;
using ::testing::HasSubstr;

constexpr int64_t kNever = 100000000;
// From a host's notice until its power goes, and the part of it that the daemon gives to jobs. A
// notice is some 25 fsyncs: room for a busy disk, as what counts is that the save comes first.
constexpr seconds kNotice(60);
constexpr char kDrainLimit[] = "55s";

class DrainTest : public ::testing::Test {
 protected:
  void SetUp() override {
    absl::StatusOr<std::unique_ptr<MiniCluster>> started =
        MiniCluster::Start({}, kPatientDetection);
    ASSERT_TRUE(started.ok()) << started.status();
    cluster_ = std::move(*started);
    cluster_->SetWorkerFlags({"--drain-limit", kDrainLimit});
    WriteTokens(cluster_->folder() + "/tokens.bin", 100000, TinyJob().vocabulary);
    ASSERT_EQ(cluster_->StartWorkers(3), absl::OkStatus());
  }

  TinyJob Job(const std::string& name) const {
    return {.name = name,
            .tokens_path = cluster_->folder() + "/tokens.bin",
            .store = cluster_->folder() + "/store",
            .workers = 3,
            .sizes = {1, 2, 3},
            .steps = kNever,
            .global_batch = 16,
            .sequence_length = 128,
            .save_every_steps = kNever,
            .hidden = 96,
            .intermediate = 260};
  }

  // So many looks at the job: a moment of any phase, and no clock.
  void LetSomeTimePass(const std::string& job, int64_t looks) {
    for (int64_t look = 0; look < looks; ++look) {
      ASSERT_TRUE(cluster_->Get(job).ok());
    }
  }

  // Waits for the daemon's host to go: by itself, or by SIGKILL at the end of its notice, which is
  // a failure. Returns the seconds that it took.
  double SecondsToEnd(const std::string& worker) {
    const auto start = SteadyClock::now();
    const std::optional<int> exit = cluster_->Worker(worker).Wait(kNotice);
    if (!exit) {
      cluster_->Worker(worker).Kill();
    }
    EXPECT_EQ(exit, 0) << worker << " ends by itself within its notice\n"
                       << cluster_->Report("job");
    return std::chrono::duration<double>(SteadyClock::now() - start).count();
  }

  // Expects each step in one epoch, and all of them reported, unless an event says that reports
  // went with the node of rank 0. Adds the epochs to `lost` whose steps were not all saved.
  void ExpectNothingTrainedTwice(const std::string& job, std::set<int64_t>* lost = nullptr) {
    const absl::StatusOr<std::vector<StepRow>> rows = cluster_->Metrics(job, true);
    ASSERT_TRUE(rows.ok()) << rows.status();
    std::map<int64_t, std::vector<int64_t>> epochs;
    for (const StepRow& row : *rows) {
      epochs[row.step].push_back(row.epoch);
    }
    for (const auto& [step, of] : epochs) {
      EXPECT_EQ(of.size(), 1u) << "step " << step << " was trained in epochs " << of.front()
                               << " and " << of.back();
      if (of.size() > 1 && lost != nullptr) {
        lost->insert(of.front());
      }
    }
    ASSERT_FALSE(epochs.empty());
    EXPECT_EQ(epochs.begin()->first, 1);
    const bool told =
        cluster_->Ctl({"events", job}).out.find("StepReportsMissing") != std::string::npos;
    EXPECT_TRUE(told || epochs.rbegin()->first == static_cast<int64_t>(epochs.size()))
        << "a step is missing";
  }

  std::unique_ptr<MiniCluster> cluster_;
};

TEST_F(DrainTest, EveryNoticeSavesWhatWasTrained) {
  ASSERT_EQ(cluster_->Submit(Job("job")), absl::OkStatus());
  ASSERT_EQ(cluster_->WaitForStep("job", 1, seconds(60)), absl::OkStatus());
  const int64_t notices = EnvironmentNumber("RAVEL_NOTICES", 4);
  std::mt19937 random(7);
  double longest_s = 0;
  for (int64_t notice = 0; notice < notices; ++notice) {
    LetSomeTimePass("job", std::uniform_int_distribution<int64_t>(0, 40)(random));
    const std::vector<std::string> names = cluster_->worker_names();
    const std::string victim = names[random() % names.size()];
    const bool by_file = notice % 2 == 1;
    if (by_file) {
      std::ofstream(cluster_->NoticeFile(victim)) << "reclaimed in 60 s\nmore\n";
    } else {
      cluster_->Worker(victim).Signal(SIGTERM);
    }
    longest_s = std::max(longest_s, SecondsToEnd(victim));
    std::filesystem::remove(cluster_->NoticeFile(victim));
    ASSERT_EQ(cluster_->StartWorker(victim), absl::OkStatus());
  }
  const absl::StatusOr<JobView> last = cluster_->Get("job");
  ASSERT_TRUE(last.ok()) << last.status();
  ASSERT_EQ(cluster_->WaitForStep("job", last->step + 5, seconds(60)), absl::OkStatus());
  std::set<int64_t> lost;
  ExpectNothingTrainedTwice("job", &lost);
  // A job that was starting restarts, which is no failure of its own.
  const absl::StatusOr<std::vector<EventRow>> events = cluster_->Events("job");
  ASSERT_TRUE(events.ok()) << events.status();
  for (const EventRow& event : *events) {
    EXPECT_TRUE(event.type != "Recovering" || event.reason == "NodeDrain")
        << event.reason << ": " << event.message;
  }
  std::printf("%ld of %ld notices saved, at step %ld: longest way out %.2f s\n",
              static_cast<long>(notices) - static_cast<long>(lost.size()),
              static_cast<long>(notices),
              static_cast<long>(last->step),
              longest_s);
  EXPECT_EQ(cluster_->Ctl({"cancel", "job"}).exit_code, 0);
}

TEST_F(DrainTest, ANoticeWithoutACoordinatorSavesAllTheSame) {
  ASSERT_EQ(cluster_->Submit(Job("job")), absl::OkStatus());
  ASSERT_EQ(cluster_->WaitForStep("job", 5, seconds(60)), absl::OkStatus());
  cluster_->KillCoordinator();
  const std::string victim = cluster_->worker_names().back();
  cluster_->Worker(victim).Signal(SIGTERM);
  SecondsToEnd(victim);
  EXPECT_THAT(ReadText(cluster_->folder() + "/" + victim + ".log"),
              HasSubstr("asked to save and stop, without a coordinator"));
  ASSERT_EQ(cluster_->RestartCoordinator(), absl::OkStatus());
  ASSERT_TRUE(Eventually(seconds(60), [&] { return cluster_->Get("job")->committed_step >= 5; }))
      << cluster_->Report("job");
  const int64_t saved = cluster_->Get("job")->committed_step;
  ASSERT_EQ(cluster_->WaitForStep("job", saved + 3, seconds(60)), absl::OkStatus());
  ExpectNothingTrainedTwice("job");
  EXPECT_EQ(cluster_->Ctl({"cancel", "job"}).exit_code, 0);
}

TEST_F(DrainTest, ADaemonTakesNoWorkBesideItsNotice) {
  const std::string worker = "w1";
  std::ofstream(cluster_->NoticeFile(worker)) << "\x1b[2Jmaintenance\n";
  SecondsToEnd(worker);
  EXPECT_THAT(cluster_->Ctl({"nodes", "list"}).out, HasSubstr("maintenance"));
  // Its supervisor starts it again on the same host.
  ASSERT_EQ(cluster_->StartWorker(worker), absl::OkStatus());
  const std::string log = cluster_->folder() + "/" + worker + ".log";
  ASSERT_TRUE(Eventually(seconds(30), [&] {
    return ReadText(log).find("waits until it is gone") != std::string::npos;
  })) << ReadText(log);
  cluster_->Worker(worker).Signal(SIGTERM);
  SecondsToEnd(worker);  // SIGTERM ends the wait

  ASSERT_EQ(cluster_->StartWorker(worker), absl::OkStatus());
  std::filesystem::remove(cluster_->NoticeFile(worker));
  EXPECT_EQ(cluster_->WaitForReadyNodes(3), absl::OkStatus());
}

}  // namespace
}  // namespace ravel::testing
