// Progress never falls by itself: what the controller does when the checkpoint store is away, its
// steps are damaged, or a person sets a job back.

#include <algorithm>

#include <absl/strings/str_cat.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "coordinator/jobs/job_controller.h"
#include "tests/coordinator/jobs/fake_world.h"

namespace ravel::coordinator {
namespace {

using ::testing::HasSubstr;

class CheckpointSafetyTest : public ::testing::Test {
 protected:
  void SetUp() override {
    world_.StartCoordinator();
    world_.AddNode("n0");
  }
  JobRecord Job() { return world_.Job("job").record; }
  // Steps are committed at 5 and 10, step 11 is done.
  void TrainToEleven() {
    ASSERT_TRUE(world_.Submit(world_.Spec("job", {1}, 50)).ok());
    world_.TrainSteps(11);
    ASSERT_EQ(Job().committed_step, 10);
  }
  int64_t CountEvents(const std::string& type, const std::string& reason) {
    const std::vector<JobEventRecord> events = world_.Events("job");
    return std::count_if(events.begin(), events.end(), [&](const JobEventRecord& event) {
      return (type.empty() || event.type == type) && event.reason == reason;
    });
  }
  int64_t FirstStepOfLastLaunch() { return world_.launches.back().trainers[0].first_step; }

  FakeWorld world_;
};

TEST_F(CheckpointSafetyTest, AStoreThatIsAwayIsWaitedForWithOneEventAndNoCharge) {
  TrainToEleven();
  const size_t launches = world_.launches.size();
  const int64_t prepared = world_.keeper.prepared;
  world_.keeper.restore_failure = absl::UnavailableError("/ckpt/job/OWNER is missing");
  world_.KillTrainer(0);
  world_.Advance(100'000);
  EXPECT_EQ(Job().state, JobState::kRecovering);
  EXPECT_EQ(Job().reason, "StoreUnavailable");
  EXPECT_THAT(Job().message, HasSubstr("OWNER is missing"));
  EXPECT_EQ(world_.launches.size(), launches) << "never from initial weights";
  EXPECT_EQ(CountEvents("", "StoreUnavailable"), 1);
  EXPECT_EQ(Job().budget.used, 1) << "the crash, not the wait";
  const int64_t tries = world_.keeper.prepared - prepared;
  EXPECT_GE(tries, 3);
  EXPECT_LE(tries, 9) << "with back-off";
  world_.keeper.restore_failure = absl::OkStatus();
  world_.Advance(61'000);
  EXPECT_EQ(Job().state, JobState::kRunning) << "goes on by itself";
  EXPECT_EQ(FirstStepOfLastLaunch(), 10);
  EXPECT_EQ(CountEvents("", "StoreUnavailable"), 1);
}

TEST_F(CheckpointSafetyTest, AStoreThatIsAwayBeforeTheFirstLaunchIsWaitedForToo) {
  world_.keeper.restore_failure = absl::UnavailableError("not mounted");
  ASSERT_TRUE(world_.Submit(world_.Spec("job", {1}, 50)).ok());
  world_.Advance(20'000);
  EXPECT_TRUE(world_.launches.empty());
  EXPECT_EQ(CountEvents("", "StoreUnavailable"), 1);
  world_.keeper.restore_failure = absl::OkStatus();
  world_.Advance(61'000);
  EXPECT_EQ(Job().state, JobState::kRunning);
}

TEST_F(CheckpointSafetyTest, TrainersThatCannotReadTheStoreCostNothing) {
  TrainToEleven();
  for (int i = 0; i < 4; ++i) {
    world_.KillTrainer(0, 17, 0, "StoreUnavailable");
    world_.Advance(61'000);
  }
  EXPECT_EQ(Job().budget.used, 0);
  EXPECT_EQ(Job().state, JobState::kRunning);
  EXPECT_EQ(Job().committed_step, 10);
}

TEST_F(CheckpointSafetyTest, WithoutAGoodStepTheJobFailsAndNamesEach) {
  TrainToEleven();
  world_.keeper.bad = {{"job", 5}, {"job", 10}};
  const size_t launches = world_.launches.size();
  world_.KillTrainer(0);
  world_.Advance(10'000);
  EXPECT_EQ(Job().state, JobState::kFailed);
  EXPECT_EQ(Job().reason, "NoGoodCheckpoint");
  EXPECT_THAT(Job().message, HasSubstr("step 5: checksum; step 10: checksum"));
  EXPECT_EQ(Job().committed_step, 10) << "what it had reached is still known";
  EXPECT_EQ(world_.launches.size(), launches);
}

TEST_F(CheckpointSafetyTest, AStepOfOtherNumericsIsResumedOnlyIfTheJobAllowsIt) {
  TrainToEleven();
  const size_t launches = world_.launches.size();
  world_.keeper.numerics_change = "virtualRanks was 4 and is 8";
  world_.KillTrainer(0);
  world_.Advance(10'000);
  EXPECT_EQ(Job().state, JobState::kFailed);
  EXPECT_EQ(Job().reason, "NumericsChanged");
  EXPECT_EQ(Job().failure_class, "user");
  EXPECT_THAT(Job().message, HasSubstr("/ckpt/job/step-10 was computed with other numerics: "));
  EXPECT_THAT(Job().message, HasSubstr("virtualRanks was 4 and is 8"));
  EXPECT_EQ(Job().committed_step, 10);
  EXPECT_EQ(world_.launches.size(), launches);
  // Tried again as it is, it is refused again.
  ASSERT_TRUE(world_.Retry({"default", "job"}, {"again"}).ok());
  world_.Advance(10'000);
  EXPECT_EQ(Job().reason, "NumericsChanged");
  EXPECT_EQ(world_.launches.size(), launches);
  EXPECT_EQ(CountEvents("Warning", "NumericsChanged"), 0);
  // With the permission it goes on, and says what changed.
  ASSERT_TRUE(world_
                  .Retry({"default", "job"},
                         {.request_id = "allowed",
                          .allow_numerics_change = true,
                          .canonical = "canonical with it"})
                  .ok());
  world_.Advance(10'000);
  EXPECT_EQ(Job().state, JobState::kRunning);
  EXPECT_EQ(FirstStepOfLastLaunch(), 10);
  EXPECT_TRUE(Job().spec.checkpoint.allow_numerics_change);
  EXPECT_EQ(Job().canonical, "canonical with it");
  EXPECT_EQ(CountEvents("Warning", "NumericsChanged"), 1);
}

TEST_F(CheckpointSafetyTest, AnotherTryMayShareLayersAmongOtherNumbersOfRanks) {
  TrainToEleven();
  world_.keeper.numerics_change = "anything";
  world_.KillTrainer(0);
  world_.Advance(10'000);
  ASSERT_EQ(Job().state, JobState::kFailed);
  world_.keeper.numerics_change.clear();
  const std::vector<int64_t> sizes = Job().spec.elastic.sizes;
  const RetryDraft draft = {.request_id = "shared",
                            .sharing = RetryDraft::Sharing{.tensor = 2,
                                                           .sequence_parallel = true,
                                                           .tensor_chunks = 2,
                                                           .device_count = Job().spec.device_count,
                                                           .sizes = sizes},
                            .canonical = "canonical of one"};
  ASSERT_TRUE(world_.Retry({"default", "job"}, draft).ok());
  world_.Advance(10'000);
  EXPECT_EQ(Job().state, JobState::kQueued) << "one device is no group of two";
  EXPECT_EQ(Job().canonical, "canonical of one");
  EXPECT_EQ(Job().spec.tensor, 2) << "what is planned, not only what is shown";
  EXPECT_TRUE(Job().spec.sequence_parallel);
  EXPECT_EQ(Job().spec.tensor_chunks, 2);
  EXPECT_EQ(Job().spec.elastic.sizes, sizes);
  EXPECT_FALSE(Job().spec.checkpoint.allow_numerics_change);
  // The same request is the same answer; another change under its name is refused.
  EXPECT_TRUE(world_.Retry({"default", "job"}, draft).ok());
  RetryDraft other = draft;
  other.sharing->tensor = 4;
  EXPECT_FALSE(world_.Retry({"default", "job"}, other).ok());
}

TEST_F(CheckpointSafetyTest, AJobThatIsDoneResumesNothingWhateverItsNumerics) {
  TrainToEleven();
  world_.keeper.numerics_change = "device was gpu and is cpu";
  world_.keeper.steps["job"][50] = 1;
  world_.KillTrainer(0);
  world_.Advance(10'000);
  EXPECT_EQ(Job().state, JobState::kSucceeded);
}

TEST_F(CheckpointSafetyTest, AFallbackIsToldWithItsReason) {
  TrainToEleven();
  world_.keeper.bad = {{"job", 10}};
  world_.KillTrainer(0);
  world_.Advance(10'000);
  EXPECT_EQ(FirstStepOfLastLaunch(), 5);
  for (const JobEventRecord& event : world_.Events("job")) {
    if (event.type == "RolledBack") {
      EXPECT_EQ(event.reason, "CheckpointCorrupt");
      EXPECT_THAT(event.message, HasSubstr("step 10: checksum"));
    }
  }
  EXPECT_EQ(CountEvents("RolledBack", "CheckpointCorrupt"), 1);
}

TEST_F(CheckpointSafetyTest, ATrainersWordAloneCondemnsNoStep) {
  TrainToEleven();
  for (const StepVerdict verdict : {StepVerdict::kGood, StepVerdict::kUnreadable}) {
    world_.keeper.verdict = verdict;
    world_.KillTrainer(0);
    world_.Advance(61'000);
    const int64_t used = Job().budget.used;
    ASSERT_EQ(Job().state, JobState::kRunning);
    // At once after the launch, while it restores.
    world_.KillTrainer(0, 17, 0, "CheckpointCorrupt");
    world_.Advance(61'000);
    EXPECT_EQ(FirstStepOfLastLaunch(), 10);
    EXPECT_EQ(Job().budget.used - used, verdict == StepVerdict::kGood ? 1 : 0);
  }
  EXPECT_EQ(CountEvents("RolledBack", "CheckpointCorrupt"), 0);
}

TEST_F(CheckpointSafetyTest, ASaveThatFinishedUnheardIsCommittedBeforeTheNextLaunch) {
  TrainToEleven();
  world_.keeper.sealed["job"] = {{11, Job().epoch}};
  world_.KillTrainer(0);
  world_.Advance(10'000);
  EXPECT_EQ(FirstStepOfLastLaunch(), 11);
  EXPECT_EQ(Job().committed_step, 11);
  const std::vector<SaveRecord> saves = world_.controller().Saves(Job().uid);
  EXPECT_EQ(std::count_if(saves.begin(),
                          saves.end(),
                          [](const SaveRecord& save) {
                            return save.step == 11 && save.state == SaveState::kCommitted;
                          }),
            1);
}

TEST_F(CheckpointSafetyTest, ACancelledJobKeepsItsLastFinishedSave) {
  TrainToEleven();
  world_.keeper.sealed["job"] = {{11, Job().epoch}};
  ASSERT_TRUE(world_.Cancel({"default", "job"}, "").ok());
  world_.Advance(1000);
  EXPECT_EQ(Job().state, JobState::kCancelled);
  EXPECT_EQ(Job().committed_step, 11);
}

TEST_F(CheckpointSafetyTest, RollbackSetsARunningJobBackUnchargedAndOnce) {
  TrainToEleven();
  const JobKey key{"default", "job"};
  const int64_t epoch = Job().epoch;
  ASSERT_TRUE(world_.Rollback(key, "r1", 5, "/ckpt/job/step-5", "bad data").ok());
  ASSERT_TRUE(world_.Rollback(key, "r1", 5, "/ckpt/job/step-5", "bad data").ok())
      << "the same request again";
  EXPECT_TRUE(
      absl::IsAlreadyExists(world_.Rollback(key, "r1", 10, "/ckpt/job/step-10", "").status()));
  EXPECT_EQ(Job().committed_step, 5);
  world_.Advance(1000);
  EXPECT_EQ(Job().state, JobState::kRunning);
  EXPECT_EQ(FirstStepOfLastLaunch(), 5);
  EXPECT_EQ(Job().epoch, epoch + 1);
  EXPECT_EQ(Job().budget.used, 0);
  EXPECT_EQ(Job().restarts, 0);
  EXPECT_EQ(CountEvents("RolledBack", "UserRequest"), 1);
  EXPECT_EQ(world_.keeper.rolled_back, std::vector<int64_t>{5}) << "moved aside once";
  for (const SaveRecord& save : world_.controller().Saves(Job().uid)) {
    EXPECT_EQ(save.state, save.step > 5 ? SaveState::kRolledBack : SaveState::kCommitted);
  }
  world_.TrainSteps(46);
  EXPECT_EQ(Job().state, JobState::kSucceeded);
  EXPECT_EQ(world_.History("job").size(), 50U) << "every step once";
}

TEST_F(CheckpointSafetyTest, ARollbackSurvivesACrashOfTheCoordinator) {
  TrainToEleven();
  ASSERT_TRUE(world_.Rollback({"default", "job"}, "r1", 5, "/ckpt/job/step-5", "").ok());
  world_.KillCoordinator();
  world_.StartCoordinator();
  world_.Connect(world_.node("n0"));
  world_.Advance(5000);
  EXPECT_EQ(Job().state, JobState::kRunning);
  EXPECT_EQ(FirstStepOfLastLaunch(), 5);
  EXPECT_EQ(world_.keeper.rolled_back, std::vector<int64_t>{5});
}

TEST_F(CheckpointSafetyTest, ARollbackIsRefusedWhereItMeansNothing) {
  TrainToEleven();
  const JobKey key{"default", "job"};
  EXPECT_TRUE(absl::IsFailedPrecondition(world_.Rollback(key, "r1", 11, "/x", "").status()))
      << "not a commit";
  ASSERT_TRUE(world_.Cancel(key, "").ok());
  world_.Advance(1000);
  const absl::Status over = world_.Rollback(key, "r2", 5, "/x", "").status();
  EXPECT_TRUE(absl::IsFailedPrecondition(over));
  EXPECT_THAT(std::string(over.message()), HasSubstr("ravelctl retry"));
}

TEST_F(CheckpointSafetyTest, ARollbackFreesAJobThatWaitsForAStepThatCannotBeRead) {
  TrainToEleven();
  world_.keeper.restore_failure = absl::UnavailableError("step 10: model/x: missing");
  world_.KillTrainer(0);
  world_.Advance(10'000);
  ASSERT_EQ(Job().reason, "StoreUnavailable");
  world_.keeper.restore_failure = absl::OkStatus();
  ASSERT_TRUE(world_.Rollback({"default", "job"}, "r1", 5, "/ckpt/job/step-5", "").ok());
  world_.Advance(61'000);
  EXPECT_EQ(FirstStepOfLastLaunch(), 5);
}

TEST_F(CheckpointSafetyTest, RowsOfStepsThatAreGoneAreCorrectedAtTheStart) {
  TrainToEleven();
  // Retention deleted step 5, and the coordinator died before it could say so.
  world_.KillCoordinator();
  world_.keeper.steps["job"].erase(5);
  world_.StartCoordinator();
  world_.Settle();
  const auto state_of = [this](int64_t step) {
    for (const SaveRecord& save : world_.controller().Saves(Job().uid)) {
      if (save.step == step) {
        return save.state;
      }
    }
    return SaveState::kIntended;
  };
  EXPECT_EQ(state_of(5), SaveState::kDeleted);
  EXPECT_EQ(state_of(10), SaveState::kCommitted);
  // But an empty store says nothing about steps.
  world_.KillCoordinator();
  world_.keeper.steps["job"].clear();
  world_.StartCoordinator();
  world_.Settle();
  EXPECT_EQ(state_of(10), SaveState::kCommitted);
}

}  // namespace
}  // namespace ravel::coordinator
