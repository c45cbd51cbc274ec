// Nodes that fail what is put on them, what operators say of nodes, daemons that want one name, and
// jobs that are tried again.

#include <absl/strings/str_cat.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "coordinator/jobs/job_controller.h"
#include "tests/coordinator/jobs/fake_world.h"

namespace ravel::coordinator {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr int32_t kDeviceCode = 12;
constexpr int32_t kDataCode = 13;

class BadNodeTest : public ::testing::Test {
 protected:
  void SetUp() override { world_.StartCoordinator(); }
  FakeNode& AddBadNode(const std::string& id, int32_t exit_code) {
    FakeNode& node = world_.AddNode(id);
    node.exits_with = exit_code;
    return node;
  }
  // As in a job file that says nothing of restarts.
  plan::JobSpec Spec(const std::string& name, std::vector<int64_t> sizes, int64_t steps) {
    plan::JobSpec spec = world_.Spec(name, std::move(sizes), steps);
    spec.restart = plan::RestartSpec();
    return spec;
  }
  JobState State(const std::string& job) { return world_.Job(job).record.state; }
  NodeView Node(const std::string& id) {
    for (const NodeView& view : world_.controller().Nodes()) {
      if (view.record.facts.node_id == id) {
        return view;
      }
    }
    ADD_FAILURE() << "no node " << id;
    return {};
  }

  FakeWorld world_;
};

TEST_F(BadNodeTest, AGoodNodeTakesTheJobOfOneWhoseDeviceFails) {
  AddBadNode("bad-0", kDeviceCode);
  world_.AddNode("good-1");
  ASSERT_TRUE(world_.Submit(Spec("job", {1}, 10)).ok());
  world_.Advance(200);
  EXPECT_EQ(State("job"), JobState::kRunning);
  EXPECT_EQ(world_.Job("job").record.attempt, 2) << "bad-0 once, then good-1";
  EXPECT_THAT(world_.EventTypes("job"), Contains("NodeAvoided"));
  EXPECT_EQ(Node("bad-0").penalties, 1);
  // The next job has not met bad-0 yet, but others have.
  world_.TrainSteps(10);
  EXPECT_EQ(State("job"), JobState::kSucceeded);
  ASSERT_TRUE(world_.Submit(Spec("next", {1}, 10)).ok());
  world_.Advance(200);
  EXPECT_EQ(world_.Job("next").record.attempt, 1);
}

TEST_F(BadNodeTest, AnElasticJobIsRatherSmallerThanOnANodeThatFailsIt) {
  AddBadNode("bad-0", kDeviceCode);
  world_.AddNode("good-1");
  ASSERT_TRUE(world_.Submit(Spec("job", {1, 2}, 60)).ok());
  world_.Advance(200);
  EXPECT_EQ(State("job"), JobState::kRunning);
  EXPECT_EQ(world_.Job("job").record.world_size, 1);
  world_.TrainSteps(5);
  EXPECT_EQ(State("job"), JobState::kRunning) << "it does not grow onto bad-0 at once";
  EXPECT_EQ(world_.Job("job").record.attempt, 2);
  world_.node("bad-0").exits_with = 0;
  world_.Advance(11'000);
  world_.TrainSteps(2);
  world_.Advance(100);
  EXPECT_EQ(world_.Job("job").record.world_size, 2) << "after 10 s it is tried again";
}

TEST_F(BadNodeTest, DataThatIsMissingOnOneNodeIsReadOnAnother) {
  AddBadNode("a-nomount", kDataCode);
  world_.AddNode("b-good");
  ASSERT_TRUE(world_.Submit(Spec("job", {1}, 10)).ok());
  world_.Advance(200);
  EXPECT_EQ(State("job"), JobState::kRunning);
  world_.TrainSteps(10);
  EXPECT_EQ(State("job"), JobState::kSucceeded);
}

TEST_F(BadNodeTest, DataThatIsMissingEverywhereFailsTheJob) {
  AddBadNode("a", kDataCode);
  AddBadNode("b", kDataCode);
  ASSERT_TRUE(world_.Submit(Spec("job", {1}, 10)).ok());
  world_.Advance(20'000);
  EXPECT_EQ(State("job"), JobState::kFailed);
  EXPECT_EQ(world_.Job("job").record.reason, "DataError");
  EXPECT_EQ(world_.Job("job").record.failure_class, "user");
  EXPECT_EQ(world_.Job("job").record.attempt, 2);
}

TEST_F(BadNodeTest, ANodeWithoutTheJobsDataIsLeftUncharged) {
  world_.AddNode("a-nomount").refuses_with = "DataError";
  world_.AddNode("b-good");
  ASSERT_TRUE(world_.Submit(Spec("job", {1}, 10)).ok());
  world_.Advance(200);
  EXPECT_EQ(State("job"), JobState::kRunning);
  EXPECT_EQ(world_.Job("job").record.budget.used, 0);
  EXPECT_THAT(world_.EventTypes("job"), Contains("NodeAvoided"));
}

TEST_F(BadNodeTest, DataThatNoNodeHasIsTheJobsError) {
  for (const char* id : {"a", "b", "c"}) {
    world_.AddNode(id).refuses_with = "DataError";
  }
  ASSERT_TRUE(world_.Submit(Spec("job", {1}, 10)).ok());
  world_.Advance(60'000);
  EXPECT_EQ(State("job"), JobState::kFailed);
  EXPECT_EQ(world_.Job("job").record.reason, "DataError");
  EXPECT_EQ(Node("a").state, "READY") << "no machine's fault";
}

TEST_F(BadNodeTest, ANodeWhoseDataCacheIsTooSmallIsNotTriedAgain) {
  for (const char* id : {"a-small", "b-small", "c-small"}) {
    world_.AddNode(id).refuses_with = "DataCacheTooSmall";
  }
  world_.AddNode("d-large");
  ASSERT_TRUE(world_.Submit(Spec("other", {1}, 1000)).ok());  // d-large is busy
  world_.Advance(200);
  ASSERT_EQ(world_.controller().Nodes()[3].devices_free, 0) << "the first three refused it";
  ASSERT_TRUE(world_.Submit(Spec("job", {1}, 10)).ok());
  world_.Advance(600'000);
  EXPECT_EQ(State("job"), JobState::kQueued) << "d-large is waited for";
  EXPECT_EQ(world_.Job("job").record.attempt, 3) << "once on each of the others";
  EXPECT_EQ(world_.Job("job").record.budget.used, 0);
  ASSERT_TRUE(world_.Cancel({"default", "other"}, "").ok());
  world_.Advance(1'000);
  EXPECT_EQ(State("job"), JobState::kRunning);
}

TEST_F(BadNodeTest, DataThatNoCacheHoldsEndsTheJobAtOnce) {
  for (const char* id : {"a", "b"}) {
    world_.AddNode(id).refuses_with = "DataCacheTooSmall";
  }
  ASSERT_TRUE(world_.Submit(Spec("job", {1}, 10)).ok());
  world_.Advance(2'000);
  EXPECT_EQ(State("job"), JobState::kFailed);
  EXPECT_EQ(world_.Job("job").record.reason, "DataCachesTooSmall");
  EXPECT_EQ(world_.Job("job").record.failure_class, "infrastructure");
  EXPECT_EQ(world_.Job("job").record.attempt, 2);
  // A job of two ranks is refused by both nodes at once.
  ASSERT_TRUE(world_.Submit(Spec("both", {2}, 10)).ok());
  world_.Advance(2'000);
  EXPECT_EQ(State("both"), JobState::kFailed);
  EXPECT_EQ(world_.Job("both").record.reason, "DataCachesTooSmall");
  // A daemon with a larger cache is another chance.
  world_.node("a").refuses_with.clear();
  world_.Restart(world_.node("a"));
  ASSERT_TRUE(world_.Retry({"default", "job"}, {}).ok());
  world_.Advance(1'000);
  EXPECT_EQ(State("job"), JobState::kRunning);
}

TEST_F(BadNodeTest, ADaemonThatIsStartedAnewMayHoldTheDataThen) {
  world_.AddNode("a").refuses_with = "DataCacheTooSmall";
  world_.AddNode("b");
  ASSERT_TRUE(world_.Submit(Spec("other", {1}, 1000)).ok());
  world_.Advance(200);
  ASSERT_TRUE(world_.Submit(Spec("job", {1}, 10)).ok());
  world_.Advance(20'000);
  ASSERT_EQ(State("job"), JobState::kQueued);
  world_.node("a").refuses_with.clear();
  world_.Restart(world_.node("a"));
  world_.Advance(60'000);
  EXPECT_EQ(State("job"), JobState::kRunning);
}

TEST_F(BadNodeTest, ANodeThatRefusedASubmissionIsNotTried) {
  world_.AddNode("a").refuses_with = "EnvironmentRefused";
  world_.AddNode("b");
  ASSERT_TRUE(world_.Submit(Spec("other", {1}, 1000)).ok());  // a refuses it, so it takes b
  world_.Advance(200);
  ASSERT_EQ(State("other"), JobState::kRunning);
  SubmitDraft draft = world_.Draft(Spec("job", {1}, 10), "request-of-job");
  draft.unfit = {"a"};
  ASSERT_TRUE(world_.Submit(std::move(draft)).ok());
  world_.Advance(60'000);
  EXPECT_EQ(State("job"), JobState::kQueued) << "b is waited for";
  EXPECT_EQ(world_.Job("job").record.attempt, 0) << "a is not tried";
  // A daemon that is started anew may have other flags.
  world_.node("a").refuses_with.clear();
  world_.Restart(world_.node("a"));
  world_.Advance(20'000);
  EXPECT_EQ(State("job"), JobState::kRunning);
}

TEST_F(BadNodeTest, PathsThatDoNotAnswerAreWaitedForAnywhere) {
  world_.AddNode("a").refuses_with = "PreflightFailed";
  ASSERT_TRUE(world_.Submit(Spec("job", {1}, 10)).ok());
  world_.Advance(600'000);
  EXPECT_FALSE(IsTerminal(State("job")));
  EXPECT_GT(world_.Job("job").record.attempt, 5);
  EXPECT_EQ(world_.Job("job").record.budget.used, 0);
  world_.node("a").refuses_with.clear();
  world_.Advance(61'000);
  EXPECT_EQ(State("job"), JobState::kRunning);
}

TEST_F(BadNodeTest, ManyQuickCrashesEndNoJob) {
  world_.AddNode("a");
  ASSERT_TRUE(world_.Submit(Spec("job", {1}, 10)).ok());
  for (int i = 0; i < 12; ++i) {
    world_.KillTrainer(0);
    world_.Advance(310'000);
    ASSERT_EQ(State("job"), JobState::kRunning) << i;
  }
  world_.TrainSteps(10);
  EXPECT_EQ(State("job"), JobState::kSucceeded);
}

TEST_F(BadNodeTest, ANodeThatFailsThreeAttemptsIsQuarantinedUntilItIsReleased) {
  AddBadNode("bad-0", kDeviceCode);
  world_.AddNode("good-1");
  ASSERT_TRUE(world_.Submit(Spec("job", {2}, 10)).ok());
  world_.Advance(60'000);
  EXPECT_EQ(State("job"), JobState::kQueued);
  EXPECT_EQ(Node("bad-0").state, "QUARANTINED");
  EXPECT_THAT(Node("bad-0").message,
              HasSubstr("3 attempts failed there, the last with DeviceError"));
  EXPECT_EQ(Node("bad-0").devices_free, 0);
  EXPECT_EQ(world_.Job("job").record.attempt, 3);
  EXPECT_THAT(world_.EventTypes("job"), Contains("NodeQuarantined"));
  // Neither the daemon's nor the coordinator's restart forgets it.
  world_.Restart(world_.node("bad-0"));
  EXPECT_EQ(Node("bad-0").state, "QUARANTINED");
  world_.StartCoordinator();
  EXPECT_EQ(Node("bad-0").state, "LOST");
  EXPECT_THAT(Node("bad-0").message, HasSubstr("quarantined: "));
  world_.Connect(world_.node("good-1"));
  world_.Restart(world_.node("bad-0"));
  EXPECT_EQ(Node("bad-0").state, "QUARANTINED");
  EXPECT_EQ(Node("good-1").state, "READY");
  world_.node("bad-0").exits_with = 0;
  EXPECT_EQ(world_.HoldNode("bad-0", NodeHold::kDrained, true, "").status().code(),
            absl::StatusCode::kFailedPrecondition);
  ASSERT_TRUE(world_.HoldNode("bad-0", NodeHold::kQuarantined, true, "").ok());
  world_.Advance(400'000);
  EXPECT_EQ(State("job"), JobState::kRunning);
}

TEST_F(BadNodeTest, ADrainedNodeIsLeftAtASaveAndGetsNothingUntilItIsUndrained) {
  world_.AddNode("a");
  world_.AddNode("b");
  ASSERT_TRUE(world_.Submit(Spec("job", {1, 2}, 40)).ok());
  world_.TrainSteps(7);
  ASSERT_TRUE(world_.HoldNode("b", NodeHold::kDrained, false, "new disk").ok());
  EXPECT_EQ(Node("b").state, "DRAINING");
  EXPECT_EQ(State("job"), JobState::kResizing);
  world_.Advance(40);
  world_.TrainSteps(1);
  world_.Advance(100);
  EXPECT_EQ(Node("b").state, "DRAINED");
  EXPECT_EQ(Node("b").message, "drained: new disk");
  EXPECT_EQ(world_.Job("job").record.world_size, 1);
  EXPECT_EQ(world_.launches.back().trainers[0].first_step, 8) << "nothing lost";
  EXPECT_EQ(world_.Job("job").record.budget.used, 0);
  world_.Restart(world_.node("b"));  // replaced its disk
  world_.Advance(1000);
  EXPECT_EQ(Node("b").state, "DRAINED");
  EXPECT_EQ(world_.Job("job").record.world_size, 1);
  ASSERT_TRUE(world_.HoldNode("b", NodeHold::kDrained, true, "").ok());
  world_.Advance(100);
  world_.TrainSteps(2);
  world_.Advance(100);
  EXPECT_EQ(world_.Job("job").record.world_size, 2);
  EXPECT_EQ(world_.HoldNode("c", NodeHold::kDrained, false, "").status().code(),
            absl::StatusCode::kNotFound);
}

TEST_F(BadNodeTest, ADaemonThatDrainedAndEndedHasLeftAndOneThatVanishedIsLost) {
  for (const char* id : {"idle", "busy", "gone"}) {
    world_.AddNode(id);
  }
  ASSERT_TRUE(world_.HoldNode("idle", NodeHold::kDrained, false, "new disk").ok());
  ASSERT_TRUE(world_.HoldNode("gone", NodeHold::kDrained, false, "").ok());
  ASSERT_TRUE(world_.Submit(Spec("job", {1}, 100)).ok());
  world_.TrainSteps(2);
  for (const char* id : {"idle", "busy"}) {
    world_.SendUp(world_.node(id), DrainNotice{"SIGTERM"});
  }
  for (const char* id : {"idle", "busy", "gone"}) {
    world_.Kill(world_.node(id));
  }
  world_.Advance(world_.options.detection_ms * 2);
  EXPECT_EQ(Node("idle").state, "LEFT");
  EXPECT_THAT(Node("idle").message, HasSubstr("drained and ended: SIGTERM"));
  EXPECT_EQ(Node("busy").state, "LOST") << "its trainer had not ended";
  EXPECT_EQ(Node("gone").state, "LOST");
  const ControllerMetrics metrics = world_.controller().Measure();
  EXPECT_EQ(metrics.nodes.at("LEFT"), 1);
  EXPECT_EQ(metrics.nodes.at("LOST"), 2);
  EXPECT_EQ(metrics.counts.nodes_lost, 2);
  world_.Restart(world_.node("idle"));
  EXPECT_EQ(Node("idle").state, "DRAINED");
}

TEST_F(BadNodeTest, ADaemonThatIsStoppingAndComesBackStaysDraining) {
  FakeNode& node = world_.AddNode("a");
  node.draining = true;
  world_.Disconnect(node);
  world_.Connect(node);
  EXPECT_EQ(Node("a").state, "DRAINING");
  ASSERT_TRUE(world_.Submit(Spec("job", {1}, 10)).ok());
  EXPECT_EQ(State("job"), JobState::kQueued);
}

TEST_F(BadNodeTest, ASecondDaemonOfANameIsRefusedAndDisturbsNothing) {
  world_.AddNode("a");
  ASSERT_TRUE(world_.Submit(Spec("job", {1}, 20)).ok());
  world_.TrainSteps(3);
  FakeNode& twin = world_.AddNode("twin");
  world_.Disconnect(twin);
  twin.id = "a";
  for (int i = 0; i < 5; ++i) {  // its supervisor starts it again and again
    world_.Restart(twin);
    EXPECT_THAT(twin.rejected, HasSubstr("another daemon is node a"));
    EXPECT_THAT(twin.rejected, HasSubstr("--node-id"));
    world_.TrainSteps(2);
  }
  EXPECT_EQ(world_.Job("job").record.epoch, 1);
  EXPECT_EQ(world_.Job("job").record.restarts, 0);
  world_.TrainSteps(7);
  EXPECT_EQ(State("job"), JobState::kSucceeded);
  EXPECT_EQ(world_.node("a").rejected, "");
}

TEST_F(BadNodeTest, AfterARestartTheDaemonThatHadTheNameComesFirst) {
  FakeNode& node = world_.AddNode("a");
  ASSERT_TRUE(world_.Submit(Spec("job", {1}, 20)).ok());
  world_.TrainSteps(3);
  FakeNode& twin = world_.AddNode("twin");
  world_.Disconnect(twin);
  twin.id = "a";
  world_.StartCoordinator();
  world_.Restart(twin);  // is quicker
  EXPECT_EQ(twin.rejected, "");
  EXPECT_EQ(twin.stream, 0U) << "it has to ask again";
  world_.Connect(node);
  EXPECT_EQ(node.rejected, "");
  world_.Restart(twin);
  EXPECT_THAT(twin.rejected, HasSubstr("another daemon is node a"));
  world_.Advance(4000);
  world_.TrainSteps(20);
  EXPECT_EQ(State("job"), JobState::kSucceeded);
}

TEST_F(BadNodeTest, AnotherDaemonMayTakeTheNameOfOneThatIsSilent) {
  world_.AddNode("a").frozen = true;
  world_.Advance(1100);
  FakeNode& twin = world_.AddNode("twin");
  world_.Disconnect(twin);
  twin.id = "a";
  world_.Restart(twin);
  EXPECT_EQ(twin.rejected, "");
  EXPECT_EQ(Node("a").state, "READY");
}

TEST_F(BadNodeTest, ARetriedJobGoesOnFromItsNewestCommit) {
  world_.AddNode("a");
  plan::JobSpec spec = Spec("job", {1}, 12);
  spec.restart.max_failures = 0;
  ASSERT_TRUE(world_.Submit(spec).ok());
  EXPECT_EQ(world_.Retry({"default", "job"}, {"early"}).status().code(),
            absl::StatusCode::kFailedPrecondition);
  world_.TrainSteps(7);
  world_.KillTrainer(0);
  world_.Advance(100);
  EXPECT_EQ(State("job"), JobState::kFailed);
  EXPECT_EQ(world_.Job("job").record.reason, "BudgetExhausted");
  ASSERT_TRUE(world_.Retry({"default", "job"}, {"retry-1"}).ok());
  world_.Advance(100);
  const JobRecord record = world_.Job("job").record;
  EXPECT_EQ(record.state, JobState::kRunning);
  EXPECT_EQ(record.attempt, 2);
  EXPECT_EQ(record.budget.used, 0);
  EXPECT_EQ(record.budget.failure_times_ms.size(), 1U) << "the history is kept";
  EXPECT_EQ(record.failure_class, "");
  EXPECT_EQ(world_.launches.back().trainers[0].first_step, 5);
  EXPECT_THAT(world_.EventTypes("job"), Contains("Retried"));
  // The same request again is the same request.
  ASSERT_TRUE(world_.Retry({"default", "job"}, {"retry-1"}).ok());
  EXPECT_EQ(world_.Job("job").record.attempt, 2);
  world_.TrainSteps(7);
  EXPECT_EQ(State("job"), JobState::kSucceeded);
  EXPECT_EQ(world_.Retry({"default", "job"}, {"retry-2"}).status().code(),
            absl::StatusCode::kFailedPrecondition);
  const std::vector<StepRecord> history = world_.History("job");
  ASSERT_EQ(history.size(), 12U);
  EXPECT_EQ(history.back().step, 12);
}

TEST_F(BadNodeTest, ACancelledJobCanBeTriedAgainAlsoAfterARestart) {
  world_.AddNode("a");
  ASSERT_TRUE(world_.Submit(Spec("job", {1}, 12)).ok());
  world_.TrainSteps(7);
  ASSERT_TRUE(world_.Cancel({"default", "job"}, "").ok());
  world_.Advance(100);
  EXPECT_EQ(State("job"), JobState::kCancelled);
  world_.StartCoordinator();
  world_.Connect(world_.node("a"));
  ASSERT_TRUE(world_.Retry({"default", "job"}, {"again"}).ok());
  world_.Advance(4000);
  EXPECT_EQ(State("job"), JobState::kRunning);
  world_.TrainSteps(7);
  EXPECT_EQ(State("job"), JobState::kSucceeded);
  EXPECT_THAT(world_.EventTypes("job"), Not(Contains("RolledBack")));
}

}  // namespace
}  // namespace ravel::coordinator
