#include "coordinator/fleet/outbox.h"

#include <gtest/gtest.h>

#include "tests/coordinator/jobs/fake_world.h"

namespace ravel::coordinator {
namespace {

TEST(OutboxTest, ARankIsSentWhatItLacksAndNothingElse) {
  const std::map<std::string, CommRecordSet> sets = {{"world", {"world", {"a", "b"}}}};
  Wanted wanted = {.until_step = 100, .save_every_ms = 5, .save_sequence = 3, .then_stop = true};
  const auto all = Missing(wanted, sets, {});
  ASSERT_EQ(all.size(), 3U);
  EXPECT_EQ(std::get<CommRecordSet>(all[0]).group, "world");
  EXPECT_EQ(std::get<SaveTrainer>(all[1]).sequence, 3);
  EXPECT_TRUE(std::get<SaveTrainer>(all[1]).then_stop);
  EXPECT_EQ(std::get<RunTrainer>(all[2]).until_step, 100);
  EXPECT_EQ(std::get<RunTrainer>(all[2]).save_every_ms, 5);
  EXPECT_TRUE(Missing(wanted, sets, {100, 3, true, {}}).empty());
  EXPECT_EQ(Missing(wanted, sets, {100, 3, false, {}}).size(), 1U) << "to stop is missing";
  EXPECT_TRUE(Missing(wanted, sets, {200, 4, true, {}}).empty()) << "more than wanted is fine";
  wanted.until_step = -1;
  EXPECT_TRUE(Missing(wanted, sets, {-1, 3, true, {"world"}}).empty());
}

TEST(OutboxTest, TheHorizonFollowsThePace) {
  constexpr int64_t kHour = 3600 * 1000;
  EXPECT_EQ(HorizonStep(0, 0, 6 * kHour, 1'000'000), 1000) << "nothing is known yet";
  EXPECT_EQ(HorizonStep(50, 0.5, 6 * kHour, 1'000'000), 50 + 43'200);
  EXPECT_EQ(HorizonStep(50, 600, 6 * kHour, 1'000'000), 1050) << "never less than 1000 steps";
  EXPECT_EQ(HorizonStep(50, 0.5, 6 * kHour, 300), 300);
  EXPECT_EQ(HorizonStep(400, 0.5, 6 * kHour, 300), 400);
  EXPECT_FALSE(HorizonNeedsRenewal(499, 0, 1000, 5000));
  EXPECT_TRUE(HorizonNeedsRenewal(500, 0, 1000, 5000));
  EXPECT_FALSE(HorizonNeedsRenewal(900, 0, 1000, 1000)) << "the last step is allowed already";
}

// Each kind of order is lost once, without a break of the stream and with one: the job goes on, at
// no charge, with no new epoch.
class LostOrderTest : public ::testing::TestWithParam<std::tuple<int, bool>> {
 protected:
  static bool IsKind(const DownMessage& message, int kind) {
    if (kind == 0) {
      return std::holds_alternative<Launch>(message.kind);
    }
    const auto* command = std::get_if<TrainerCommand>(&message.kind);
    return command != nullptr &&
           ((kind == 1 && std::holds_alternative<CommRecordSet>(command->frame)) ||
            (kind == 2 && std::holds_alternative<RunTrainer>(command->frame)) ||
            (kind == 3 && std::holds_alternative<SaveTrainer>(command->frame)));
  }
};

TEST_P(LostOrderTest, IsSentAgain) {
  const auto [kind, breaks] = GetParam();
  FakeWorld world;
  world.StartCoordinator();
  world.AddNode("n0");
  world.AddNode("n1");
  int lost = 0;
  world.lose = [&lost, kind = kind](const FakeNode& node, const DownMessage& message) {
    const bool now = node.id == "n1" && lost == 0 && IsKind(message, kind);
    lost += now ? 1 : 0;
    return now;
  };
  ASSERT_TRUE(world.Submit(world.Spec("job", {2}, 30)).ok());
  const int64_t epoch = world.Job("job").record.epoch;
  if (kind == 3) {
    world.TrainSteps(2);
    ASSERT_TRUE(world.CheckpointNow({"default", "job"}, "now").ok());
    world.Settle();
  }
  ASSERT_EQ(lost, 1);
  if (breaks) {
    world.Disconnect(world.node("n1"));
    world.Connect(world.node("n1"));
  }
  world.Advance(breaks ? 100 : 2 * world.options.detection_ms);
  world.TrainSteps(kind == 3 ? 2 : 30);
  const JobRecord job = world.Job("job").record;
  EXPECT_EQ(job.restarts, 0);
  EXPECT_EQ(job.budget.used, 0);
  if (kind == 3) {
    EXPECT_EQ(job.epoch, epoch);
    EXPECT_EQ(job.committed_step, 3);
  } else {
    EXPECT_EQ(job.state, JobState::kSucceeded);
  }
}

INSTANTIATE_TEST_SUITE_P(All,
                         LostOrderTest,
                         ::testing::Combine(::testing::Range(0, 4), ::testing::Bool()));

TEST(OutboxTest, AStopThatWasLostIsSentAgain) {
  FakeWorld world;
  world.StartCoordinator();
  world.AddNode("n0");
  ASSERT_TRUE(world.Submit(world.Spec("job", {1}, 30)).ok());
  int lost = 0;
  world.lose = [&lost](const FakeNode&, const DownMessage& message) {
    const auto* command = std::get_if<TrainerCommand>(&message.kind);
    const bool now =
        lost < 2 && (std::holds_alternative<StopTrainers>(message.kind) ||
                     (command != nullptr && std::holds_alternative<PeerLost>(command->frame)));
    lost += now ? 1 : 0;
    return now;
  };
  ASSERT_TRUE(world.Cancel({"default", "job"}, "").ok());
  world.Settle();
  ASSERT_EQ(lost, 2);
  EXPECT_EQ(world.Job("job").record.state, JobState::kStopping);
  world.Advance(2 * world.options.detection_ms);
  EXPECT_EQ(world.Job("job").record.state, JobState::kCancelled);
}

}  // namespace
}  // namespace ravel::coordinator
