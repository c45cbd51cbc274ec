// Saves that fail are heard: events, counters, conditions, what happens to the bytes.

#include <algorithm>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/coordinator/jobs/fake_world.h"

namespace ravel::coordinator {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::SizeIs;

class SaveFailuresTest : public ::testing::Test {
 protected:
  SaveFailuresTest() {
    world_.StartCoordinator();
    world_.AddNode("n0");
    world_.AddNode("n1");
  }
  void Start(const plan::JobSpec& spec) {
    ASSERT_TRUE(world_.Submit(spec).ok());
    world_.TrainSteps(2);
  }
  JobView Job() { return world_.Job("job"); }
  TrainerFrame FrameOf(int64_t rank, decltype(TrainerFrame::frame) frame) {
    const JobRecord record = Job().record;
    return {record.uid, record.epoch, record.attempt, rank, std::move(frame)};
  }
  FakeNode& NodeOf(int64_t rank) {
    for (const auto& [key, trainer] : world_.node("n0").trainers) {
      if (trainer.rank == rank) {
        return world_.node("n0");
      }
    }
    return world_.node("n1");
  }
  void Say(int64_t rank, decltype(TrainerFrame::frame) frame) {
    world_.SendUp(NodeOf(rank), FrameOf(rank, std::move(frame)));
    world_.Settle();
  }
  void Fail(int64_t rank, int64_t step, const std::string& reason = "StoreFull") {
    Say(rank, SaveFailed{.step = step, .reason = reason, .message = "no space left"});
  }
  ckpt::Seal SealOf(int64_t rank, int64_t step) {
    ckpt::Seal seal;
    seal.step = step;
    seal.epoch = Job().record.epoch;
    seal.attempt = 1;
    seal.writer = rank;
    return seal;
  }
  std::vector<JobEventRecord> EventsOf(const std::string& type) {
    std::vector<JobEventRecord> events = world_.Events("job");
    std::erase_if(events, [&](const JobEventRecord& event) { return event.type != type; });
    return events;
  }
  JobCondition Fresh() {
    for (const JobCondition& condition : Job().conditions) {
      if (condition.type == "CheckpointFresh") {
        return condition;
      }
    }
    return {};
  }

  FakeWorld world_;
};

TEST_F(SaveFailuresTest, OneRanksFailureEndsTheSaveForAllAndIsToldAtOnce) {
  Start(world_.Spec("job", {2}, 50));
  const auto operation = world_.CheckpointNow({"default", "job"}, "now");
  ASSERT_TRUE(operation.ok());
  Say(0, SaveStarted{.step = 3, .sequence = 1});
  Say(1, SaveStarted{.step = 3, .sequence = 1});
  world_.commit_results.clear();
  Fail(1, 3);
  ASSERT_THAT(EventsOf("CheckpointFailed"), SizeIs(1));
  const JobEventRecord event = EventsOf("CheckpointFailed").front();
  EXPECT_EQ(event.reason, "StoreFull");
  EXPECT_EQ(event.rank, 1);
  EXPECT_EQ(event.node, "n1");
  EXPECT_EQ(event.step, 3);
  EXPECT_THAT(event.message, HasSubstr("no space left"));
  ASSERT_THAT(world_.commit_results, SizeIs(1)) << "rank 0 is told to abandon it";
  EXPECT_FALSE(world_.commit_results.front().committed);
  EXPECT_EQ(world_.commit_results.front().step, 3);
  EXPECT_THAT(world_.keeper.removed,
              Contains(std::make_tuple(int64_t{3}, Job().record.epoch, int64_t{1})));
  const OperationRecord done = *world_.controller().GetOperation(operation->id);
  EXPECT_EQ(done.state, OperationState::kFailed);
  EXPECT_THAT(done.reason, HasSubstr("StoreFull"));
  EXPECT_EQ(Job().failed_saves, 1);
  EXPECT_FALSE(Fresh().status);
  EXPECT_EQ(Fresh().reason, "SaveFailed");
  EXPECT_EQ(Job().record.state, JobState::kRunning);
  // The next save makes up for it.
  world_.TrainSteps(3);
  EXPECT_EQ(Job().record.committed_step, 5);
  EXPECT_TRUE(Fresh().status);
  EXPECT_EQ(Job().failed_saves, 1);
}

TEST_F(SaveFailuresTest, FailuresOfAllRanksAreOneFailureAndTheFolderGoesTwice) {
  Start(world_.Spec("job", {2}, 50));
  Fail(0, 3);
  Fail(1, 3);
  Fail(1, 3);
  EXPECT_THAT(EventsOf("CheckpointFailed"), SizeIs(1));
  EXPECT_EQ(Job().failed_saves, 1);
  EXPECT_THAT(world_.keeper.removed, SizeIs(2)) << "at once, and when the last rank has stopped";
}

TEST_F(SaveFailuresTest, AFullStoreIsGivenRoomAndTheSaveIsAskedForAgain) {
  Start(world_.Spec("job", {2}, 50));
  for (int64_t step = -5; step < 0; ++step) {
    world_.keeper.steps["job"][step] = 1;  // more than retention keeps
  }
  const int retained = world_.keeper.retained;
  Fail(0, 2);
  EXPECT_EQ(world_.keeper.retained, retained + 1);
  world_.TrainSteps(1);
  EXPECT_EQ(Job().record.committed_step, 3);
  Fail(0, 4, "StoreUnavailable");
  EXPECT_EQ(world_.keeper.retained, retained + 2) << "one for the commit, none for the failure";
}

TEST_F(SaveFailuresTest, ARetentionThatFailsIsTriedAgainWithoutACommit) {
  Start(world_.Spec("job", {2}, 50));
  world_.keeper.retain_failure = absl::UnavailableError("the store is away");
  for (int64_t step = -5; step < 0; ++step) {
    world_.keeper.steps["job"][step] = 1;  // more than retention keeps
  }
  world_.TrainSteps(3);
  ASSERT_EQ(Job().record.committed_step, 5);
  world_.Kill(world_.node("n0"));
  world_.Kill(world_.node("n1"));
  world_.Advance(10'000);
  ASSERT_EQ(Job().record.state, JobState::kQueued) << "nothing calls for a look at the job";
  const int tried = world_.keeper.retained;
  world_.Advance(60'000);
  EXPECT_GE(world_.keeper.retained, tried + 2);
  EXPECT_LE(world_.keeper.retained, tried + 4) << "each later than the one before";
  EXPECT_GT(static_cast<int64_t>(world_.keeper.steps["job"].size()), 5);
  world_.keeper.retain_failure = absl::OkStatus();
  world_.Advance(80'000);
  EXPECT_EQ(static_cast<int64_t>(world_.keeper.steps["job"].size()),
            Job().record.spec.checkpoint.keep_last);
  const int done = world_.keeper.retained;
  world_.Advance(1'000'000);
  EXPECT_EQ(world_.keeper.retained, done);
}

TEST_F(SaveFailuresTest, FailedSavesAreKnownAfterARestart) {
  Start(world_.Spec("job", {2}, 50));
  Fail(0, 3);
  ASSERT_EQ(Job().failed_saves, 1);
  world_.StartCoordinator();
  EXPECT_EQ(Job().failed_saves, 1);
}

TEST_F(SaveFailuresTest, SealsThatComeAgainAfterTheirCommitAreAnsweredAndOpenNothing) {
  Start(world_.Spec("job", {2}, 50));
  world_.TrainSteps(3);
  ASSERT_EQ(Job().record.committed_step, 5);
  const size_t events = world_.Events("job").size();
  world_.commit_results.clear();
  Say(0, SealOf(0, 5));
  Say(1, SealOf(1, 5));
  ASSERT_THAT(world_.commit_results, SizeIs(1)) << "to rank 0 for its seal, rank 1 for its own";
  EXPECT_TRUE(world_.commit_results.front().committed);
  world_.Advance(world_.options.save_timeout_ms + 1000);
  EXPECT_EQ(world_.Events("job").size(), events) << "no save was opened that could time out";
  EXPECT_EQ(world_.controller().Saves(Job().record.uid).size(), 1U);
  world_.TrainSteps(5);
  EXPECT_EQ(Job().record.committed_step, 10);
}

TEST_F(SaveFailuresTest, SealsOfAOneRankJobThatComeAgainDoNotTakeBackItsCommit) {
  plan::JobSpec spec = world_.Spec("job", {1}, 50);
  spec.checkpoint.keep_last = 1;
  Start(spec);
  world_.TrainSteps(8);
  ASSERT_EQ(Job().record.committed_step, 10);
  world_.commit_results.clear();
  Say(0, SealOf(0, 5));  // deleted by retention
  Say(0, SealOf(0, 10));
  ASSERT_THAT(world_.commit_results, SizeIs(2));
  EXPECT_FALSE(world_.commit_results[0].committed);
  EXPECT_TRUE(world_.commit_results[1].committed);
  const std::vector<SaveRecord> saves = world_.controller().Saves(Job().record.uid);
  ASSERT_THAT(saves, SizeIs(2));
  EXPECT_EQ(saves[0].state, SaveState::kDeleted);
  EXPECT_EQ(saves[1].state, SaveState::kCommitted);
  EXPECT_THAT(world_.EventTypes("job"), Not(Contains("CheckpointFailed")));
}

TEST_F(SaveFailuresTest, ASealThatFollowsTheFailureOfItsSaveIsRefused) {
  Start(world_.Spec("job", {2}, 50));
  Fail(1, 3);
  world_.commit_results.clear();
  Say(0, SealOf(0, 3));
  ASSERT_THAT(world_.commit_results, SizeIs(1));
  EXPECT_FALSE(world_.commit_results.front().committed);
  EXPECT_THAT(world_.commit_results.front().reason, HasSubstr("StoreFull"));
  EXPECT_EQ(Job().record.committed_step, -1);
}

TEST_F(SaveFailuresTest, ASaveThatARankNeverEndsIsToldWithTheRank) {
  world_.no_seals = {1};
  Start(world_.Spec("job", {2}, 500));
  world_.TrainSteps(3);
  EXPECT_EQ(Job().record.committed_step, -1);
  world_.Advance(world_.options.save_timeout_ms + 100);
  ASSERT_THAT(EventsOf("CheckpointFailed"), SizeIs(1));
  EXPECT_EQ(EventsOf("CheckpointFailed").front().reason, "SaveTimeout");
  EXPECT_THAT(EventsOf("CheckpointFailed").front().message, HasSubstr("without a seal: 1"));
  EXPECT_THAT(world_.keeper.removed, SizeIs(1));
  world_.no_seals.clear();
  world_.TrainSteps(5);
  EXPECT_EQ(Job().record.committed_step, 10);
}

TEST_F(SaveFailuresTest, SkippedSavesAreCountedAndToldOnceInAWhile) {
  Start(world_.Spec("job", {2}, 500));
  for (int64_t step = 10; step < 20; ++step) {
    const SaveFailed skipped = {
        .step = step, .reason = "SaveSkipped", .message = "still being written", .skipped = true};
    Say(0, skipped);
    Say(1, skipped);
  }
  EXPECT_EQ(Job().skipped_saves, 10);
  EXPECT_THAT(EventsOf("SaveSkipped"), SizeIs(1));
  EXPECT_EQ(Job().failed_saves, 0);
  world_.Advance(60'000);
  Say(0, SaveFailed{.step = 20, .reason = "SaveSkipped", .message = "again", .skipped = true});
  EXPECT_THAT(EventsOf("SaveSkipped"), SizeIs(2));
}

TEST_F(SaveFailuresTest, AJobWhoseSavesKeepFailingEndsWhenItSaysSo) {
  plan::JobSpec spec = world_.Spec("job", {2}, 50);
  spec.checkpoint.max_failed_saves = 1;
  Start(spec);
  Fail(0, 3);
  world_.Advance(100);
  EXPECT_EQ(Job().record.state, JobState::kRunning);
  Fail(0, 4);
  world_.Advance(1000);
  EXPECT_EQ(Job().record.state, JobState::kFailed);
  EXPECT_EQ(Job().record.reason, "SavesFailing");
  EXPECT_EQ(Job().record.failure_class, "infrastructure");
}

TEST_F(SaveFailuresTest, AJobWithoutACommitForTooLongEndsWhenItSaysSo) {
  plan::JobSpec spec = world_.Spec("job", {2}, 50);
  spec.checkpoint.every_steps = 0;
  spec.checkpoint.max_age_ms = 30'000;
  Start(spec);
  world_.Advance(29'000);
  EXPECT_EQ(Job().record.state, JobState::kRunning);
  world_.Advance(2000);
  EXPECT_EQ(Job().record.state, JobState::kFailed);
  EXPECT_EQ(Job().record.reason, "CheckpointTooOld");
}

TEST_F(SaveFailuresTest, AnOperationEndsAtItsDeadlineAndSaysWhatItWaitedFor) {
  world_.no_seals = {1};
  Start(world_.Spec("job", {2}, 50));
  const auto operation = world_.CheckpointNow({"default", "job"}, "now", 5000);
  ASSERT_TRUE(operation.ok());
  const auto other = world_.CheckpointNow({"default", "job"}, "later");
  ASSERT_TRUE(other.ok());
  world_.Advance(4000);
  EXPECT_EQ(world_.controller().GetOperation(operation->id)->state, OperationState::kAccepted);
  world_.Advance(1100);
  OperationRecord ended = *world_.controller().GetOperation(operation->id);
  EXPECT_EQ(ended.state, OperationState::kFailed);
  EXPECT_EQ(ended.reason, "DeadlineExceeded: after 5 s it is waiting for the step boundary");
  EXPECT_EQ(world_.controller().GetOperation(other->id)->state, OperationState::kAccepted)
      << "ten minutes, when the request does not say";
  const auto written = world_.CheckpointNow({"default", "job"}, "third", 5000);
  ASSERT_TRUE(written.ok());
  world_.Settle();
  world_.TrainSteps(1);
  world_.Advance(5100);
  ended = *world_.controller().GetOperation(written->id);
  EXPECT_EQ(ended.state, OperationState::kFailed);
  EXPECT_THAT(ended.reason, HasSubstr("sealing step 3: ranks 1 are missing"));
}

TEST_F(SaveFailuresTest, ARequestJoinsTheSaveThatEndsARun) {
  ASSERT_TRUE(world_.Submit(world_.Spec("job", {1, 2, 3}, 50)).ok());
  world_.TrainSteps(7);
  ASSERT_EQ(Job().record.committed_step, 5);
  world_.AddNode("n2");
  world_.Advance(100);
  ASSERT_EQ(Job().record.state, JobState::kResizing);
  const auto operation = world_.CheckpointNow({"default", "job"}, "now");
  ASSERT_TRUE(operation.ok());
  EXPECT_EQ(operation->state, OperationState::kAccepted) << "steps were trained since step 5";
  world_.TrainSteps(1);
  const OperationRecord done = *world_.controller().GetOperation(operation->id);
  EXPECT_EQ(done.state, OperationState::kCommitted);
  EXPECT_EQ(done.step, 8);
}

}  // namespace
}  // namespace ravel::coordinator
