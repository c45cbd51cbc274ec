// Where the time of devices goes: the ledger alone, and in a controller whose workers die, whose
// jobs are resized and rolled back, and whose coordinator is restarted.

#include "coordinator/jobs/goodput.h"

#include <map>
#include <numeric>
#include <random>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/coordinator/jobs/fake_world.h"

namespace ravel::coordinator {
namespace {

using ::testing::AllOf;
using ::testing::Ge;
using ::testing::Le;

constexpr int64_t kWall = 1'000'000;  // ms: the wall clock at monotonic 0

int64_t Of(const Goodput& ledger, DeviceTime time) {
  return ledger.times()[static_cast<size_t>(time)] / 1000;
}
int64_t Sum(const Goodput& ledger) {
  return std::accumulate(ledger.times().begin(), ledger.times().end(), int64_t{0}) / 1000;
}

// Two devices, placed at 1000 ms, trained from 2000 ms on.
Goodput Started() {
  Goodput ledger;
  ledger.Observe(1000, 2, DeviceUse::kStarting);
  ledger.Restart(-1);
  ledger.Observe(2000, 2, DeviceUse::kStarting);
  ledger.Ready(0.25, kWall + 2000);
  ledger.Observe(2000, 2, DeviceUse::kTraining);
  return ledger;
}
void Train(Goodput& ledger, int64_t now_ms, int64_t step, double seconds, bool skipped = false) {
  ledger.Observe(now_ms, ledger.devices(), DeviceUse::kTraining);
  ledger.Report({.step = step, .seconds = seconds, .skipped = skipped, .time_ms = kWall + now_ms});
}

TEST(GoodputTest, AStartIsRestoreAndTheRest) {
  const Goodput ledger = Started();
  EXPECT_EQ(Of(ledger, DeviceTime::kStart), 1500);
  EXPECT_EQ(Of(ledger, DeviceTime::kRestore), 500);
  EXPECT_EQ(ledger.accounted_us(), 2'000'000);
  EXPECT_EQ(ledger.Ratio(), 0);
  EXPECT_EQ(Goodput().Ratio(), -1);
}

TEST(GoodputTest, TimeBetweenStepsIsWhatTheStepSaysOrIdle) {
  Goodput ledger = Started();
  Train(ledger, 2100, 1, 0.1);
  Train(ledger, 2350, 2, 0.1);  // 150 ms between
  ledger.NoteSave(2);
  Train(ledger, 2550, 3, 0.1);  // the save of step 2
  ledger.Observe(2850, 2, DeviceUse::kTraining);
  ledger.Report({.step = 4, .seconds = 0.1, .evaluated = true, .time_ms = kWall + 2850});
  Train(ledger, 2950, 5, 0.1, true);
  EXPECT_EQ(Of(ledger, DeviceTime::kProductive), 2 * 400);
  EXPECT_EQ(Of(ledger, DeviceTime::kIdle), 2 * 150);
  EXPECT_EQ(Of(ledger, DeviceTime::kCheckpointStall), 2 * 100);
  EXPECT_EQ(Of(ledger, DeviceTime::kEvaluation), 2 * 200);
  EXPECT_EQ(Of(ledger, DeviceTime::kSkippedStep), 2 * 100);
  EXPECT_EQ(Sum(ledger), 2 * 1950);
  EXPECT_EQ(ledger.accounted_us(), 2 * 1'950'000);
}

TEST(GoodputTest, AFailureIsDetectedThenDrainedAndItsStepsAreReplayed) {
  Goodput ledger = Started();
  for (int64_t step = 1; step <= 10; ++step) {
    Train(ledger, 2000 + 100 * step, step, 0.1);
  }
  ledger.Observe(4500, 1, DeviceUse::kDraining);  // noticed 1.5 s after step 10; one device is gone
  ledger.Observe(4700, 0, DeviceUse::kNone);
  EXPECT_EQ(Of(ledger, DeviceTime::kDetect), 2 * 1500);
  EXPECT_EQ(Of(ledger, DeviceTime::kDrain), 200);
  EXPECT_EQ(Of(ledger, DeviceTime::kProductive), 2 * 1000);
  ledger.Observe(9000, 1, DeviceUse::kStarting);  // nothing was held meanwhile
  ledger.Restart(6);
  EXPECT_EQ(Of(ledger, DeviceTime::kProductive), 2 * 600);
  EXPECT_EQ(Of(ledger, DeviceTime::kReplay), 2 * 400);
  ledger.Restart(6);  // once more, before anything was trained
  EXPECT_EQ(Of(ledger, DeviceTime::kReplay), 2 * 400);
  ledger.Restart(-1);
  EXPECT_EQ(Of(ledger, DeviceTime::kProductive), 0);
  EXPECT_EQ(Sum(ledger), 2000 + 2000 + 3000 + 200);
}

TEST(GoodputTest, ReportsAfterAnOutageClaimTheirOwnTimeOnly) {
  Goodput ledger = Started();
  Train(ledger, 2100, 1, 0.1);
  ledger.Observe(3100, 2, DeviceUse::kTraining);  // ten steps of 100 ms arrive at once
  for (int64_t step = 2; step <= 11; ++step) {
    ledger.Report({.step = step, .seconds = 0.1, .time_ms = kWall + 2000 + 100 * step});
    ledger.Report({.step = step, .seconds = 9, .time_ms = kWall + 2000 + 100 * step});
  }
  EXPECT_EQ(Of(ledger, DeviceTime::kProductive), 2 * 1100);
  EXPECT_EQ(Of(ledger, DeviceTime::kIdle), 0);
}

TEST(GoodputTest, AStoredLedgerGoesOnWithTheTimeNobodyWasThere) {
  Goodput ledger = Started();
  Train(ledger, 2100, 1, 0.1);
  ledger.Observe(2150, 2, DeviceUse::kTraining);
  const GoodputRow row = ledger.Row("uid", kWall + 2150);
  Goodput next;
  next.Load(row, 70, kWall + 5150, DeviceUse::kTraining);
  next.Observe(100, 2, DeviceUse::kDraining);
  EXPECT_EQ(Of(next, DeviceTime::kProductive), 200);
  EXPECT_EQ(Of(next, DeviceTime::kDetect), 2 * (50 + 3000 + 30));
  next.Restart(-1);
  EXPECT_EQ(Of(next, DeviceTime::kReplay), 200);
}

TEST(GoodputTest, ARowThatIsNotOursAddsUpWithoutOverflow) {
  Goodput ledger;
  ledger.Load({.job_uid = "uid",
               .times = "productive:9223372036854775807 replay:9223372036854775807 newer:-5",
               .curve = "-1:5 3:9223372036854775807 4:-9223372036854775808"},
              0,
              kWall,
              DeviceUse::kNone);
  EXPECT_EQ(Of(ledger, DeviceTime::kReplay), 0);
  EXPECT_GE(ledger.accounted_us(), 0);
  EXPECT_LE(ledger.Ratio(), 1);
}

// Whatever comes, in whatever order, with whatever numbers: the entries sum to the time held.
TEST(GoodputTest, EntriesAlwaysSumToTheTimeHeld) {
  for (uint32_t seed = 1; seed <= 300; ++seed) {
    std::mt19937 random(seed);
    const auto pick = [&random](int64_t most) {
      return static_cast<int64_t>(random() % static_cast<uint32_t>(most + 1));
    };
    Goodput ledger;
    int64_t now_ms = 1 + pick(1000);
    int64_t held = 0;
    int64_t devices = 0;
    for (int turn = 0; turn < 400; ++turn) {
      const int64_t passed_ms = pick(3) == 0 ? 0 : pick(500);
      now_ms += passed_ms;
      held += passed_ms * devices;
      devices = pick(4) == 0 ? pick(5) : devices;
      const auto use = devices == 0 ? DeviceUse::kNone : static_cast<DeviceUse>(1 + pick(5));
      ledger.Observe(now_ms, devices, use);
      if (pick(2) == 0) {
        ledger.Report({.step = pick(300),
                       .seconds = static_cast<double>(pick(1000)) / 1000 - 0.1,
                       .skipped = pick(5) == 0,
                       .evaluated = pick(5) == 0,
                       .time_ms = pick(3) == 0 ? pick(1'000'000) : kWall + now_ms});
      }
      if (pick(20) == 0) {
        ledger.Restart(pick(300) - 1);
      }
      if (pick(20) == 0) {
        ledger.Ready(static_cast<double>(pick(2000)) / 100 - 1, kWall + now_ms);
      }
      if (pick(20) == 0) {
        const GoodputRow row = ledger.Row("uid", kWall + now_ms);
        ledger = Goodput();
        ledger.Load(row, now_ms, kWall + now_ms, use);
        ASSERT_EQ(ledger.devices(), devices);
      }
      for (const int64_t time : ledger.times()) {
        ASSERT_GE(time, 0) << "seed " << seed << ", turn " << turn;
      }
    }
    ledger.Observe(now_ms, 0, DeviceUse::kNone);
    ASSERT_EQ(Sum(ledger), held) << "seed " << seed;
    ASSERT_EQ(ledger.accounted_us(), held * 1000) << "seed " << seed;
  }
}

// -- in a controller

class GoodputWorldTest : public ::testing::Test {
 protected:
  GoodputWorldTest() {
    world_.StartCoordinator();
    for (const char* node : {"n0", "n1", "n2"}) {
      world_.AddNode(node);
    }
  }
  // Each step takes a second.
  void Train(int64_t steps) {
    for (int64_t i = 0; i < steps; ++i) {
      world_.Advance(1000);
      world_.TrainStep();
    }
  }
  JobMetrics Metrics() {
    const ControllerMetrics metrics = world_.controller().Measure();
    return metrics.by_job.empty() ? JobMetrics() : metrics.by_job.front();
  }
  std::map<std::string, double> Seconds() {
    const JobMetrics job = Metrics();
    std::map<std::string, double> seconds(job.device_seconds.begin(), job.device_seconds.end());
    double sum = 0;
    for (const auto& [name, value] : seconds) {
      sum += value;
    }
    EXPECT_NEAR(sum, job.accounted_device_seconds, 1e-6);
    return seconds;
  }

  FakeWorld world_;
};

TEST_F(GoodputWorldTest, AKilledWorkersSecondsAreDetectionAndReplay) {
  plan::JobSpec spec = world_.Spec("job", {2}, 200);
  spec.checkpoint.every_steps = 10;
  ASSERT_TRUE(world_.Submit(spec).ok());
  Train(15);
  const std::map<std::string, double> before = Seconds();
  EXPECT_EQ(before.at("detect"), 0);
  EXPECT_EQ(before.at("replay"), 0);
  const std::string victim = world_.node("n0").trainers.empty() ? "n1" : "n0";
  world_.node(victim).frozen = true;  // its host is gone without a word
  world_.Advance(10'000);
  const std::map<std::string, double> lost = Seconds();
  // T is a second: two devices stood still for that long, and no longer.
  EXPECT_THAT(lost.at("detect"), AllOf(Ge(2 * 0.8), Le(2 * 1.5)));
  EXPECT_LE(lost.at("drain"), 0.5) << "the other rank obeys at once";
  Train(3);
  const std::map<std::string, double> after = Seconds();
  // Steps 11 to 15, of half a second on two devices; they are not productive any more.
  EXPECT_NEAR(after.at("replay"), 5 * 0.5 * 2, 0.1);
  EXPECT_NEAR(after.at("productive"), (10 + 3) * 0.5 * 2, 0.1);
  EXPECT_EQ(Metrics().restarts, 1);
  EXPECT_EQ(world_.controller().Measure().counts.restarts.counts().at("NodeLost"), 1);
  EXPECT_EQ(after.at("evaluation") + after.at("reshape"), 0);
}

TEST_F(GoodputWorldTest, ALedgerOutlivesItsCoordinator) {
  ASSERT_TRUE(world_.Submit(world_.Spec("job", {2}, 200)).ok());
  Train(20);
  const std::map<std::string, double> before = Seconds();
  const double accounted = Metrics().accounted_device_seconds;
  world_.KillCoordinator();
  world_.clock.AdvanceMs(3000);
  world_.StartCoordinator();
  for (const char* node : {"n0", "n1", "n2"}) {
    world_.Connect(world_.node(node));
  }
  world_.Advance(100);
  Train(5);
  const std::map<std::string, double> after = Seconds();
  for (const auto& [name, seconds] : before) {
    EXPECT_GE(after.at(name), name == "productive" ? 0 : seconds) << name;
  }
  // Five seconds of steps, 0.1 of returning and the three without a coordinator, on two devices.
  EXPECT_NEAR(Metrics().accounted_device_seconds, accounted + 2 * 8.1, 0.2);
  EXPECT_NEAR(after.at("productive"), before.at("productive") + 5 * 0.5 * 2, 0.1);
  EXPECT_EQ(Metrics().state, JobState::kRunning);
  EXPECT_EQ(after.at("detect"), 0) << "it was adopted: nothing was lost";
}

TEST_F(GoodputWorldTest, MeasuresTheCluster) {
  ASSERT_TRUE(world_.Submit(world_.Spec("job", {2}, 200)).ok());
  ASSERT_TRUE(world_.Submit(world_.Spec("waits", {3}, 200)).ok());
  Train(4);
  const ControllerMetrics metrics = world_.controller().Measure();
  EXPECT_EQ(metrics.jobs.at("RUNNING"), 1);
  EXPECT_EQ(metrics.jobs.at("QUEUED"), 1);
  EXPECT_EQ(metrics.jobs.at("FAILED"), 0);
  EXPECT_EQ(metrics.nodes.at("READY"), 3);
  EXPECT_EQ(metrics.devices.at({"cpu", "held"}), 2);
  EXPECT_EQ(metrics.devices.at({"cpu", "free"}), 1);
  EXPECT_EQ(metrics.devices.at({"cpu", "away"}), 0);
  EXPECT_GE(metrics.queue_wait_seconds, 4);
  ASSERT_EQ(metrics.by_job.size(), 2u);
  EXPECT_EQ(metrics.by_job[0].name, "job");
  EXPECT_EQ(metrics.by_job[0].step, 4);
  EXPECT_EQ(metrics.by_job[0].meter.steps, 4);
  EXPECT_EQ(metrics.by_job[0].devices, 2);
  EXPECT_EQ(metrics.by_job[0].meter.devices, 2);
  EXPECT_EQ(metrics.by_job[0].meter.step_seconds.sum, 4 * 0.5);
  EXPECT_EQ(metrics.by_job[0].meter.scale.epoch, 1);
  EXPECT_EQ(metrics.by_job[0].meter.scale.peak_flops, 0) << "cpus have no known peak";
  EXPECT_THAT(metrics.by_job[0].numerics, ::testing::HasSubstr("compute="));
  ASSERT_TRUE(world_.Cancel({"default", "job"}, "enough").ok());
  world_.Advance(5000);
  EXPECT_EQ(world_.controller().Measure().by_job.size(), 2u);
  world_.Advance(kMetricsLingerMs + 1000);
  EXPECT_EQ(world_.controller().Measure().by_job.size(), 1u);
}

}  // namespace
}  // namespace ravel::coordinator
