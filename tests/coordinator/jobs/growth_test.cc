#include "coordinator/jobs/growth.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "coordinator/jobs/job_controller.h"
#include "tests/coordinator/jobs/fake_world.h"

namespace ravel::coordinator {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kGrowthMinuteMs = 60 * 1000;

struct GrowthCase {
  GrowthLook look;
  std::string reason;
  std::string message;
};

TEST(GrowthTest, SaysWhatKeepsAJobSmall) {
  plan::JobSpec spec;
  spec.device_count = 8;
  spec.elastic = {.sizes = {2, 4, 8},
                  .grow_delay_ms = 5 * kGrowthMinuteMs,
                  .grow_every_ms = 15 * kGrowthMinuteMs};
  const int64_t now_ms = 100 * kGrowthMinuteMs;
  const GrowthCase cases[] = {
      {{.free = 1},
       "NoFreeDevices",
       "runs on 2 of 8 devices: the next size 4 needs 2 more; 1 is free that it may use"},
      {{.free = 6, .queued = 2}, "JobsAreQueued", "2 jobs are queued"},
      {{.free = 3, .since_ms = now_ms - kGrowthMinuteMs},
       "GrowthWaits",
       "may grow to 4 in 4m (growDelay 5m)"},
      {{.free = 6,
        .since_ms = now_ms - kGrowthMinuteMs,
        .rested_ms = now_ms + 12 * kGrowthMinuteMs},
       "GrowthWaits",
       "may grow to 8 in 12m (growEvery 15m)"},
      {{.free = 6, .since_ms = now_ms - 6 * kGrowthMinuteMs, .saving = true},
       "SaveUnderWay",
       "grows to 8 after the save that is under way"},
      {{.free = 6, .since_ms = now_ms - 6 * kGrowthMinuteMs}, "Growing", "grows to 8 now"},
  };
  for (const GrowthCase& c : cases) {
    GrowthLook look = c.look;
    look.spec = &spec;
    look.world_size = 2;
    look.now_ms = now_ms;
    const JobCondition condition = WantedSize(look);
    EXPECT_EQ(condition.type, "WantedSize");
    EXPECT_FALSE(condition.status);
    EXPECT_EQ(condition.reason, c.reason);
    EXPECT_THAT(condition.message, HasSubstr(c.message));
  }
}

TEST(GrowthTest, AViewOfASmallJobTellsWhenItMayGrow) {
  FakeWorld world;
  world.StartCoordinator();
  world.AddNode("a");
  plan::JobSpec spec = world.Spec("job", {1, 2}, 1000);
  spec.elastic.grow_delay_ms = kGrowthMinuteMs;
  ASSERT_TRUE(world.Submit(spec).ok());
  world.TrainSteps(2);
  const auto wanted = [&world]() -> JobCondition {
    for (const JobCondition& condition : world.Job("job").conditions) {
      if (condition.type == "WantedSize") {
        return condition;
      }
    }
    return {};
  };
  EXPECT_EQ(wanted().reason, "NoFreeDevices");
  world.AddNode("b");
  world.Advance(1'000);
  EXPECT_EQ(wanted().reason, "GrowthWaits");
  EXPECT_THAT(wanted().message, HasSubstr("may grow to 2 in 5"));
  world.Advance(kGrowthMinuteMs);
  world.TrainSteps(2);
  world.Advance(1'000);
  EXPECT_EQ(world.Job("job").record.world_size, 2);
  EXPECT_EQ(wanted().type, "") << "it is as large as it wants to be";
}

}  // namespace
}  // namespace ravel::coordinator
