// The checkpoint store goes away, is emptied, belongs to somebody else or fails to take a save:
// training that was done is never begun anew, and the job says what is wrong.

#include <algorithm>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <memory>
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

class VanishedStoreTest : public ::testing::Test {
 protected:
  void SetUp() override { Start(cluster_); }

  static void Start(std::unique_ptr<MiniCluster>& cluster) {
    absl::StatusOr<std::unique_ptr<MiniCluster>> started =
        MiniCluster::Start({}, kPatientDetection);
    ASSERT_TRUE(started.ok()) << started.status();
    cluster = std::move(*started);
    WriteTokens(cluster->folder() + "/tokens.bin", 20000, TinyJob().vocabulary);
  }

  TinyJob Job(int64_t steps) const {
    return {.name = "a",
            .tokens_path = cluster_->folder() + "/tokens.bin",
            .store = cluster_->folder() + "/store",
            .workers = 1,
            .steps = steps,
            .save_every_steps = 20};
  }

  // A job that has committed twice and is held before it saves again.
  void TrainPastACommit(int64_t steps) {
    ASSERT_EQ(cluster_->StartWorkers(1, cluster_->HoldFaults()), absl::OkStatus());
    cluster_->HoldTrainersAt(50);
    ASSERT_EQ(cluster_->Submit(Job(steps)), absl::OkStatus());
    ASSERT_TRUE(Eventually(seconds(60), [&] {
      const absl::StatusOr<JobView> view = cluster_->Get("a");
      return view.ok() && view->committed_step >= 40;
    })) << cluster_->Report("a");
  }

  void KillTrainers() {
    for (const pid_t trainer : cluster_->AllTrainers()) {
      ::kill(trainer, SIGKILL);
    }
  }

  bool Told(const std::string& reason, milliseconds deadline) {
    return Eventually(deadline, [&] {
      const absl::StatusOr<std::vector<EventRow>> events = cluster_->Events("a");
      return events.ok() && std::any_of(events->begin(), events->end(), [&](const EventRow& event) {
               return event.reason == reason || absl::StrContains(event.message, reason);
             });
    });
  }

  // No epoch after the first has a step below the first commits.
  void ExpectNeverBegunAnew() {
    const absl::StatusOr<std::vector<EventRow>> events = cluster_->Events("a");
    ASSERT_TRUE(events.ok()) << events.status();
    for (const EventRow& event : *events) {
      EXPECT_FALSE(event.epoch > 1 && absl::StrContains(event.message, "initial weights"))
          << event.message;
    }
  }

  std::unique_ptr<MiniCluster> cluster_;
};

TEST_F(VanishedStoreTest, AMissingMountIsWaitedFor) {
  TrainPastACommit(300);
  const std::string store = cluster_->folder() + "/store";
  std::filesystem::rename(store, store + ".away");
  KillTrainers();
  cluster_->LetTrainersGo();
  EXPECT_TRUE(Told("StoreUnavailable", seconds(60))) << cluster_->Report("a");
  std::filesystem::remove_all(store);  // a save may have made a folder where the mount was
  std::filesystem::rename(store + ".away", store);
  EXPECT_EQ(cluster_->WaitForSuccess("a", seconds(60)), absl::OkStatus());
  ExpectNeverBegunAnew();
}

TEST_F(VanishedStoreTest, AnEmptiedStoreIsNotAFreshOne) {
  TrainPastACommit(300);
  const std::string store = cluster_->folder() + "/store";
  std::filesystem::rename(store, store + ".away");
  std::filesystem::create_directory(store);
  KillTrainers();
  EXPECT_TRUE(Told("StoreUnavailable", seconds(60)) || Told("NoGoodCheckpoint", seconds(1)))
      << cluster_->Report("a");
  ExpectNeverBegunAnew();
  const absl::StatusOr<JobView> view = cluster_->Get("a");
  ASSERT_TRUE(view.ok()) << view.status();
  EXPECT_NE(view->state, "RUNNING");
}

// The same job file on another cluster, in the same folder: the first is not disturbed.
TEST_F(VanishedStoreTest, AFolderHasOneOwner) {
  TrainPastACommit(200);
  std::unique_ptr<MiniCluster> other;
  Start(other);
  ASSERT_EQ(other->StartWorkers(1), absl::OkStatus());
  (void)other->Submit(Job(200));  // refused now, or when it is placed
  // A trainer that has four newer saves without an answer removes the oldest: held until those
  // before the last four are committed, it removes none.
  cluster_->HoldTrainersAt(130);
  cluster_->LetTrainersGoAt(50);
  ASSERT_TRUE(Eventually(seconds(60), [&] {
    const absl::StatusOr<JobView> view = cluster_->Get("a");
    return view.ok() && view->committed_step >= 120;
  })) << cluster_->Report("a");
  cluster_->LetTrainersGo();
  EXPECT_EQ(cluster_->WaitForSuccess("a", seconds(60)), absl::OkStatus());
  const absl::StatusOr<std::vector<EventRow>> events = cluster_->Events("a");
  ASSERT_TRUE(events.ok()) << events.status();
  for (const EventRow& event : *events) {
    EXPECT_NE(event.type, "CheckpointFailed") << event.message;
  }
  const absl::StatusOr<std::map<int64_t, std::string>> mine = cluster_->Checkpoints("a");
  ASSERT_TRUE(mine.ok()) << mine.status();
  EXPECT_EQ(mine->size(), 10u) << "the other cluster took none away";
  for (const auto& [step, path] : *mine) {
    EXPECT_EQ(cluster_->Ctl({"checkpoints", "verify", path}).exit_code, 0) << path;
  }
  const absl::StatusOr<JobView> theirs = other->Get("a");
  EXPECT_TRUE(!theirs.ok() || theirs->committed_step < 0) << theirs->committed_step;
}

}  // namespace
}  // namespace ravel::testing
