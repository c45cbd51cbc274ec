// What trainers remark when they are ready, as events of the job.

#include <vector>

#include <gtest/gtest.h>

#include "tests/coordinator/jobs/fake_world.h"

namespace ravel::coordinator {
namespace {

TEST(StartRemarks, BecomeEventsOnceAndOfEachAttempt) {
  FakeWorld world;
  world.StartCoordinator();
  world.AddNode("n0");
  world.AddNode("n1");
  world.remarks[1] = {{"GemmsChosenAgain", "bits may differ"}};
  ASSERT_TRUE(world.Submit(world.Spec("job", {2}, 4)).ok());
  world.TrainSteps(2);
  const auto warnings = [&] {
    std::vector<JobEventRecord> found = world.Events("job");
    std::erase_if(found, [](const JobEventRecord& event) { return event.type != "Warning"; });
    return found;
  };
  ASSERT_EQ(warnings().size(), 1U);
  const JobEventRecord first = warnings().front();
  EXPECT_EQ(first.reason, "GemmsChosenAgain");
  EXPECT_EQ(first.message, "bits may differ");
  EXPECT_EQ(first.rank, 1);
  EXPECT_EQ(first.node, "n1");
  EXPECT_EQ(first.epoch, world.Job("job").record.epoch);
  // Each attempt speaks for itself.
  world.remarks[1].push_back({"Other", "also"});
  world.KillTrainer(0);
  world.Advance(30'000);
  world.TrainSteps(4);
  ASSERT_EQ(world.Job("job").record.state, JobState::kSucceeded);
  ASSERT_EQ(warnings().size(), 3U);
  EXPECT_EQ(warnings()[1].epoch, warnings()[2].epoch);
  EXPECT_GT(warnings()[1].epoch, first.epoch);
  EXPECT_EQ(warnings()[2].reason, "Other");
}

}  // namespace
}  // namespace ravel::coordinator
