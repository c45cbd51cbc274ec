// The same state, another process: what a coordinator that died leaves to the next one.

#include <absl/strings/str_cat.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "coordinator/jobs/job_controller.h"
#include "coordinator/store/sqlite_job_store.h"
#include "tests/coordinator/jobs/fake_world.h"

namespace ravel::coordinator {
namespace {

using ::testing::Contains;
using ::testing::Not;

class CoordinatorRestartTest : public ::testing::Test {
 protected:
  void SetUp() override { world_.StartCoordinator(); }
  void AddNodes(int count) {
    for (int i = 0; i < count; ++i) {
      world_.AddNode(absl::StrCat("n", i));
    }
  }
  // Every step once, in order, up to `steps`.
  static void ExpectWholeHistory(FakeWorld& world, const std::string& job, int64_t steps) {
    const std::vector<StepRecord> history = world.History(job);
    ASSERT_EQ(static_cast<int64_t>(history.size()), steps);
    for (int64_t i = 0; i < steps; ++i) {
      EXPECT_EQ(history[static_cast<size_t>(i)].step, i + 1);
    }
  }
  JobState State(const std::string& job) { return world_.Job(job).record.state; }

  FakeWorld world_;
};

TEST_F(CoordinatorRestartTest, RunningTrainersAreAdopted) {
  AddNodes(2);
  ASSERT_TRUE(world_.Submit(world_.Spec("job", {1, 2}, 12)).ok());
  world_.TrainSteps(7);
  const JobRecord before = world_.Job("job").record;
  const size_t launches = world_.launches.size();
  world_.KillCoordinator();
  world_.StartCoordinator();
  EXPECT_EQ(State("job"), JobState::kRunning);
  EXPECT_EQ(world_.Job("job").progress.step, 7) << "read back from the metrics";
  world_.Connect(world_.node("n0"));
  EXPECT_THAT(world_.EventTypes("job"), Not(Contains("Adopted"))) << "n1 is not back yet";
  world_.Connect(world_.node("n1"));
  world_.Advance(100);
  EXPECT_THAT(world_.EventTypes("job"), Contains("Adopted"));
  world_.TrainSteps(5);
  const JobRecord after = world_.Job("job").record;
  EXPECT_EQ(after.state, JobState::kSucceeded);
  EXPECT_EQ(after.epoch, before.epoch + 1) << "raised by the end alone";
  EXPECT_EQ(after.attempt, before.attempt);
  EXPECT_EQ(after.restarts, 0);
  EXPECT_EQ(world_.launches.size(), launches) << "no trainer was started again";
  ExpectWholeHistory(world_, "job", 12);
}

TEST_F(CoordinatorRestartTest, AJobThatIsOverLetsGoOnceTheStoreIsBack) {
  AddNodes(1);
  ASSERT_TRUE(world_.Submit(world_.Spec("job", {1}, 4)).ok());
  world_.keeper.release_failure = absl::UnavailableError("the store is away");
  const int before = world_.keeper.cleaned;
  world_.TrainSteps(4);
  ASSERT_EQ(State("job"), JobState::kSucceeded);
  EXPECT_EQ(world_.keeper.cleaned, before + 1);
  world_.Advance(5'100);
  EXPECT_EQ(world_.keeper.cleaned, before + 2);
  world_.Advance(9'000);
  EXPECT_EQ(world_.keeper.cleaned, before + 2) << "later and later";
  world_.keeper.release_failure = absl::OkStatus();
  world_.Advance(1'100);
  EXPECT_EQ(world_.keeper.cleaned, before + 3);
  world_.Advance(100'000);
  EXPECT_EQ(world_.keeper.cleaned, before + 3) << "it is done";
}

// It may have died between the end of the job and that of the release.
TEST_F(CoordinatorRestartTest, TheNextCoordinatorLetsGoForJobsThatAreOver) {
  AddNodes(1);
  ASSERT_TRUE(world_.Submit(world_.Spec("job", {1}, 4)).ok());
  world_.keeper.release_failure = absl::UnavailableError("the store is away");
  world_.TrainSteps(4);
  ASSERT_EQ(State("job"), JobState::kSucceeded);
  world_.KillCoordinator();
  world_.keeper.release_failure = absl::OkStatus();
  const int before = world_.keeper.cleaned;
  world_.StartCoordinator();
  world_.Advance(1'000);
  EXPECT_EQ(world_.keeper.cleaned, before + 1);
  world_.Advance(100'000);
  EXPECT_EQ(world_.keeper.cleaned, before + 1);
}

TEST_F(CoordinatorRestartTest, ADeletedJobTriesToLetGoOnceMore) {
  AddNodes(1);
  ASSERT_TRUE(world_.Submit(world_.Spec("job", {1}, 4)).ok());
  world_.keeper.release_failure = absl::UnavailableError("the store is away");
  world_.TrainSteps(4);
  const int before = world_.keeper.cleaned;
  ASSERT_TRUE(world_.Delete({"default", "job"}, {.request_id = "delete"}).ok());
  world_.Advance(100);
  EXPECT_EQ(world_.keeper.cleaned, before + 1);
  EXPECT_TRUE(world_.controller().List().empty()) << "a store that is away keeps no record";
}

// Its answer would find no record.
TEST_F(CoordinatorRestartTest, AJobWhoseRecordGoesLetsGoOfNothingMore) {
  AddNodes(1);
  ASSERT_TRUE(world_.Submit(world_.Spec("job", {1}, 4)).ok());
  world_.keeper.release_failure = absl::UnavailableError("the store is away");
  world_.TrainSteps(4);
  world_.writer().held = true;
  world_.controller().Delete({"default", "job"}, {.request_id = "delete"}, [](const auto&) {});
  world_.writer().WriteQueued();
  world_.Settle();
  ASSERT_EQ(world_.writer().queued(), 1U) << "the rows go";
  const int before = world_.keeper.cleaned;
  world_.Advance(20'000);
  EXPECT_EQ(world_.keeper.cleaned, before);
  world_.writer().held = false;
  world_.writer().WriteQueued();
  world_.Settle();
  EXPECT_TRUE(world_.controller().List().empty());
}

TEST_F(CoordinatorRestartTest, WhatWasLostWithTheCoordinatorIsAskedForAgain) {
  AddNodes(2);
  ASSERT_TRUE(world_.Submit(world_.Spec("job", {1, 2}, 40)).ok());
  world_.TrainSteps(7);
  // The order to save is accepted, and lost on its way with the coordinator.
  world_.lose = [](const FakeNode&, const DownMessage& message) {
    const auto* command = std::get_if<TrainerCommand>(&message.kind);
    return command != nullptr && std::holds_alternative<SaveTrainer>(command->frame);
  };
  const auto operation = world_.CheckpointNow({"default", "job"}, "save");
  ASSERT_TRUE(operation.ok());
  world_.KillCoordinator();
  world_.lose = nullptr;
  world_.StartCoordinator();
  world_.Connect(world_.node("n0"));
  world_.Connect(world_.node("n1"));
  world_.Advance(100);
  world_.TrainSteps(1);
  const auto done = world_.controller().GetOperation(operation->id);
  ASSERT_TRUE(done.ok());
  EXPECT_EQ(done->state, OperationState::kCommitted);
  EXPECT_EQ(done->step, 8);
}

TEST_F(CoordinatorRestartTest, AJobThatWasStartingIsAdopted) {
  AddNodes(2);
  // Records of communicators are in memory alone: daemons tell them again.
  world_.lose = [](const FakeNode& node, const DownMessage& message) {
    const auto* command = std::get_if<TrainerCommand>(&message.kind);
    return node.id == "n1" && command != nullptr &&
           std::holds_alternative<CommRecordSet>(command->frame);
  };
  ASSERT_TRUE(world_.Submit(world_.Spec("job", {1, 2}, 6)).ok());
  EXPECT_EQ(State("job"), JobState::kStarting);
  const int64_t epoch = world_.Job("job").record.epoch;
  world_.KillCoordinator();
  world_.lose = nullptr;
  world_.StartCoordinator();
  world_.Connect(world_.node("n0"));
  world_.Connect(world_.node("n1"));
  world_.Advance(600);
  EXPECT_EQ(State("job"), JobState::kRunning);
  EXPECT_EQ(world_.Job("job").record.epoch, epoch);
  world_.TrainSteps(6);
  EXPECT_EQ(State("job"), JobState::kSucceeded);
}

TEST_F(CoordinatorRestartTest, APlanThatThisBuildMakesDifferentlyIsNotAdopted) {
  AddNodes(2);
  ASSERT_TRUE(world_.Submit(world_.Spec("job", {1, 2}, 12)).ok());
  world_.TrainSteps(7);
  const int64_t epoch = world_.Job("job").record.epoch;
  world_.KillCoordinator();
  world_.planner.build = "another build";
  world_.StartCoordinator();
  world_.Connect(world_.node("n0"));
  world_.Connect(world_.node("n1"));
  world_.Advance(200);
  EXPECT_EQ(State("job"), JobState::kRunning);
  EXPECT_GT(world_.Job("job").record.epoch, epoch);
  EXPECT_EQ(world_.Job("job").record.budget.used, 0) << "never blamed on the job";
  EXPECT_EQ(world_.launches.back().trainers[0].first_step, 5);
  world_.TrainSteps(7);
  EXPECT_EQ(State("job"), JobState::kSucceeded);
  ExpectWholeHistory(world_, "job", 12);
}

TEST_F(CoordinatorRestartTest, SealsOfTheOutageAreCommitted) {
  AddNodes(2);
  ASSERT_TRUE(world_.Submit(world_.Spec("job", {1, 2}, 40)).ok());
  world_.TrainSteps(7);
  EXPECT_EQ(world_.Job("job").record.committed_step, 5);
  world_.KillCoordinator();
  for (int i = 0; i < 9; ++i) {
    world_.TrainStep();  // steps 10 and 15 are sealed; nobody hears it
  }
  world_.StartCoordinator();
  world_.Connect(world_.node("n0"));
  world_.Connect(world_.node("n1"));
  world_.Advance(100);
  EXPECT_EQ(world_.Job("job").record.committed_step, 15);
  EXPECT_EQ(world_.Job("job").progress.step, 16);
  EXPECT_EQ(world_.Job("job").record.restarts, 0);
  ExpectWholeHistory(world_, "job", 16);
}

// Trainers keep the newest saves only while nobody commits; seals of the others come all the same.
TEST_F(CoordinatorRestartTest, SavesThatTrainersReplacedInTheOutageAreNoFailures) {
  AddNodes(2);
  plan::JobSpec spec = world_.Spec("job", {1, 2}, 40);
  spec.checkpoint.max_failed_saves = 1;
  ASSERT_TRUE(world_.Submit(spec).ok());
  world_.TrainSteps(7);
  world_.KillCoordinator();
  for (int i = 0; i < 19; ++i) {
    world_.TrainStep();
  }
  world_.keeper.gone = {10, 15, 20};
  world_.StartCoordinator();
  world_.Connect(world_.node("n0"));
  world_.Connect(world_.node("n1"));
  world_.Advance(100);
  EXPECT_EQ(world_.Job("job").record.committed_step, 25);
  EXPECT_EQ(State("job"), JobState::kRunning);
  for (const std::string& type : world_.EventTypes("job")) {
    EXPECT_NE(type, "CheckpointFailed");
  }
}

TEST_F(CoordinatorRestartTest, ANodeThatHasHeardOfAHigherTermIsNotTakenOver) {
  FakeNode& node = world_.AddNode("n0");
  world_.Disconnect(node);
  node.term = world_.controller().term() + 1;
  world_.Connect(node);
  EXPECT_TRUE(node.rejected.empty()) << "its trainers go on";
  EXPECT_EQ(node.stream, 0U);
}

TEST_F(CoordinatorRestartTest, AnEpochThatTheStateHasNotHeardOfIsGoneBeyond) {
  AddNodes(2);
  ASSERT_TRUE(world_.Submit(world_.Spec("job", {1, 2}, 12)).ok());
  world_.TrainSteps(7);
  world_.KillCoordinator();
  for (const char* id : {"n0", "n1"}) {  // as if the state were of an old backup
    auto trainers = std::exchange(world_.node(id).trainers, {});
    for (auto& [key, trainer] : trainers) {
      trainer.epoch += 7;
      world_.node(id).trainers[{trainer.job_uid, trainer.epoch, trainer.rank}] = trainer;
    }
  }
  world_.StartCoordinator();
  world_.Connect(world_.node("n0"));
  world_.Connect(world_.node("n1"));
  world_.Advance(200);
  EXPECT_EQ(State("job"), JobState::kRunning);
  EXPECT_EQ(world_.Job("job").record.epoch, 9);
}

TEST_F(CoordinatorRestartTest, AMissingNodeIsWaitedForAndThenDoneWithout) {
  AddNodes(2);
  ASSERT_TRUE(world_.Submit(world_.Spec("job", {1, 2}, 12)).ok());
  world_.TrainSteps(7);
  world_.KillCoordinator();
  world_.node("n1").trainers.clear();
  world_.StartCoordinator();
  world_.Connect(world_.node("n0"));
  world_.Advance(5000);
  EXPECT_EQ(world_.Job("job").record.world_size, 2) << "n1 may still come";
  world_.Advance(3000);
  EXPECT_EQ(State("job"), JobState::kRunning);
  EXPECT_EQ(world_.Job("job").record.world_size, 1);
}

TEST_F(CoordinatorRestartTest, AnIntendedCommitIsSettled) {
  AddNodes(1);
  ASSERT_TRUE(world_.Submit(world_.Spec("job", {1}, 12)).ok());
  // The intent is the last thing that reaches the disk.
  world_.TrainSteps(4);
  bool intended = false;
  world_.disk.fault = [this, &intended](int64_t) {
    const bool before = intended;
    for (const auto& [key, save] : world_.disk.saves) {
      intended = intended || save.state == SaveState::kIntended;
    }
    return before || intended ? absl::ResourceExhaustedError("crashed") : absl::OkStatus();
  };
  world_.TrainSteps(1);
  world_.KillCoordinator();
  world_.disk.fault = nullptr;
  world_.keeper.steps.clear();  // the store had not seen it
  world_.StartCoordinator();
  world_.Settle();
  EXPECT_EQ(world_.keeper.settled, 1);
  EXPECT_EQ(world_.Job("job").record.committed_step, 5);
}

TEST_F(CoordinatorRestartTest, ACancelThatWasAcceptedIsNotForgotten) {
  AddNodes(1);
  ASSERT_TRUE(world_.Submit(world_.Spec("job", {1}, 12)).ok());
  world_.node("n0").stops_trainers = false;
  ASSERT_TRUE(world_.Cancel({"default", "job"}, "").ok());
  world_.KillCoordinator();
  world_.StartCoordinator();
  world_.Advance(100);
  EXPECT_EQ(State("job"), JobState::kCancelled);
  // The trainer of the cancelled job is told to stop as soon as its daemon is back.
  world_.node("n0").stops_trainers = true;
  world_.Connect(world_.node("n0"));
  world_.Advance(100);
  EXPECT_TRUE(world_.node("n0").trainers.empty());
}

// Crash before or after every transaction of a job's life: it always ends well, with every step
// once.
TEST_F(CoordinatorRestartTest, ACrashAtAnyTransactionLosesNothingThatWasAccepted) {
  int64_t transactions = 0;
  {
    FakeWorld whole;
    whole.StartCoordinator();
    whole.AddNode("n0");
    whole.AddNode("n1");
    ASSERT_TRUE(whole.Submit(whole.Spec("job", {1, 2}, 11)).ok());
    whole.TrainSteps(11);
    ASSERT_EQ(whole.Job("job").record.state, JobState::kSucceeded);
    transactions = whole.disk.applied;
  }
  ASSERT_GT(transactions, 8);
  for (int64_t crash = 2; crash < transactions; ++crash) {
    SCOPED_TRACE(absl::StrCat("crash at transaction ", crash));
    FakeWorld world;
    world.StartCoordinator();
    world.AddNode("n0");
    world.AddNode("n1");
    bool dead = false;
    world.disk.fault = [&dead, crash](int64_t number) {
      dead = dead || number >= crash;
      return dead ? absl::ResourceExhaustedError("crashed") : absl::OkStatus();
    };
    const bool accepted = world.Submit(world.Spec("job", {1, 2}, 11)).ok();
    for (int i = 0; i < 11 && !dead; ++i) {
      world.TrainSteps(1);
    }
    world.KillCoordinator();
    world.disk.fault = nullptr;
    world.StartCoordinator();
    ASSERT_EQ(world.controller().List().size(), accepted ? 1U : 0U);
    if (!accepted) {
      continue;
    }
    world.Connect(world.node("n0"));
    world.Connect(world.node("n1"));
    world.Advance(200);
    world.TrainSteps(12);
    EXPECT_EQ(world.Job("job").record.state, JobState::kSucceeded);
    ExpectWholeHistory(world, "job", 11);
  }
}

TEST(CoordinatorOnSqliteTest, RestartsWithTheSameFile) {
  FakeWorld world;
  const auto open = [&world] {
    absl::StatusOr<std::unique_ptr<SqliteJobStore>> store = SqliteJobStore::Create(world.folder);
    EXPECT_TRUE(store.ok()) << store.status();
    return *std::move(store);
  };
  world.StartCoordinator(open());
  const std::string cluster = world.controller().cluster_id();
  const int64_t term = world.controller().term();
  world.AddNode("n0");
  world.AddNode("n1");
  ASSERT_TRUE(world.Submit(world.Spec("job", {1, 2}, 12)).ok());
  world.TrainSteps(7);
  world.KillCoordinator();
  world.StartCoordinator(nullptr);  // lets go of the file
  world.StartCoordinator(open());
  EXPECT_EQ(world.controller().cluster_id(), cluster);
  EXPECT_EQ(world.controller().term(), term + 1);
  world.Connect(world.node("n0"));
  world.Connect(world.node("n1"));
  world.Advance(100);
  EXPECT_EQ(world.Job("job").record.state, JobState::kRunning);
  world.TrainSteps(7);
  EXPECT_EQ(world.Job("job").record.state, JobState::kSucceeded);
  EXPECT_EQ(world.History("job").size(), 12U);
  EXPECT_THAT(world.EventTypes("job"), Contains("Succeeded"));
}

}  // namespace
}  // namespace ravel::coordinator
