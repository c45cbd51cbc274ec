#include "coordinator/jobs/job_start.h"

#include <gtest/gtest.h>

namespace ravel::coordinator {
namespace {

JobRun Starting(int ranks) {
  JobRun run;
  run.phase = RunPhase::kBootstrapping;
  for (int rank = 0; rank < ranks; ++rank) {
    TrainerSlot& slot = run.slots.emplace_back();
    slot.place.node_id = rank < 2 ? "w0" : "w1";
    slot.state = "starting";
  }
  return run;
}

TEST(JobStartTest, TheRankWithTheLongestWayIsNamed) {
  JobRun run = Starting(4);
  EXPECT_EQ(WhatStarts(run), "0 of 4 ranks are ready; the last, rank 0 on w0: starting");
  run.slots[0].ready = true;
  run.slots[1].phase = "restoring";
  run.slots[1].moved_bytes = int64_t{1} << 30;
  run.slots[2].ready = true;
  run.slots[3].phase = "fetching_data";
  run.slots[3].moved_bytes = int64_t{3} << 29;
  EXPECT_EQ(WhatStarts(run),
            "2 of 4 ranks are ready; the last, rank 3 on w1: fetching data, 1.5 GiB so far");
  run.slots[3].ready = true;
  EXPECT_EQ(WhatStarts(run),
            "3 of 4 ranks are ready; the last, rank 1 on w0: restoring, 1.0 GiB so far");
  run.slots[3].ready = false;
  run.slots[3].phase = "starting";  // beside a fetch of many bytes
  run.slots[3].moved_bytes = 0;
  run.slots[1].phase = "fetching_data";
  EXPECT_EQ(WhatStarts(run),
            "2 of 4 ranks are ready; the last, rank 1 on w0: fetching data, 1.0 GiB so far");
}

TEST(JobStartTest, WhatDoesNotStartSaysNothing) {
  JobRun run = Starting(1);
  run.slots[0].ready = true;
  EXPECT_EQ(WhatStarts(run), "");
  run = Starting(1);
  for (const RunPhase phase :
       {RunPhase::kIdle, RunPhase::kAdopting, RunPhase::kTraining, RunPhase::kQuiescing}) {
    run.phase = phase;
    EXPECT_EQ(WhatStarts(run), "");
  }
  run.phase = RunPhase::kPreparing;
  EXPECT_NE(WhatStarts(run), "");
  run.failure = FailureCause{};
  EXPECT_EQ(WhatStarts(run), "");
}

}  // namespace
}  // namespace ravel::coordinator
