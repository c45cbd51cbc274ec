#include "coordinator/jobs/job_controller.h"

#include <algorithm>

#include <absl/strings/str_cat.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/coordinator/jobs/fake_world.h"

namespace ravel::coordinator {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;

class JobControllerTest : public ::testing::Test {
 protected:
  void SetUp() override { world_.StartCoordinator(); }
  void AddNodes(int count) {
    for (int i = 0; i < count; ++i) {
      world_.AddNode(absl::StrCat("n", i));
    }
  }
  // Every step once, in order, up to `steps`.
  void ExpectWholeHistory(const std::string& job, int64_t steps) {
    const std::vector<StepRecord> history = world_.History(job);
    ASSERT_EQ(static_cast<int64_t>(history.size()), steps);
    for (int64_t i = 0; i < steps; ++i) {
      EXPECT_EQ(history[static_cast<size_t>(i)].step, i + 1);
    }
  }
  JobState State(const std::string& job) { return world_.Job(job).record.state; }

  FakeWorld world_;
};

TEST_F(JobControllerTest, AJobRunsOnAllWorkersToItsLastStep) {
  AddNodes(2);
  ASSERT_TRUE(world_.Submit(world_.Spec("job", {1, 2}, 12)).ok());
  EXPECT_EQ(State("job"), JobState::kRunning);
  EXPECT_EQ(world_.Job("job").record.world_size, 2);
  ASSERT_EQ(world_.launches.size(), 2U);
  EXPECT_EQ(world_.launches[0].trainers[0].transport, "shm");
  EXPECT_EQ(world_.launches[0].trainers[0].restore_path, "");
  world_.TrainSteps(12);
  const JobView view = world_.Job("job");
  EXPECT_EQ(view.record.state, JobState::kSucceeded);
  EXPECT_EQ(view.record.committed_step, 12);
  EXPECT_EQ(view.record.committed_path, "/ckpt/job/step-12");
  EXPECT_EQ(view.record.restarts, 0);
  EXPECT_FLOAT_EQ(static_cast<float>(view.progress.first_loss), 1.0F);
  EXPECT_DOUBLE_EQ(view.progress.tokens_per_second, 200);
  ExpectWholeHistory("job", 12);
  EXPECT_THAT(world_.EventTypes("job"), Contains("Succeeded"));
  // Both devices are free again.
  for (const NodeView& node : world_.controller().Nodes()) {
    EXPECT_EQ(node.devices_free, 1);
  }
}

TEST_F(JobControllerTest, OneRankNeedsNoTransport) {
  AddNodes(1);
  ASSERT_TRUE(world_.Submit(world_.Spec("job", {1}, 3)).ok());
  EXPECT_EQ(world_.launches.at(0).trainers.at(0).transport, "local");
  world_.TrainSteps(3);
  EXPECT_EQ(State("job"), JobState::kSucceeded);
}

TEST_F(JobControllerTest, NodesOfDifferentHostsTalkOverGloo) {
  world_.AddNode("a");
  FakeNode& b = world_.AddNode("b");
  b.host_id = "another";
  world_.Restart(b);
  ASSERT_TRUE(world_.Submit(world_.Spec("job", {2}, 3)).ok());
  EXPECT_EQ(world_.launches.at(0).trainers.at(0).transport, "gloo");
}

TEST_F(JobControllerTest, AJobWaitsUntilEnoughDevicesAreThereAndSaysSo) {
  AddNodes(1);
  ASSERT_TRUE(world_.Submit(world_.Spec("job", {2}, 3)).ok());
  EXPECT_EQ(State("job"), JobState::kQueued);
  EXPECT_THAT(world_.Job("job").record.message, HasSubstr("needs 2 free cpu devices, 1 are free"));
  world_.AddNode("late");
  world_.Advance(40);
  EXPECT_EQ(State("job"), JobState::kRunning);
}

TEST_F(JobControllerTest, AJobForGpusSaysWhyNoNodeHasOne) {
  plan::JobSpec spec = world_.Spec("job", {1}, 3);
  spec.cpu_devices = false;
  ASSERT_TRUE(world_.Submit(spec).ok());
  EXPECT_THAT(world_.Job("job").record.message, HasSubstr("0 are free: no node is connected"));
  for (const char* id : {"a", "b", "c"}) {
    FakeNode& node = world_.AddNode(id);
    node.device_message = std::string_view(id) == "b" ? "driver present, no device" : "no driver";
    world_.Restart(node);
  }
  world_.Advance(40);
  EXPECT_EQ(State("job"), JobState::kQueued);
  EXPECT_EQ(world_.Job("job").record.message,
            "needs 1 free gpu devices, 0 are free: no node has a GPU (b: driver present, no "
            "device; a and 1 more: no driver)");
}

TEST_F(JobControllerTest, AKilledTrainerMeansANewEpochFromTheNewestCommit) {
  AddNodes(3);
  ASSERT_TRUE(world_.Submit(world_.Spec("job", {1, 2, 3}, 12)).ok());
  world_.TrainSteps(7);
  const int64_t epoch = world_.Job("job").record.epoch;
  world_.KillTrainer(1);
  world_.Advance(100);
  const JobView view = world_.Job("job");
  EXPECT_EQ(view.record.state, JobState::kRunning);
  EXPECT_EQ(view.record.epoch, epoch + 1);
  EXPECT_EQ(view.record.attempt, 2);
  EXPECT_EQ(view.record.budget.used, 1);
  EXPECT_EQ(view.record.budget.last_reason, "ProcessCrash");
  EXPECT_EQ(world_.launches.back().trainers[0].first_step, 5);
  EXPECT_EQ(world_.launches.back().trainers[0].restore_path, "/ckpt/job/step-5");
  world_.TrainSteps(7);
  EXPECT_EQ(State("job"), JobState::kSucceeded);
  EXPECT_EQ(world_.Job("job").record.budget.used, 0) << "a higher commit refills the budget";
  ExpectWholeHistory("job", 12);
}

TEST_F(JobControllerTest, AFreshJobBeginsAnewInAFolderWithOlderCommitsOnce) {
  AddNodes(1);
  world_.keeper.steps["job"] = {{5, 1}, {50, 1}};
  plan::JobSpec spec = world_.Spec("job", {1}, 12);
  spec.checkpoint.resume_from = "none";
  spec.checkpoint.fresh = true;
  ASSERT_TRUE(world_.Submit(spec).ok());
  EXPECT_EQ(world_.launches.back().trainers[0].restore_path, "");
  world_.TrainSteps(7);
  world_.KillTrainer(0);
  world_.Advance(100);
  EXPECT_EQ(world_.launches.back().trainers[0].restore_path, "/ckpt/job/step-5") << "its own";
  world_.TrainSteps(7);
  EXPECT_EQ(State("job"), JobState::kSucceeded);
  ExpectWholeHistory("job", 12);
}

TEST_F(JobControllerTest, ALostNodeShrinksTheJobAndItsReturnGrowsIt) {
  AddNodes(3);
  ASSERT_TRUE(world_.Submit(world_.Spec("job", {1, 2, 3}, 30)).ok());
  world_.TrainSteps(6);
  world_.Kill(world_.node("n1"));
  world_.Advance(1500);
  EXPECT_EQ(State("job"), JobState::kRunning);
  EXPECT_EQ(world_.Job("job").record.world_size, 2);
  EXPECT_EQ(world_.Job("job").record.budget.last_reason, "NodeLost");
  world_.TrainSteps(2);
  world_.Restart(world_.node("n1"));
  world_.Advance(40);
  EXPECT_EQ(State("job"), JobState::kResizing);
  world_.TrainSteps(1);  // saves and stops
  world_.Advance(40);
  EXPECT_EQ(State("job"), JobState::kRunning);
  EXPECT_EQ(world_.Job("job").record.world_size, 3);
  EXPECT_EQ(world_.launches.back().trainers[0].first_step, 8) << "grown at a commit, nothing lost";
  world_.TrainSteps(22);
  EXPECT_EQ(State("job"), JobState::kSucceeded);
  ExpectWholeHistory("job", 30);
}

TEST_F(JobControllerTest, ADrainedNodeIsLeftAtASaveAndCostsNothing) {
  AddNodes(2);
  ASSERT_TRUE(world_.Submit(world_.Spec("job", {1, 2}, 30)).ok());
  world_.TrainSteps(7);
  world_.SendUp(world_.node("n1"), DrainNotice{"SIGTERM"});
  world_.Advance(40);
  EXPECT_EQ(State("job"), JobState::kResizing);
  EXPECT_EQ(world_.Job("job").record.reason, "NodeDrain");
  world_.TrainSteps(1);  // saves and stops
  world_.Advance(40);
  const JobView view = world_.Job("job");
  EXPECT_EQ(view.record.state, JobState::kRunning);
  EXPECT_EQ(view.record.world_size, 1);
  EXPECT_EQ(view.record.resized_ms, 0) << "it may grow again at once";
  EXPECT_EQ(world_.launches.back().trainers[0].first_step, 8);
  world_.TrainSteps(22);
  EXPECT_EQ(State("job"), JobState::kSucceeded);
  EXPECT_EQ(world_.Job("job").record.restarts, 0);
  ExpectWholeHistory("job", 30);
}

TEST_F(JobControllerTest, ADrainedNodeWithoutTimeToSaveCostsNoBudget) {
  AddNodes(2);
  ASSERT_TRUE(world_.Submit(world_.Spec("job", {1, 2}, 12)).ok());
  world_.TrainSteps(7);
  world_.SendUp(world_.node("n1"), DrainNotice{"SIGTERM"});
  world_.Advance(40);
  world_.KillTrainer(1, 10, 0, "Stopped");
  world_.KillTrainer(0, 11, 0, "CommError");
  world_.Advance(100);
  const JobView view = world_.Job("job");
  EXPECT_EQ(view.record.state, JobState::kRunning);
  EXPECT_EQ(view.record.world_size, 1);
  EXPECT_EQ(view.record.budget.used, 0);
  EXPECT_EQ(world_.launches.back().trainers[0].first_step, 5);
  world_.TrainSteps(7);
  EXPECT_EQ(State("job"), JobState::kSucceeded);
}

TEST_F(JobControllerTest, AJobThatStartsOnADrainedNodeIsPlacedAnew) {
  AddNodes(2);
  world_.node("n1").frozen = true;  // its trainer is never ready
  ASSERT_TRUE(world_.Submit(world_.Spec("job", {1, 2}, 12)).ok());
  EXPECT_EQ(State("job"), JobState::kStarting);
  world_.node("n1").frozen = false;
  world_.node("n1").inbox.clear();
  world_.SendUp(world_.node("n1"), DrainNotice{"SIGTERM"});
  world_.Kill(world_.node("n1"));
  world_.Advance(1500);
  const JobView view = world_.Job("job");
  EXPECT_EQ(view.record.state, JobState::kRunning);
  EXPECT_EQ(view.record.world_size, 1);
  EXPECT_EQ(view.record.budget.used, 0);
}

TEST_F(JobControllerTest, AFrozenNodeIsLostAfterTheDetectionTime) {
  AddNodes(2);
  ASSERT_TRUE(world_.Submit(world_.Spec("job", {1, 2}, 20)).ok());
  world_.TrainSteps(6);
  FakeNode& frozen = world_.node("n1");
  frozen.frozen = true;
  world_.Advance(800);
  EXPECT_EQ(State("job"), JobState::kRunning) << "suspect is not lost";
  world_.Advance(400);
  EXPECT_EQ(world_.Job("job").record.world_size, 1);
  world_.Advance(200);
  EXPECT_EQ(State("job"), JobState::kRunning);
  // It thaws: its old trainer must stop before its device is used again.
  frozen.frozen = false;
  EXPECT_EQ(frozen.trainers.size(), 1U);
  world_.Settle();
  world_.Connect(frozen);
  world_.Advance(100);
  for (const auto& [key, trainer] : frozen.trainers) {
    EXPECT_EQ(trainer.epoch, world_.Job("job").record.epoch);
  }
  world_.TrainSteps(20);
  EXPECT_EQ(State("job"), JobState::kSucceeded);
}

TEST_F(JobControllerTest, AShortBreakOfTheStreamCostsNothing) {
  AddNodes(2);
  ASSERT_TRUE(world_.Submit(world_.Spec("job", {2}, 8)).ok());
  world_.TrainSteps(3);
  const int64_t epoch = world_.Job("job").record.epoch;
  world_.Disconnect(world_.node("n0"));
  world_.Advance(200);  // less than 2T/5
  world_.Connect(world_.node("n0"));
  world_.Advance(100);
  EXPECT_EQ(world_.Job("job").record.epoch, epoch);
  world_.TrainSteps(5);
  EXPECT_EQ(State("job"), JobState::kSucceeded);
  EXPECT_EQ(world_.Job("job").record.restarts, 0);
}

TEST_F(JobControllerTest, ANewDaemonEndsTheWorkOfTheOldOneAtOnce) {
  AddNodes(2);
  ASSERT_TRUE(world_.Submit(world_.Spec("job", {2}, 8)).ok());
  world_.TrainSteps(6);
  world_.Restart(world_.node("n0"));
  world_.Advance(40);
  EXPECT_EQ(State("job"), JobState::kRunning);
  EXPECT_EQ(world_.Job("job").record.attempt, 2);
  world_.TrainSteps(3);
  EXPECT_EQ(State("job"), JobState::kSucceeded);
}

TEST_F(JobControllerTest, NothingIsLaunchedWhileATrainerOfTheOldEpochMayStillRun) {
  AddNodes(2);
  ASSERT_TRUE(world_.Submit(world_.Spec("job", {1, 2}, 8)).ok());
  world_.TrainSteps(2);
  world_.node("n0").stops_trainers = false;
  const size_t launches = world_.launches.size();
  world_.KillTrainer(1);
  world_.Advance(1000);
  EXPECT_EQ(State("job"), JobState::kRecovering);
  EXPECT_EQ(world_.launches.size(), launches);
  world_.node("n0").stops_trainers = true;
  world_.KillTrainer(0);
  world_.Advance(100);
  EXPECT_EQ(State("job"), JobState::kRunning);
}

TEST_F(JobControllerTest, CancelStopsTheTrainersFirst) {
  AddNodes(2);
  ASSERT_TRUE(world_.Submit(world_.Spec("job", {2}, 8)).ok());
  world_.TrainSteps(2);
  ASSERT_TRUE(world_.Cancel({"default", "job"}, "not needed").ok());
  EXPECT_EQ(State("job"), JobState::kStopping);
  const int cleaned = world_.keeper.cleaned;
  world_.Settle();
  EXPECT_EQ(State("job"), JobState::kCancelled);
  EXPECT_TRUE(world_.node("n0").trainers.empty());
  EXPECT_EQ(world_.keeper.cleaned, cleaned + 1) << "half-written saves go with it";
  EXPECT_EQ(world_.Job("job").record.message, "not needed");
  EXPECT_TRUE(world_.Cancel({"default", "job"}, "").ok()) << "repeating is harmless";
  EXPECT_EQ(world_.Cancel({"default", "nobody"}, "").status().code(), absl::StatusCode::kNotFound);
}

TEST_F(JobControllerTest, ACancelledJobInTheQueueNeverStarts) {
  ASSERT_TRUE(world_.Submit(world_.Spec("job", {2}, 8)).ok());
  ASSERT_TRUE(world_.Cancel({"default", "job"}, "").ok());
  AddNodes(2);
  world_.Advance(100);
  EXPECT_EQ(State("job"), JobState::kCancelled);
  EXPECT_TRUE(world_.launches.empty());
}

TEST_F(JobControllerTest, TheSameRequestGivesTheSameJob) {
  const plan::JobSpec spec = world_.Spec("job", {1}, 8);
  const absl::StatusOr<JobView> first = world_.Submit(world_.Draft(spec, "request"));
  const absl::StatusOr<JobView> again = world_.Submit(world_.Draft(spec, "request"));
  ASSERT_TRUE(first.ok() && again.ok());
  EXPECT_EQ(first->record.uid, again->record.uid);
  EXPECT_EQ(world_.controller().List().size(), 1U);
  const plan::JobSpec other = world_.Spec("other", {1}, 8);
  EXPECT_EQ(world_.Submit(world_.Draft(other, "request")).status().code(),
            absl::StatusCode::kAlreadyExists);
  EXPECT_EQ(world_.Submit(world_.Draft(spec, "request-2")).status().code(),
            absl::StatusCode::kAlreadyExists)
      << "names are unique";
}

TEST_F(JobControllerTest, CheckpointNowCommitsAndItsOperationSaysSo) {
  AddNodes(2);
  ASSERT_TRUE(world_.Submit(world_.Spec("job", {2}, 50)).ok());
  world_.TrainSteps(2);
  const auto operation = world_.CheckpointNow({"default", "job"}, "now-1");
  ASSERT_TRUE(operation.ok());
  EXPECT_EQ(operation->state, OperationState::kAccepted);
  EXPECT_EQ(world_.CheckpointNow({"default", "job"}, "now-1")->id, operation->id);
  world_.Settle();
  world_.TrainSteps(1);
  const auto done = world_.controller().GetOperation(operation->id);
  ASSERT_TRUE(done.ok());
  EXPECT_EQ(done->state, OperationState::kCommitted);
  EXPECT_EQ(done->step, 3);
  EXPECT_EQ(world_.Job("job").record.committed_step, 3);
  ASSERT_FALSE(world_.commit_results.empty());
  EXPECT_TRUE(world_.commit_results.back().committed);
}

TEST_F(JobControllerTest, CheckpointNowOfAJobThatDoesNotTrainIsRefused) {
  ASSERT_TRUE(world_.Submit(world_.Spec("job", {2}, 50)).ok());
  EXPECT_EQ(world_.CheckpointNow({"default", "job"}, "now-1").status().code(),
            absl::StatusCode::kFailedPrecondition);
}

TEST_F(JobControllerTest, AnOperationFailsWithTheEpochThatCarriedIt) {
  AddNodes(2);
  ASSERT_TRUE(world_.Submit(world_.Spec("job", {2}, 50)).ok());
  world_.TrainSteps(2);
  const auto operation = world_.CheckpointNow({"default", "job"}, "now-1");
  ASSERT_TRUE(operation.ok());
  world_.KillTrainer(0);
  world_.Advance(100);
  EXPECT_EQ(world_.controller().GetOperation(operation->id)->state, OperationState::kFailed);
}

TEST_F(JobControllerTest, SavesByTimeAreAskedForByTheCoordinator) {
  AddNodes(1);
  plan::JobSpec spec = world_.Spec("job", {1}, 50);
  spec.checkpoint.every_steps = 0;
  spec.checkpoint.every_ms = 60'000;
  ASSERT_TRUE(world_.Submit(spec).ok());
  world_.TrainSteps(3);
  EXPECT_EQ(world_.Job("job").record.committed_step, -1);
  world_.Advance(60'000);
  world_.TrainSteps(1);
  EXPECT_EQ(world_.Job("job").record.committed_step, 4);
  world_.TrainSteps(3);
  EXPECT_EQ(world_.Job("job").record.committed_step, 4);
}

TEST_F(JobControllerTest, ASealOfAnOldEpochIsRefusedAndCounted) {
  AddNodes(2);
  ASSERT_TRUE(world_.Submit(world_.Spec("job", {1, 2}, 50)).ok());
  world_.TrainSteps(2);
  const JobView before = world_.Job("job");
  world_.KillTrainer(1);
  world_.Advance(100);
  const int64_t refused = world_.controller().stale_refused();
  ckpt::Seal seal;
  seal.step = 3;
  seal.epoch = before.record.epoch;
  for (int64_t rank = 0; rank < 2; ++rank) {
    seal.writer = rank;
    world_.SendUp(
        world_.node(absl::StrCat("n", rank)),
        TrainerFrame{before.record.uid, before.record.epoch, before.record.attempt, rank, seal});
  }
  world_.Settle();
  EXPECT_EQ(world_.controller().stale_refused(), refused + 2);
  EXPECT_TRUE(world_.keeper.steps["job"].empty());
}

TEST_F(JobControllerTest, ASealInAnotherRanksNameIsRefused) {
  AddNodes(2);
  ASSERT_TRUE(world_.Submit(world_.Spec("job", {2}, 50)).ok());
  const JobRecord record = world_.Job("job").record;
  ckpt::Seal seal;
  seal.step = 1;
  seal.epoch = record.epoch;
  seal.writer = 1;
  world_.SendUp(world_.node("n0"), TrainerFrame{record.uid, record.epoch, record.attempt, 0, seal});
  world_.SendUp(world_.node("n0"), TrainerFrame{record.uid, record.epoch, record.attempt, 1, seal});
  world_.Settle();
  EXPECT_EQ(world_.controller().stale_refused(), 2);
}

TEST_F(JobControllerTest, ACorruptCheckpointIsMarkedAndTheOneBeforeIsUsed) {
  AddNodes(1);
  ASSERT_TRUE(world_.Submit(world_.Spec("job", {1}, 50)).ok());
  world_.TrainSteps(11);
  EXPECT_EQ(world_.Job("job").record.committed_step, 10);
  world_.KillTrainer(0);
  world_.Advance(100);
  EXPECT_EQ(world_.launches.back().trainers[0].first_step, 10);
  world_.KillTrainer(0, 17, 0, "CheckpointCorrupt");
  world_.Advance(20'000);
  EXPECT_TRUE(world_.keeper.bad.contains({"job", 10}));
  EXPECT_EQ(world_.launches.back().trainers[0].first_step, 5);
  EXPECT_EQ(world_.Job("job").record.committed_step, 5);
  EXPECT_THAT(world_.EventTypes("job"), Contains("RolledBack"));
  // Saved again, the record of the bad one says so.
  world_.keeper.steps["job"].erase(10);
  world_.keeper.bad.clear();
  world_.TrainSteps(6);
  int64_t good = 0;
  for (const SaveRecord& save : world_.controller().Saves(world_.Job("job").record.uid)) {
    good += save.step == 10 && save.state == SaveState::kCommitted ? 1 : 0;
  }
  EXPECT_EQ(good, 1);
}

TEST_F(JobControllerTest, ADataErrorOfAllNodesThereAreFailsTheJobTheSecondTimeAndIsTheUsers) {
  AddNodes(2);
  ASSERT_TRUE(world_.Submit(world_.Spec("job", {2}, 50)).ok());
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(State("job"), JobState::kRunning);
    world_.TrainSteps(1);
    const JobRecord record = world_.Job("job").record;
    world_.SendUp(world_.node("n1"),
                  TrainerFrame{record.uid,
                               record.epoch,
                               record.attempt,
                               1,
                               TrainerFailed{13, "DataError", "corpus.bin: truncated"}});
    world_.Settle();
    world_.Advance(6000);
  }
  EXPECT_EQ(State("job"), JobState::kFailed);
  EXPECT_EQ(world_.Job("job").record.failure_class, "user");
  EXPECT_EQ(world_.Job("job").record.reason, "DataError");
  EXPECT_THAT(world_.Job("job").record.message, HasSubstr("corpus.bin: truncated"));
}

TEST_F(JobControllerTest, APlanThatCannotBeMadeFailsTheJobWithItsField) {
  AddNodes(1);
  world_.planner.failure =
      absl::InvalidArgumentError("spec.training.globalBatch: must be a multiple of 8");
  ASSERT_TRUE(world_.Submit(world_.Spec("job", {1}, 50)).ok());
  world_.Advance(30'000);
  EXPECT_EQ(State("job"), JobState::kFailed);
  EXPECT_THAT(world_.Job("job").record.message, HasSubstr("globalBatch"));
}

TEST_F(JobControllerTest, AJobThatOnlyCrashesIsGivenUp) {
  AddNodes(1);
  ASSERT_TRUE(world_.Submit(world_.Spec("job", {1}, 50)).ok());
  for (int i = 0; i < 40 && State("job") != JobState::kFailed; ++i) {
    world_.KillTrainer(0);
    world_.Advance(15'000);
  }
  EXPECT_EQ(State("job"), JobState::kFailed);
  EXPECT_EQ(world_.Job("job").record.reason, "NoProgress");
  EXPECT_EQ(world_.Job("job").record.failure_class, "infrastructure");
}

TEST_F(JobControllerTest, AStuckEpochIsBrokenAndTheSuspectNamed) {
  world_.options.step_timeout_ms = 30'000;
  world_.StartCoordinator();
  AddNodes(2);
  ASSERT_TRUE(world_.Submit(world_.Spec("job", {2}, 50)).ok());
  world_.TrainSteps(6);
  world_.Advance(31'000);
  EXPECT_EQ(world_.Job("job").record.budget.last_reason, "Stall");
  EXPECT_EQ(world_.Job("job").record.attempt, 2);
}

TEST_F(JobControllerTest, TwoJobsNeverShareADevice) {
  AddNodes(2);
  ASSERT_TRUE(world_.Submit(world_.Spec("one", {1}, 5)).ok());
  ASSERT_TRUE(world_.Submit(world_.Spec("two", {1}, 5)).ok());
  ASSERT_TRUE(world_.Submit(world_.Spec("three", {1}, 5)).ok());
  EXPECT_EQ(State("one"), JobState::kRunning);
  EXPECT_EQ(State("two"), JobState::kRunning);
  EXPECT_EQ(State("three"), JobState::kQueued);
  EXPECT_EQ(world_.node("n0").trainers.size(), 1U);
  EXPECT_EQ(world_.node("n1").trainers.size(), 1U);
  world_.TrainSteps(12);
  EXPECT_EQ(State("three"), JobState::kSucceeded);
}

TEST_F(JobControllerTest, AFailedFinalSaveIsTriedAgain) {
  AddNodes(1);
  ASSERT_TRUE(world_.Submit(world_.Spec("job", {1}, 7)).ok());
  world_.TrainSteps(6);
  world_.keeper.commit_failure = absl::ResourceExhaustedError("disk full");
  world_.TrainSteps(1);
  EXPECT_EQ(State("job"), JobState::kRunning) << "restarted from step 5";
  EXPECT_THAT(world_.EventTypes("job"), Contains("CheckpointFailed"));
  world_.keeper.commit_failure = absl::OkStatus();
  world_.TrainSteps(2);
  EXPECT_EQ(State("job"), JobState::kSucceeded);
  ExpectWholeHistory("job", 7);
}

TEST_F(JobControllerTest, RetentionIsNotedInTheListOfCheckpoints) {
  AddNodes(1);
  ASSERT_TRUE(world_.Submit(world_.Spec("job", {1}, 40)).ok());
  world_.TrainSteps(40);
  const std::vector<SaveRecord> saves = world_.controller().Saves(world_.Job("job").record.uid);
  const auto kept = std::count_if(saves.begin(), saves.end(), [](const SaveRecord& save) {
    return save.state == SaveState::kCommitted;
  });
  EXPECT_EQ(kept, 3);
  EXPECT_EQ(saves.size(), 8U);
}

TEST_F(JobControllerTest, AFullDiskRefusesRequestsAndRunningJobsGoOn) {
  AddNodes(2);
  ASSERT_TRUE(world_.Submit(world_.Spec("job", {1, 2}, 20)).ok());
  world_.disk.fault = [](int64_t) {
    return absl::ResourceExhaustedError("database or disk is full");
  };
  EXPECT_EQ(world_.Submit(world_.Draft(world_.Spec("new", {1}, 5), "r")).status().code(),
            absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(world_.Cancel({"default", "job"}, "").status().code(),
            absl::StatusCode::kResourceExhausted);
  world_.TrainSteps(3);
  EXPECT_EQ(State("job"), JobState::kRunning);
  EXPECT_EQ(world_.Job("job").progress.step, 3);
  // A failure that cannot be recorded changes nothing until it can.
  const size_t launches = world_.launches.size();
  world_.KillTrainer(1);
  world_.Advance(200);
  EXPECT_EQ(world_.launches.size(), launches);
  world_.disk.fault = nullptr;
  world_.Advance(200);
  EXPECT_EQ(State("job"), JobState::kRunning);
  EXPECT_EQ(world_.Job("job").record.attempt, 2);
  world_.TrainSteps(20);
  EXPECT_EQ(State("job"), JobState::kSucceeded);
  ExpectWholeHistory("job", 20);
}

TEST_F(JobControllerTest, AnotherCoordinatorOnTheSameDatabaseEndsThisOne) {
  world_.disk.term += 1;
  EXPECT_EQ(world_.Submit(world_.Draft(world_.Spec("new", {1}, 5), "r")).status().code(),
            absl::StatusCode::kAborted);
  EXPECT_TRUE(world_.fatal);
}

TEST_F(JobControllerTest, AStrangersDaemonIsRefused) {
  HelloMessage hello;
  hello.node_id = "x";
  hello.incarnation = "y";
  hello.protocol = 1;
  hello.cluster_id = "another cluster";
  FakeNode& node = world_.AddNode("x");
  world_.controller().OnHello(node.stream, hello);
  world_.Settle();
  EXPECT_THAT(node.rejected, HasSubstr("another cluster"));
}

}  // namespace
}  // namespace ravel::coordinator
