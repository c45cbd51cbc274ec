// Who is lost, for whom and when: under load, by each job's own T, and when a trainer cannot be
// killed.

#include <algorithm>

#include <absl/strings/str_cat.h>
#include <gtest/gtest.h>

#include "coordinator/jobs/pause_meter.h"
#include "tests/coordinator/jobs/fake_world.h"
#include "tests/testing/cpu_time.h"
#include "tests/testing/sanitizer.h"

namespace ravel::coordinator {
namespace {

class DetectionTest : public ::testing::Test {
 protected:
  void Start(int64_t detection_ms, int nodes) {
    world_.options.detection_ms = detection_ms;
    world_.StartCoordinator();
    for (int i = 0; i < nodes; ++i) {
      world_.AddNode(absl::StrCat("n", i));
    }
  }
  NodeState StateOfNode(const std::string& id) {
    for (const NodeView& node : world_.controller().Nodes()) {
      if (node.record.facts.node_id == id) {
        return node.record.state;
      }
    }
    return NodeState::kLost;
  }
  std::string MessageOfNode(const std::string& id) {
    for (const NodeView& node : world_.controller().Nodes()) {
      if (node.record.facts.node_id == id) {
        return node.message;
      }
    }
    return "";
  }
  // Each turn of the strand takes 250 ms.
  void AdvanceSlowly(int64_t ms) {
    for (int64_t passed = 0; passed < ms; passed += 250) {
      world_.clock.AdvanceMs(230);
      world_.Advance(20);
    }
  }
  JobView Job(const std::string& name) { return world_.Job(name); }

  FakeWorld world_;
};

TEST_F(DetectionTest, ASlowCoordinatorStillNoticesASilentNode) {
  Start(1000, 2);
  ASSERT_TRUE(world_.Submit(world_.Spec("job", {1, 2}, 100)).ok());
  world_.TrainSteps(1);
  world_.node("n1").frozen = true;
  AdvanceSlowly(2000);
  EXPECT_EQ(StateOfNode("n1"), NodeState::kLost) << "within T + 1 s";
  EXPECT_EQ(StateOfNode("n0"), NodeState::kReady);
  EXPECT_EQ(Job("job").record.budget.last_reason, "NodeLost");
}

TEST_F(DetectionTest, ASlowCoordinatorStillNoticesAClosedStream) {
  Start(5000, 2);
  world_.Kill(world_.node("n1"));
  AdvanceSlowly(2500);
  EXPECT_EQ(StateOfNode("n1"), NodeState::kLost) << "2T/5 after its stream broke";
}

TEST_F(DetectionTest, APauseOfTheProcessIsForgivenOnce) {
  Start(1000, 2);
  world_.clock.AdvanceMs(10'000);
  world_.pause_ms = 10'000;
  world_.controller().Tick();
  EXPECT_EQ(StateOfNode("n0"), NodeState::kReady);
  EXPECT_EQ(StateOfNode("n1"), NodeState::kReady);
  world_.node("n1").frozen = true;
  world_.Advance(1100);
  EXPECT_EQ(StateOfNode("n1"), NodeState::kLost);
}

TEST(PauseMeterTest, CountsWhatItsThreadMissedOnce) {
  PauseMeter meter;
  meter.Beat(1000);
  meter.Beat(1020);
  EXPECT_EQ(meter.TakeMs(1150), 0) << "that is scheduling";
  EXPECT_EQ(meter.TakeMs(3020), 2000) << "before its own thread came by";
  meter.Beat(3025);
  EXPECT_EQ(meter.TakeMs(3030), 0);
  meter.Beat(3525);
  EXPECT_EQ(meter.TakeMs(3530), 500);
}

TEST_F(DetectionTest, AQueuedJobsTIsNobodyElses) {
  Start(5000, 1);
  plan::JobSpec patient = world_.Spec("patient", {1}, 100);
  patient.detection_ms = 30'000;
  ASSERT_TRUE(world_.Submit(patient).ok());
  world_.TrainSteps(1);
  plan::JobSpec hasty = world_.Spec("hasty", {64}, 100);
  hasty.detection_ms = 500;
  ASSERT_TRUE(world_.Submit(hasty).ok());
  world_.node("n0").frozen = true;
  world_.Advance(1500);
  world_.node("n0").frozen = false;
  world_.Advance(200);
  EXPECT_EQ(Job("patient").record.state, JobState::kRunning);
  EXPECT_EQ(Job("patient").record.attempt, 1);
}

TEST_F(DetectionTest, ANodeIsLostForOneJobAndNotForAnother) {
  Start(5000, 1);
  world_.node("n0").devices = 2;
  world_.Restart(world_.node("n0"));
  plan::JobSpec patient = world_.Spec("patient", {1}, 100);
  patient.detection_ms = 30'000;
  plan::JobSpec hasty = world_.Spec("hasty", {1}, 100);
  hasty.detection_ms = 500;
  ASSERT_TRUE(world_.Submit(patient).ok());
  ASSERT_TRUE(world_.Submit(hasty).ok());
  world_.TrainSteps(1);
  world_.node("n0").frozen = true;
  world_.Advance(700);
  EXPECT_EQ(Job("hasty").record.budget.last_reason, "NodeLost");
  EXPECT_EQ(Job("patient").record.state, JobState::kRunning);
  world_.node("n0").frozen = false;
  world_.Advance(6000);
  EXPECT_EQ(Job("hasty").record.state, JobState::kRunning) << "again, on the node that is back";
  EXPECT_EQ(Job("patient").record.attempt, 1);
}

TEST_F(DetectionTest, JobsThatComeAndGoDelayNoVerdict) {
  Start(5000, 2);
  world_.node("n1").frozen = true;
  for (int i = 0; i < 12; ++i) {
    plan::JobSpec spec = world_.Spec(absl::StrCat("job", i), {1}, 100);
    spec.detection_ms = 1000;
    ASSERT_TRUE(world_.Submit(world_.Draft(spec, absl::StrCat("r", i))).ok());
    world_.Advance(300);
    ASSERT_TRUE(world_.Cancel({"default", spec.name}, "").ok());
    world_.Advance(200);
  }
  EXPECT_EQ(StateOfNode("n1"), NodeState::kLost);
}

TEST_F(DetectionTest, ATrainerThatCannotBeKilledHoldsUpNobody) {
  Start(1000, 3);
  ASSERT_TRUE(world_.Submit(world_.Spec("job", {2}, 100)).ok());
  ASSERT_TRUE(world_.Submit(world_.Spec("other", {1}, 100)).ok());
  world_.TrainSteps(6);
  FakeNode& bad = world_.node("n0");
  const StreamId stream = bad.stream;
  bad.stops_trainers = false;
  const int64_t other_attempt = Job("other").record.attempt;
  const int64_t epoch = Job("job").record.epoch;
  FakeNode* second = world_.node("n1").trainers.empty() ? nullptr : &world_.node("n1");
  ASSERT_NE(second, nullptr);
  world_.AddNode("spare");
  world_.KillTrainer(1);
  world_.Advance(2500);
  EXPECT_EQ(Job("job").record.state, JobState::kRunning) << "elsewhere, after 2T";
  EXPECT_GT(Job("job").record.epoch, epoch);
  EXPECT_NE(MessageOfNode("n0").find("device 0 is out, rank 0 of job job"), std::string::npos)
      << MessageOfNode("n0");
  EXPECT_EQ(StateOfNode("n0"), NodeState::kReady);
  EXPECT_EQ(bad.stream, stream) << "its stream is not closed for that";
  EXPECT_EQ(Job("other").record.attempt, other_attempt);
  const std::vector<std::string> types = world_.EventTypes("job");
  EXPECT_EQ(std::count(types.begin(), types.end(), "Zombie"), 1);
  // It goes at last: the device is back.
  bad.stops_trainers = true;
  const FakeTrainer zombie = bad.trainers.begin()->second;
  bad.trainers.clear();
  world_.SendUp(
      bad,
      TrainerExited{zombie.job_uid, zombie.epoch, zombie.attempt, zombie.rank, -1, 9, "", "", ""});
  world_.Advance(100);
  EXPECT_EQ(MessageOfNode("n0"), "");
  ASSERT_TRUE(world_.Submit(world_.Spec("next", {1}, 100)).ok());
  world_.Advance(100);
  EXPECT_EQ(Job("next").record.state, JobState::kRunning);
}

TEST_F(DetectionTest, NothingIsPlacedOnADrainingNodeThatReturns) {
  Start(1000, 1);
  FakeNode& node = world_.node("n0");
  node.draining = true;
  world_.Disconnect(node);
  world_.Connect(node);
  ASSERT_TRUE(world_.Submit(world_.Spec("job", {1}, 100)).ok());
  EXPECT_EQ(Job("job").record.state, JobState::kQueued);
  EXPECT_EQ(Job("job").record.restarts, 0);
}

TEST_F(DetectionTest, AnAnswerCountsOnlyFromTheNodeThatWasAsked) {
  Start(1000, 2);
  world_.node("n0").frozen = true;
  world_.node("n0").devices = 1;
  ASSERT_TRUE(world_.Submit(world_.Spec("job", {1}, 100)).ok());
  int64_t command = 0;
  for (const DownMessage& message : world_.node("n0").inbox) {
    command = std::holds_alternative<Launch>(message.kind) ? message.command_id : command;
  }
  ASSERT_NE(command, 0);
  EXPECT_EQ(Job("job").start, "0 of 1 ranks are ready; the last, rank 0 on n0");
  EXPECT_EQ(Job("job").record.message, "") << "which watches and lists show";
  world_.SendUp(world_.node("n1"), CommandResult{command, false, "not mine"});
  world_.node("n0").frozen = false;
  world_.Advance(100);
  EXPECT_EQ(Job("job").record.state, JobState::kRunning);
  EXPECT_EQ(Job("job").record.attempt, 1);
  EXPECT_EQ(Job("job").start, "");
}

// Restores and other slow beginnings.
class StallTest : public DetectionTest {
 protected:
  void StartJob() {
    world_.options.step_timeout_ms = 30'000;
    Start(1000, 1);
    plan::JobSpec spec = world_.Spec("job", {1}, 100);
    spec.warmup_allowance_ms = 120'000;
    ASSERT_TRUE(world_.Submit(spec).ok());
  }
};

TEST_F(StallTest, ARestoreThatMovesIsNotStuck) {
  StartJob();
  world_.node("n0").phase = "restoring";
  for (int minute = 0; minute < 12; ++minute) {
    world_.node("n0").moved_bytes += 1 << 30;
    world_.Advance(60'000);
  }
  EXPECT_EQ(Job("job").record.attempt, 1) << "12 minutes, with a wall of 30 s";
  world_.Advance(121'000);
  EXPECT_EQ(Job("job").record.budget.last_reason, "Stall") << "nothing moves any more";
}

TEST_F(StallTest, SteadyStepsHaveTheWallAndAnEvaluationItsAllowance) {
  StartJob();
  world_.TrainSteps(6);
  world_.node("n0").phase = "evaluating";
  world_.Advance(100'000);
  EXPECT_EQ(Job("job").record.attempt, 1);
  world_.node("n0").phase = "training";
  world_.Advance(31'000);
  EXPECT_EQ(Job("job").record.budget.last_reason, "Stall");
}

TEST(StepTimesTest, TheSlowestOfAHundredCounts) {
  StepTimes times;
  for (int i = 0; i < 4; ++i) {
    times.Add(9);
  }
  EXPECT_EQ(times.P99(), 0) << "nothing is usual yet";
  for (int i = 0; i < 96; ++i) {
    times.Add(0.1);
  }
  EXPECT_EQ(times.P99(), 9);
  for (int i = 0; i < 128; ++i) {
    times.Add(0.1);
  }
  EXPECT_EQ(times.P99(), 0.1);
}

constexpr int kPartOfLoad = testing::kSanitized ? 10 : 1;

// 1,000 nodes of 8 devices, 990 jobs run, 10,000 wait. The bounds are of the order of magnitude
// only: machines differ.
TEST(LoadTest, NoTurnOfTheStrandIsLong) {
  FakeWorld world;
  world.options.detection_ms = 5000;
  world.StartCoordinator();
  for (int i = 0; i < 1000 / kPartOfLoad; ++i) {
    FakeNode& node = world.AddNode(absl::StrCat("n", i), 8);
    node.host_id = node.id;
  }
  JobController& controller = world.controller();
  // All of it runs on this thread.
  const auto now = [] { return testing::ThreadCpuMs(); };
  const auto since = [&](double begin_ms) { return now() - begin_ms; };
  double longest_submit_ms = 0;
  const double submitting = now();
  for (int i = 0; i < 10'990 / kPartOfLoad; ++i) {
    plan::JobSpec spec = world.Spec(absl::StrCat("job-", i), {8}, 1000);
    spec.detection_ms = 5000;
    const SubmitDraft draft = world.Draft(spec, absl::StrCat("request-", i));
    const double begin = now();
    ASSERT_TRUE(world.Submit(draft).ok());
    longest_submit_ms = std::max(longest_submit_ms, since(begin));
  }
  const double submits_ms = since(submitting);
  int64_t running = 0;
  for (int turn = 0; turn < 200 && running < 990 / kPartOfLoad; ++turn) {
    world.Advance(20);
    running = 0;
    for (int i = 0; i < 990 / kPartOfLoad; ++i) {
      running +=
          controller.Get({"default", absl::StrCat("job-", i)})->record.state == JobState::kRunning
              ? 1
              : 0;
    }
  }
  ASSERT_EQ(running, 990 / kPartOfLoad);
  world.Advance(1000);
  std::vector<double> ticks_ms;
  for (int turn = 0; turn < 100; ++turn) {
    world.clock.AdvanceMs(20);
    const double begin = now();
    controller.Tick();
    ticks_ms.push_back(since(begin));
  }
  std::sort(ticks_ms.begin(), ticks_ms.end());
  const double getting = now();
  const absl::StatusOr<JobView> queued = controller.Get({"default", "job-1050"});
  const double get_ms = since(getting);
  ASSERT_TRUE(queued.ok());
  EXPECT_EQ(queued->record.message, "needs 8 free cpu devices, 0 are free");
  RecordProperty("submits_per_s", static_cast<int>(10'990'000 / kPartOfLoad / submits_ms));
  RecordProperty("tick_p50_us", static_cast<int>(ticks_ms[50] * 1000));
  RecordProperty("tick_p99_us", static_cast<int>(ticks_ms[98] * 1000));
  std::printf("submits/s %.0f (longest %.1f ms), tick p50 %.2f ms, p99 %.2f ms, get %.2f ms\n",
              10'990'000 / kPartOfLoad / submits_ms,
              longest_submit_ms,
              ticks_ms[50],
              ticks_ms[98],
              get_ms);
  EXPECT_GT(10'990'000 / kPartOfLoad / submits_ms, 500) << "submits per second";
  EXPECT_LT(ticks_ms[50], 10);
  EXPECT_LT(ticks_ms[98], 50);
  EXPECT_LT(get_ms, 10);
}

}  // namespace
}  // namespace ravel::coordinator
