// Two coordinators on copies of one state, each with workers of its own, and one store: as when a
// backup is restored while the old one still runs, or one that was believed dead comes back. Each
// step has one COMMIT, which never changes; what is there is whole; the one that loses says why.

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <iterator>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/testing/eventually.h"
#include "tests/testing/mini_cluster.h"
#include "tests/testing/required.h"
#include "tests/testing/s3_server.h"
#include "tests/testing/store_process.h"

namespace ravel::testing {
namespace {

using std::chrono::seconds;
using ::testing::HasSubstr;

constexpr int64_t kLastStep = 30;
constexpr int64_t kSaveEvery = 5;
constexpr int64_t kKept = 3;

class TwoCoordinatorsTest : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    if (GetParam() == "s3") {
      absl::StatusOr<std::unique_ptr<S3Server>> server = S3Server::Start();
      if (absl::IsNotFound(server.status())) {
        SkipWithout("moto", server.status().message());
        return;
      }
      ASSERT_TRUE(server.ok()) << server.status();
      server_ = *std::move(server);
      server_->UseHere();
    }
    // A node that is silent for less is not lost, which would begin an epoch too many; each of nine
    // cases waits twice for that time, until the nodes of the copied state are lost.
    absl::StatusOr<std::unique_ptr<MiniCluster>> started = MiniCluster::Start({}, "2s");
    ASSERT_TRUE(started.ok()) << started.status();
    old_ = std::move(*started);
    if (GetParam() == "ravel") {
      store_ = std::make_unique<StoreProcess>(
          StorePlace{.folder = old_->folder() + "/server", .flags = {"--dev-loopback"}});
      ASSERT_EQ(store_->Start(), absl::OkStatus());
    }
    WriteTokens(old_->folder() + "/tokens.bin", 20000, TinyJob().vocabulary);
    ASSERT_EQ(old_->StartWorkers(2, old_->HoldFaults()), absl::OkStatus());
  }
  void TearDown() override {
    if (HasFailure()) {
      for (const auto* cluster : {&old_, &next_}) {
        ADD_FAILURE() << (*cluster == nullptr ? "none" : (*cluster)->Report("job"));
      }
    }
  }
  std::string Store() const {
    return GetParam() == "s3"      ? "s3://bucket/team"
           : GetParam() == "ravel" ? store_->Url("team")
                                   : old_->folder() + "/store";
  }
  // The job has committed its first step and is held before it has made step `held`.
  void TrainTo(int64_t held) {
    old_->HoldTrainersAt(held);
    ASSERT_EQ(old_->Submit({.name = "job",
                            .tokens_path = old_->folder() + "/tokens.bin",
                            .store = Store(),
                            .workers = 2,
                            .steps = kLastStep,
                            .save_every_steps = kSaveEvery,
                            .keep_last = kKept}),
              absl::OkStatus());
    ASSERT_EQ(old_->WaitForStep("job", held - 1, seconds(60)), absl::OkStatus());
    ASSERT_TRUE(
        Eventually(seconds(60), [&] { return old_->Get("job")->committed_step == kSaveEvery; }));
  }
  // A second coordinator with two workers, whose trainers wait before their step `held`.
  void StartNext(int64_t held) {
    absl::StatusOr<std::unique_ptr<MiniCluster>> started = MiniCluster::StartCopyOf(*old_);
    ASSERT_TRUE(started.ok()) << started.status();
    next_ = std::move(*started);
    if (held > 0) {
      next_->HoldTrainersAt(held);
    }
    for (const char* name : {"v0", "v1"}) {
      ASSERT_EQ(next_->StartWorker(name, next_->HoldFaults()), absl::OkStatus());
    }
  }
  // Commits by their step, as ravelctl reads them from the store.
  std::map<int64_t, std::string> Commits(MiniCluster& cluster) const {
    std::map<int64_t, std::string> commits;
    for (int64_t step = kSaveEvery; step <= kLastStep; step += kSaveEvery) {
      const RunResult shown = cluster.Ctl({"checkpoints", "show", Url(step), "-o", "json"});
      if (shown.exit_code == 0) {
        commits[step] = shown.out;
      }
    }
    return commits;
  }
  std::string Url(int64_t step) const {
    return absl::StrCat(Store(), "/job/step-00000000", step < 10 ? "0" : "", step);
  }
  // Each is whole, or was deleted since because newer ones are kept.
  void ExpectWhole(MiniCluster& cluster, const std::map<int64_t, std::string>& commits) const {
    for (const auto& [step, unused] : commits) {
      EXPECT_TRUE(Eventually(
          seconds(30),
          [&] {
            const std::string said = cluster.Ctl({"checkpoints", "verify", Url(step)}).out;
            return absl::StrContains(said, ": ok (deep)") || !Commits(cluster).contains(step);
          }))
          << "step " << step << ": " << cluster.Ctl({"checkpoints", "verify", Url(step)}).out;
    }
  }
  // Both have ended; each step that is there is what it was when it was seen first.
  void AwaitBoth() {
    std::map<int64_t, std::string> seen;
    const bool ended = Eventually(seconds(120), [&] {
      for (const auto& [step, commit] : Commits(*old_)) {
        EXPECT_EQ(seen.emplace(step, commit).first->second, commit) << "step " << step;
      }
      return old_->Get("job")->Terminal() && next_->Get("job")->Terminal();
    });
    ASSERT_TRUE(ended);
    ExpectNewest(1);
    ExpectWhole(*old_, Commits(*old_));
  }
  // So many of the newest steps are there.
  std::map<int64_t, std::string> ExpectNewest(int64_t count) const {
    std::map<int64_t, std::string> commits = Commits(*old_);
    for (int64_t back = 0; back < count; ++back) {
      EXPECT_TRUE(commits.contains(kLastStep - back * kSaveEvery))
          << back << " saves before the last";
    }
    return commits;
  }

  // So many of the newest steps are there, or made room for a newer one before they were committed,
  // as a coordinator says: of two that race on a busy machine one may be steps ahead. A save that
  // gave up on a store which failed each time is told, too, and is no step that was lost.
  void ExpectNewestOrOvertaken(int64_t count) const {
    const std::map<int64_t, std::string> commits = ExpectNewest(1);
    for (int64_t back = 1; back < count; ++back) {
      const int64_t step = kLastStep - back * kSaveEvery;
      EXPECT_TRUE(commits.contains(step) || SaysWhy(*old_, step) || SaysWhy(*next_, step))
          << "step " << step << " is gone, and nobody says why";
    }
  }
  static bool SaysWhy(const MiniCluster& cluster, int64_t step) {
    const absl::StatusOr<std::vector<EventRow>> events = cluster.Events("job");
    return events.ok() && std::any_of(events->begin(), events->end(), [&](const EventRow& event) {
             return event.step == step &&
                    (absl::StrContains(event.message, "because a newer checkpoint is kept") ||
                     absl::StrContains(event.message, ": HTTP ") ||            // after the last try
                     absl::StrContains(event.message, "RAVEL_S3_ENDPOINT)"));  // without an answer
           });
  }

  std::unique_ptr<S3Server> server_;
  std::unique_ptr<MiniCluster> old_, next_;
  std::unique_ptr<StoreProcess> store_;
};

class TwoRacingTest : public TwoCoordinatorsTest {};
class TwoTwinsTest : public TwoCoordinatorsTest {};

TEST_P(TwoCoordinatorsTest, OneThatWasBelievedDeadChangesNoStep) {
  ASSERT_NO_FATAL_FAILURE(TrainTo(8));
  old_->coordinator().Signal(SIGSTOP);
  ASSERT_NO_FATAL_FAILURE(StartNext(0));
  ASSERT_EQ(next_->WaitForSuccess("job", seconds(90)), absl::OkStatus());
  const std::map<int64_t, std::string> commits = ExpectNewest(kKept);
  old_->coordinator().Signal(SIGCONT);
  old_->LetTrainersGo();
  const std::string refused = "is committed already, by epoch 2";
  const std::string fenced = "epoch 1 is over";
  ASSERT_TRUE(Eventually(seconds(90), [&] {
    const std::string events = old_->Ctl({"events", "job"}).out;
    return absl::StrContains(events, refused) || absl::StrContains(events, fenced);
  }));
  ASSERT_TRUE(Eventually(seconds(120), [&] { return old_->Get("job")->Terminal(); }));
  const std::map<int64_t, std::string> after = Commits(*next_);
  for (int64_t back = 0; back < kKept; ++back) {
    const int64_t step = kLastStep - back * kSaveEvery;
    EXPECT_EQ(after.at(step), commits.at(step)) << step;
  }
  ExpectWhole(*next_, after);
}

TEST_P(TwoRacingTest, OfTwoEpochsThatRaceOneCommitsAStep) {
  ASSERT_NO_FATAL_FAILURE(TrainTo(10));
  old_->coordinator().Signal(SIGSTOP);
  ASSERT_NO_FATAL_FAILURE(StartNext(5));     // it begins after step 5
  ASSERT_TRUE(Eventually(seconds(60), [&] {  // it trains, and earlier epochs are fenced off
    const absl::StatusOr<JobView> view = next_->Get("job");
    return view.ok() && view->epoch == 2 && view->state == "RUNNING";
  }));
  old_->coordinator().Signal(SIGCONT);
  old_->LetTrainersGo();
  next_->LetTrainersGo();
  ASSERT_NO_FATAL_FAILURE(AwaitBoth());
  ExpectNewestOrOvertaken(kKept);
}

// The successor may commit, or remove, saves that the old one has not committed yet.
TEST_P(TwoCoordinatorsTest, OneTakesOverWhileTheOtherGoesOn) {
  ASSERT_NO_FATAL_FAILURE(TrainTo(10));
  old_->coordinator().Signal(SIGSTOP);
  ASSERT_NO_FATAL_FAILURE(StartNext(0));
  old_->coordinator().Signal(SIGCONT);
  old_->LetTrainersGo();
  ASSERT_NO_FATAL_FAILURE(AwaitBoth());
}

// Both begin epoch 2 from the same state; only their nodes differ.
TEST_P(TwoTwinsTest, OfTwoTwinsThatRaceOneCommitsAStep) {
  ASSERT_NO_FATAL_FAILURE(TrainTo(8));
  old_->KillCoordinator();
  for (const std::string& name : old_->worker_names()) {
    old_->KillWorker(name);
  }
  old_->LetTrainersGo();
  old_->HoldTrainersAt(5);
  ASSERT_NO_FATAL_FAILURE(StartNext(5));
  ASSERT_EQ(old_->RestartCoordinator(), absl::OkStatus());
  for (const char* name : {"w2", "w3"}) {
    ASSERT_EQ(old_->StartWorker(name, old_->HoldFaults()), absl::OkStatus());
  }
  for (MiniCluster* cluster : {old_.get(), next_.get()}) {
    ASSERT_EQ(cluster->WaitForStep("job", 9, seconds(60)), absl::OkStatus());
    EXPECT_EQ(cluster->Get("job")->epoch, 2);
  }
  old_->LetTrainersGo();
  next_->LetTrainersGo();
  ASSERT_NO_FATAL_FAILURE(AwaitBoth());
  ExpectNewestOrOvertaken(kKept);
}

std::string NameOf(const ::testing::TestParamInfo<std::string>& each) {
  return each.param;
}

INSTANTIATE_TEST_SUITE_P(Stores, TwoCoordinatorsTest, ::testing::Values("file", "ravel"), NameOf);
INSTANTIATE_TEST_SUITE_P(Stores, TwoTwinsTest, ::testing::Values("file", "ravel", "s3"), NameOf);
// On S3, whose requests fail in turns, a race takes half a minute. Twins race there always.
INSTANTIATE_TEST_SUITE_P(Stores,
                         TwoRacingTest,
                         ::testing::ValuesIn(std::getenv("RAVEL_ALL") == nullptr
                                                 ? std::vector<std::string>{"file", "ravel"}
                                                 : std::vector<std::string>{"file", "ravel", "s3"}),
                         NameOf);

}  // namespace
}  // namespace ravel::testing
