// The coordinator is away for seconds (RAVEL_OUTAGE_S; minutes with --all) while three workers
// train: no step is lost, nothing restarts, the epoch stays, and what was saved meanwhile is
// committed.

#include <algorithm>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <memory>
#include <set>
#include <string>
#include <system_error>
#include <vector>

#include <absl/strings/numbers.h>
#include <absl/strings/str_cat.h>
#include <gtest/gtest.h>

#include "tests/testing/eventually.h"
#include "tests/testing/mini_cluster.h"

namespace ravel::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using SteadyClock = std::chrono::steady_clock;

constexpr int64_t kStepMs = 25;  // about: a stall in each step
constexpr int64_t kSaveEvery = 20;

class CoordinatorOutageTest : public ::testing::Test {
 protected:
  void SetUp() override {
    absl::StatusOr<std::unique_ptr<MiniCluster>> started =
        MiniCluster::Start({}, kPatientDetection);
    ASSERT_TRUE(started.ok()) << started.status();
    cluster_ = std::move(*started);
    WriteTokens(cluster_->folder() + "/tokens.bin", 100000, TinyJob().vocabulary);
  }

  TinyJob Job(const std::string& name, int64_t steps) const {
    return {.name = name,
            .tokens_path = cluster_->folder() + "/tokens.bin",
            .store = cluster_->folder() + "/store",
            .workers = 3,
            .steps = steps,
            .save_every_steps = kSaveEvery};
  }

  std::vector<StepRow> Undisturbed(int64_t steps) {
    EXPECT_EQ(cluster_->StartWorkers(3), absl::OkStatus());
    EXPECT_EQ(cluster_->Submit(Job("undisturbed", steps)), absl::OkStatus());
    EXPECT_EQ(cluster_->WaitForSuccess("undisturbed", seconds(120)), absl::OkStatus());
    const absl::StatusOr<std::vector<StepRow>> rows = cluster_->Metrics("undisturbed");
    for (const std::string& name : cluster_->worker_names()) {
      cluster_->KillWorker(name);
    }
    return rows.ok() ? *rows : std::vector<StepRow>();
  }

  // Three workers whose steps take a while, and whose trainers can be held.
  absl::Status StartSlowWorkers() {
    return cluster_->StartWorkers(
        3, cluster_->HoldFaults(absl::StrCat("trainer.step@*:stall=", kStepMs, "ms")));
  }

  // Step of the newest save in the job's folder, committed or not: how far training went, however
  // slow the machine is.
  int64_t NewestSave(const std::string& job) const {
    int64_t newest = -1;
    for (const auto& entry :
         std::filesystem::directory_iterator(absl::StrCat(cluster_->folder(), "/store/", job))) {
      const std::string name = entry.path().filename();
      int64_t step = 0;
      if (name.starts_with("step-") && absl::SimpleAtoi(name.substr(5, 10), &step)) {
        newest = std::max(newest, step);
      }
    }
    return newest;
  }

  std::unique_ptr<MiniCluster> cluster_;
};

TEST_F(CoordinatorOutageTest, TrainingNeverNotices) {
  const seconds outage(EnvironmentNumber("RAVEL_OUTAGE_S", 4));
  const int64_t outage_steps = outage.count() * 1000 / kStepMs;
  const int64_t steps = outage_steps * 3 / 2 + 120;
  const std::vector<StepRow> expected = Undisturbed(steps);
  ASSERT_EQ(expected.size(), static_cast<size_t>(steps));

  ASSERT_EQ(StartSlowWorkers(), absl::OkStatus());
  // Held until the coordinator is gone, and again before the job is over.
  cluster_->HoldTrainersAt(kSaveEvery + 2);
  cluster_->HoldTrainersAt(steps - kSaveEvery);
  ASSERT_EQ(cluster_->Submit(Job("interrupted", steps)), absl::OkStatus());
  ASSERT_EQ(cluster_->WaitForStep("interrupted", kSaveEvery + 1, seconds(60)), absl::OkStatus());
  const std::vector<pid_t> trainers = cluster_->AllTrainers();
  ASSERT_EQ(trainers.size(), 3u);
  cluster_->KillCoordinator();
  cluster_->LetTrainersGoAt(kSaveEvery + 2);
  PauseBetweenLooks(outage);  // time away is what is tested
  EXPECT_TRUE(Eventually(seconds(120), [&] { return NewestSave("interrupted") > 3 * kSaveEvery; }))
      << "training stood still while nobody was there";
  EXPECT_EQ(cluster_->AllTrainers(), trainers) << "a trainer ended because nobody was there";
  const int64_t newest = NewestSave("interrupted");
  ASSERT_EQ(cluster_->RestartCoordinator(), absl::OkStatus());

  // The newest attempt may not be whole; the one before is there soon after.
  const int64_t reached = newest - kSaveEvery;
  ASSERT_EQ(cluster_->WaitForStep("interrupted", reached, seconds(60)), absl::OkStatus());
  const bool committed = Eventually(seconds(60), [&] {
    const absl::StatusOr<JobView> view = cluster_->Get("interrupted");
    return view.ok() && view->committed_step >= reached / kSaveEvery * kSaveEvery;
  });
  EXPECT_TRUE(committed) << "saves of the outage were not committed\n"
                         << cluster_->Report("interrupted");
  EXPECT_EQ(cluster_->AllTrainers(), trainers) << "trainers were restarted";

  cluster_->LetTrainersGo();
  ASSERT_EQ(cluster_->WaitForSuccess("interrupted", 3 * outage + seconds(120)), absl::OkStatus());
  const absl::StatusOr<std::vector<StepRow>> history = cluster_->Metrics("interrupted");
  ASSERT_TRUE(history.ok()) << history.status();
  EXPECT_EQ(FirstDifference(*history, expected), "");
  for (const StepRow& row : *history) {
    ASSERT_EQ(row.epoch, 1) << "step " << row.step;
  }
  const absl::StatusOr<JobView> view = cluster_->Get("interrupted");
  ASSERT_TRUE(view.ok()) << view.status();
  EXPECT_EQ(view->restarts, 0);
  EXPECT_EQ(view->committed_step, steps);
}

// A disk takes the database; its backup is older than what runs. The daemons do not listen to it
// until a person says that no other coordinator runs.
TEST_F(CoordinatorOutageTest, ARestoredBackupTakesOverWhatRuns) {
  constexpr int64_t kSteps = 120;
  const std::vector<StepRow> expected = Undisturbed(kSteps);
  ASSERT_EQ(StartSlowWorkers(), absl::OkStatus());
  for (const int64_t step : {30, 85}) {
    cluster_->HoldTrainersAt(step + 1);
  }
  cluster_->KillCoordinator();
  cluster_->SetCoordinatorFlags({"--backup-every", "1s"});
  ASSERT_EQ(cluster_->RestartCoordinator(), absl::OkStatus());
  ASSERT_EQ(cluster_->Submit(Job("restored", kSteps)), absl::OkStatus());
  ASSERT_EQ(cluster_->WaitForStep("restored", 30, seconds(60)), absl::OkStatus());
  ASSERT_TRUE(Eventually(seconds(30), [&] {
    const absl::StatusOr<JobView> view = cluster_->Get("restored");
    return view.ok() && view->committed_step == kSaveEvery;
  }));
  const std::string state = cluster_->folder() + "/state";
  const auto backups = [&] {
    std::set<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(state + "/backup")) {
      if (entry.path().extension() == ".db") {
        names.insert(entry.path());
      }
    }
    return names;
  };
  const std::set<std::string> before = backups();
  // The second that is new was begun after the commit.
  const std::string kept = cluster_->folder() + "/kept.db";
  ASSERT_TRUE(Eventually(seconds(60), [&] {
    const std::set<std::string> now = backups();
    std::error_code gone;  // of two that are kept the older goes each second
    return now.size() == 2 && !before.contains(*now.begin()) &&
           std::filesystem::copy_file(*now.rbegin(), kept, gone);
  }));
  cluster_->SetCoordinatorFlags({});
  cluster_->LetTrainersGoAt(31);
  for (int restart = 0; restart < 2; ++restart) {  // later terms, which the backup does not know
    cluster_->KillCoordinator();
    ASSERT_EQ(cluster_->RestartCoordinator(), absl::OkStatus());
    ASSERT_EQ(cluster_->WaitForStep("restored", restart == 0 ? 31 : 85, seconds(60)),
              absl::OkStatus());
  }
  cluster_->KillCoordinator();
  for (const char* name : {"/ravel.db", "/ravel.db-wal", "/ravel.db-shm"}) {
    std::filesystem::remove(state + name);
  }
  std::filesystem::copy_file(kept, state + "/ravel.db");
  ASSERT_EQ(cluster_->RestartCoordinator(), absl::OkStatus());
  const std::string word = "start it once with --raise-term ";
  int64_t term = 0;
  EXPECT_TRUE(Eventually(seconds(30), [&] {
    const std::string log = ReadText(cluster_->folder() + "/coordinator.log");
    const size_t at = log.rfind(word);
    return at != std::string::npos &&
           absl::SimpleAtoi(log.substr(at + word.size(), log.find('"', at) - at - word.size()),
                            &term);
  }));
  cluster_->KillCoordinator();
  cluster_->SetCoordinatorFlags({"--raise-term", absl::StrCat(term)});
  ASSERT_EQ(cluster_->RestartCoordinator(), absl::OkStatus());
  cluster_->LetTrainersGo();
  ASSERT_EQ(cluster_->WaitForSuccess("restored", seconds(120)), absl::OkStatus())
      << cluster_->Report("restored");
  const absl::StatusOr<std::vector<StepRow>> history = cluster_->Metrics("restored");
  ASSERT_TRUE(history.ok()) << history.status();
  EXPECT_EQ(FirstDifference(*history, expected), "");
  EXPECT_EQ(history->back().epoch, 1) << "the trainers went on";
}

// SIGTERM, a new program, the same folder: an upgrade.
TEST_F(CoordinatorOutageTest, AnUpgradeIsARestart) {
  constexpr int64_t kSteps = 160;
  const std::vector<StepRow> expected = Undisturbed(kSteps);
  ASSERT_EQ(StartSlowWorkers(), absl::OkStatus());
  for (const int64_t step : {25, 60, 95}) {
    cluster_->HoldTrainersAt(step + 1);
  }
  ASSERT_EQ(cluster_->Submit(Job("upgraded", kSteps)), absl::OkStatus());
  for (const int64_t step : {25, 60, 95}) {
    ASSERT_EQ(cluster_->WaitForStep("upgraded", step, seconds(60)), absl::OkStatus());
    const SteadyClock::time_point start = SteadyClock::now();
    cluster_->coordinator().Signal(SIGTERM);
    ASSERT_TRUE(cluster_->coordinator().Wait(seconds(10)).has_value());
    EXPECT_LT(SteadyClock::now() - start, seconds(5));
    cluster_->LetTrainersGoAt(step + 1);
    ASSERT_EQ(cluster_->RestartCoordinator(), absl::OkStatus());
  }
  ASSERT_EQ(cluster_->WaitForSuccess("upgraded", seconds(60)), absl::OkStatus());
  const absl::StatusOr<std::vector<StepRow>> history = cluster_->Metrics("upgraded");
  ASSERT_TRUE(history.ok()) << history.status();
  EXPECT_EQ(FirstDifference(*history, expected), "");
  EXPECT_EQ(history->back().epoch, 1);
}

}  // namespace
}  // namespace ravel::testing
