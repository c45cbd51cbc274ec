// Time between a decision and the disk: nothing is done or answered before, nothing is
// decided twice, and what comes meanwhile waits for its turn.

#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "tests/coordinator/jobs/fake_world.h"

namespace ravel::coordinator {
namespace {

template <typename Value>
using Told = std::optional<absl::StatusOr<Value>>;

class WritesUnderWayTest : public ::testing::Test {
 protected:
  void SetUp() override {
    world_.StartCoordinator();
    world_.Advance(20);  // the first sweep of old rows is behind it
  }
  // Makes what is queued durable and does what follows from it, but for its own writes.
  void WriteOnce() {
    world_.writer().WriteQueued();
    world_.Settle();
  }
  void Release() {
    world_.writer().held = false;
    world_.writer().WriteQueued();
    world_.Settle();
  }
  template <typename Value>
  static Answer<Value> Into(Told<Value>& told) {
    return [&told](absl::StatusOr<Value> value) {
      EXPECT_FALSE(told.has_value()) << "answered twice";
      told = std::move(value);
    };
  }
  SubmitDraft Draft(const std::string& name, const std::string& request) {
    return world_.Draft(world_.Spec(name, {1}, 8), request);
  }
  int64_t Count(const std::string& job, const std::string& type) {
    const std::vector<std::string> types = world_.EventTypes(job);
    return std::count(types.begin(), types.end(), type);
  }
  JobState State(const std::string& job) { return world_.Job(job).record.state; }
  // On two nodes, some steps behind it.
  void RunJob(int64_t steps) {
    world_.AddNode("n0");
    world_.AddNode("n1");
    ASSERT_TRUE(world_.Submit(world_.Spec("job", {1, 2}, 20)).ok());
    world_.TrainSteps(steps);
    ASSERT_EQ(State("job"), JobState::kRunning);
  }

  FakeWorld world_;
  const JobKey key_{"default", "job"};
};

TEST_F(WritesUnderWayTest, OfTwoJobsOfOneNameTheFirstWins) {
  world_.writer().held = true;
  Told<JobView> first;
  Told<JobView> same;
  Told<JobView> other;
  world_.controller().Submit(Draft("job", "one"), Into(first));
  world_.controller().Submit(Draft("job", "one"), Into(same));
  world_.controller().Submit(Draft("job", "two"), Into(other));
  EXPECT_EQ(world_.writer().queued(), 1U);
  EXPECT_FALSE(first || same || other) << "nothing is durable";
  EXPECT_TRUE(world_.controller().List().empty());
  Release();
  ASSERT_TRUE(first && same && other);
  ASSERT_TRUE(first->ok() && (*same).ok()) << same->status();
  EXPECT_EQ((*first)->record.uid, (*same)->record.uid);
  EXPECT_TRUE(absl::IsAlreadyExists(other->status())) << other->status();
}

TEST_F(WritesUnderWayTest, WhenTheFirstIsRefusedTheNextOfItsNameWins) {
  world_.writer().held = true;
  Told<JobView> first;
  Told<JobView> other;
  world_.controller().Submit(Draft("job", "one"), Into(first));
  world_.controller().Submit(Draft("job", "two"), Into(other));
  world_.disk.fault = [](int64_t) { return absl::UnavailableError("I/O error"); };
  WriteOnce();
  ASSERT_TRUE(first.has_value());
  EXPECT_TRUE(absl::IsUnavailable(first->status()));
  EXPECT_FALSE(other.has_value());
  world_.disk.fault = nullptr;
  Release();
  ASSERT_TRUE(other && other->ok());
  EXPECT_EQ(world_.controller().List().size(), 1U);
}

TEST_F(WritesUnderWayTest, SubmissionsOfDifferentNamesShareACommit) {
  world_.writer().held = true;
  std::vector<Told<JobView>> told(10);
  for (size_t i = 0; i < told.size(); ++i) {
    world_.controller().Submit(Draft("job-" + std::to_string(i), "r" + std::to_string(i)),
                               Into(told[i]));
  }
  EXPECT_EQ(world_.writer().queued(), told.size());
  WriteOnce();
  for (const Told<JobView>& one : told) {
    EXPECT_TRUE(one && one->ok());
  }
}

TEST_F(WritesUnderWayTest, AnEpochThatBreaksIsBrokenOnce) {
  RunJob(3);
  world_.writer().held = true;
  world_.KillTrainer(0);
  EXPECT_EQ(world_.writer().queued(), 1U);
  world_.Advance(200);  // looked at ten times
  world_.KillTrainer(1);
  world_.Advance(200);
  EXPECT_EQ(world_.writer().queued(), 1U);
  EXPECT_EQ(State("job"), JobState::kRunning) << "as it is on disk";
  WriteOnce();
  EXPECT_EQ(State("job"), JobState::kRecovering);
  Release();
  world_.Advance(200);
  EXPECT_EQ(State("job"), JobState::kRunning);
  EXPECT_EQ(Count("job", "EpochChanged"), 1);
  EXPECT_EQ(world_.Job("job").record.attempt, 2);
  world_.TrainSteps(20);
  EXPECT_EQ(State("job"), JobState::kSucceeded);
}

TEST_F(WritesUnderWayTest, NothingIsLaunchedBeforeItIsDurable) {
  world_.AddNode("n0");
  ASSERT_TRUE(world_.Submit(Draft("job", "one")).ok());
  world_.writer().held = true;
  world_.Advance(1000);
  EXPECT_EQ(world_.writer().queued(), 1U) << "placed once";
  EXPECT_EQ(State("job"), JobState::kQueued);
  WriteOnce();
  EXPECT_EQ(State("job"), JobState::kStarting);
  EXPECT_EQ(world_.writer().queued(), 1U) << "the launch";
  EXPECT_TRUE(world_.launches.empty());
  WriteOnce();
  EXPECT_EQ(world_.launches.size(), 1U);
}

TEST_F(WritesUnderWayTest, ACancelWaitsForThePlacementBeforeIt) {
  world_.AddNode("n0");
  ASSERT_TRUE(world_.Submit(Draft("job", "one")).ok());
  world_.writer().held = true;
  world_.Advance(20);
  ASSERT_EQ(world_.writer().queued(), 1U);
  Told<JobView> cancelled;
  world_.controller().Cancel(key_, "not needed", Into(cancelled));
  EXPECT_EQ(world_.writer().queued(), 1U) << "one step of a job at a time";
  WriteOnce();
  EXPECT_FALSE(cancelled.has_value());
  WriteOnce();
  ASSERT_TRUE(cancelled && cancelled->ok()) << "not refused: the database is only busy";
  EXPECT_EQ((*cancelled)->record.state, JobState::kStopping);
  Release();
  world_.Advance(100);
  EXPECT_EQ(State("job"), JobState::kCancelled);
  EXPECT_TRUE(world_.launches.empty());
  EXPECT_EQ(world_.controller().Nodes().front().devices_free, 1);
}

// Found by the simulation (seed 4439): the end of the epoch was on disk, and not yet applied.
TEST_F(WritesUnderWayTest, ALaunchIsNotRepeatedWhileItsEpochMayBeOver) {
  world_.AddNode("n0");
  world_.lose = [](const FakeNode&, const DownMessage& message) {
    return std::holds_alternative<Launch>(message.kind);
  };
  ASSERT_TRUE(world_.Submit(world_.Spec("job", {1}, 8)).ok());
  ASSERT_EQ(State("job"), JobState::kStarting);
  world_.lose = nullptr;
  world_.writer().held = true;
  Told<JobView> cancelled;
  world_.controller().Cancel(key_, "not needed", Into(cancelled));
  world_.Advance(2000);
  EXPECT_TRUE(world_.launches.empty());
  Release();
  world_.Advance(100);
  EXPECT_EQ(State("job"), JobState::kCancelled);
  EXPECT_TRUE(world_.launches.empty());
}

TEST_F(WritesUnderWayTest, ACancelBehindARefusedStepIsAnswered) {
  RunJob(3);
  world_.writer().held = true;
  world_.KillTrainer(0);
  Told<JobView> cancelled;
  world_.controller().Cancel(key_, "not needed", Into(cancelled));
  EXPECT_FALSE(cancelled.has_value());
  world_.disk.fault = [](int64_t) { return absl::ResourceExhaustedError("the disk is full"); };
  WriteOnce();
  ASSERT_TRUE(cancelled.has_value());
  EXPECT_TRUE(absl::IsResourceExhausted(cancelled->status()));
  world_.disk.fault = nullptr;
  Release();
  world_.Advance(200);
  EXPECT_EQ(State("job"), JobState::kRunning) << "what it was not told to do it does not";
  EXPECT_EQ(world_.Job("job").record.attempt, 2);
}

TEST_F(WritesUnderWayTest, ASaveWhoseIntentIsUnderWayOutlivesItsEpoch) {
  RunJob(4);
  world_.writer().held = true;
  world_.TrainStep();
  EXPECT_EQ(world_.writer().queued(), 1U) << "the intent";
  EXPECT_TRUE(world_.keeper.steps["job"].empty()) << "no commit without it";
  world_.KillTrainer(0);
  world_.Advance(60);
  WriteOnce();
  EXPECT_EQ(world_.keeper.steps["job"].size(), 1U);
  Release();
  world_.Advance(300);
  EXPECT_EQ(world_.Job("job").record.committed_step, 5);
  EXPECT_EQ(State("job"), JobState::kRunning);
  EXPECT_EQ(world_.launches.back().trainers.front().first_step, 5);
  world_.TrainSteps(20);
  EXPECT_EQ(State("job"), JobState::kSucceeded);
}

TEST_F(WritesUnderWayTest, ASealThatComesWhileItsEpochEndsIsCommitted) {
  world_.no_seals = {1};
  RunJob(5);
  const Launch launch = world_.launches.back();
  world_.writer().held = true;
  world_.KillTrainer(0);
  ASSERT_EQ(world_.writer().queued(), 1U) << "the end of the epoch";
  ckpt::Seal seal;
  seal.step = 5;
  seal.epoch = launch.epoch;
  seal.attempt = 1;
  seal.writer = 1;
  FakeNode& node = world_.node("n1");
  world_.SendUp(node, TrainerFrame{launch.job_uid, launch.epoch, launch.attempt, 1, seal});
  world_.no_seals.clear();
  EXPECT_EQ(world_.writer().queued(), 1U);
  WriteOnce();
  EXPECT_EQ(State("job"), JobState::kRecovering);
  EXPECT_TRUE(world_.keeper.steps["job"].empty()) << "its intent is not durable";
  Release();
  world_.Advance(300);
  EXPECT_EQ(world_.Job("job").record.committed_step, 5);
  EXPECT_EQ(world_.launches.back().trainers.front().first_step, 5) << "the launch waited for it";
}

TEST_F(WritesUnderWayTest, ASaveWhoseIntentIsRefusedDidNotHappen) {
  RunJob(4);
  world_.writer().held = true;
  world_.TrainStep();
  world_.disk.fault = [](int64_t) { return absl::UnavailableError("I/O error"); };
  WriteOnce();
  world_.disk.fault = nullptr;
  Release();
  EXPECT_TRUE(world_.keeper.steps["job"].empty());
  EXPECT_EQ(State("job"), JobState::kRunning);
  world_.TrainSteps(20);
  EXPECT_EQ(State("job"), JobState::kSucceeded);
}

TEST_F(WritesUnderWayTest, ARequestThatIsRepeatedWhileItIsWrittenGetsTheSameAnswer) {
  RunJob(3);
  world_.writer().held = true;
  Told<OperationRecord> first;
  Told<OperationRecord> again;
  world_.controller().CheckpointNow(key_, "now", 0, Into(first));
  world_.controller().CheckpointNow(key_, "now", 0, Into(again));
  EXPECT_EQ(world_.writer().queued(), 1U);
  WriteOnce();
  ASSERT_TRUE(first && again && first->ok() && again->ok());
  EXPECT_EQ((*first)->id, (*again)->id);
  Release();
  world_.TrainSteps(1);
  EXPECT_EQ(world_.controller().GetOperation((*first)->id)->state, OperationState::kCommitted);
}

TEST_F(WritesUnderWayTest, AnOperationIsShownWhenItIsDurable) {
  RunJob(3);
  const auto operation = world_.CheckpointNow(key_, "now");
  ASSERT_TRUE(operation.ok());
  world_.Settle();
  world_.writer().held = true;
  world_.TrainSteps(1);
  for (int i = 0; i < 3; ++i) {
    const OperationRecord durable = world_.disk.operations.at(operation->id);
    EXPECT_EQ(world_.controller().GetOperation(operation->id)->state, durable.state);
    WriteOnce();
  }
  Release();
  EXPECT_EQ(world_.controller().GetOperation(operation->id)->state, OperationState::kCommitted);
}

TEST_F(WritesUnderWayTest, AJobThatIsBeingRemovedIsGoneForWhoAsksMeanwhile) {
  world_.AddNode("n0");
  ASSERT_TRUE(world_.Submit(world_.Spec("job", {1}, 3)).ok());
  world_.TrainSteps(3);
  ASSERT_EQ(State("job"), JobState::kSucceeded);
  world_.writer().held = true;
  Told<JobView> deleted;
  Told<JobView> again;
  Told<JobView> next;
  world_.controller().Delete(key_, {.request_id = "delete"}, Into(deleted));
  EXPECT_FALSE(deleted.has_value());
  WriteOnce();
  ASSERT_TRUE(deleted && deleted->ok());
  EXPECT_EQ(world_.writer().queued(), 1U) << "the rows go";
  world_.controller().Delete(
      key_, {.request_id = "delete-2", .with_checkpoints = true}, Into(again));
  world_.controller().Submit(Draft("job", "next"), Into(next));
  ASSERT_TRUE(next.has_value());
  EXPECT_TRUE(absl::IsAlreadyExists(next->status())) << "still being deleted";
  Release();
  ASSERT_TRUE(again.has_value());
  EXPECT_TRUE(absl::IsNotFound(again->status())) << again->status();
  EXPECT_TRUE(world_.disk.jobs.empty());
  EXPECT_TRUE(world_.Submit(Draft("job", "next-2")).ok());
}

TEST_F(WritesUnderWayTest, AHoldIsNotLostToARegistrationThatIsWrittenAfterIt) {
  FakeNode& node = world_.AddNode("n0");
  world_.writer().held = true;
  Told<NodeView> held;
  world_.controller().HoldNode("n0", NodeHold::kDrained, false, "new disk", Into(held));
  world_.Restart(node);
  EXPECT_FALSE(held.has_value());
  EXPECT_EQ(world_.writer().queued(), 1U);
  Release();
  ASSERT_TRUE(held && held->ok());
  EXPECT_EQ(world_.disk.nodes.at("n0").hold, static_cast<int64_t>(NodeHold::kDrained));
  EXPECT_EQ(world_.disk.nodes.at("n0").incarnation, node.incarnation);
}

TEST_F(WritesUnderWayTest, ACrashBeforeTheDiskForgetsWhatWasUnderWay) {
  RunJob(5);
  world_.writer().held = true;
  world_.KillTrainer(0);
  Told<JobView> cancelled;
  world_.controller().Cancel(key_, "not needed", Into(cancelled));
  world_.StartCoordinator();
  for (const char* id : {"n0", "n1"}) {
    world_.Connect(world_.node(id));
  }
  world_.Advance(3000);
  EXPECT_FALSE(cancelled.has_value());
  EXPECT_EQ(State("job"), JobState::kRunning);
  world_.TrainSteps(20);
  EXPECT_EQ(State("job"), JobState::kSucceeded);
}

}  // namespace
}  // namespace ravel::coordinator
