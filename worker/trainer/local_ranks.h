#pragma once

// Ranks as threads of one process.

#include <functional>
#include <optional>
#include <vector>

#include "common/plan/sharding_plan.h"
#include "common/status.h"
#include "worker/trainer/rank_engine.h"

namespace ravel::trainer {

// Plans the job for `ranks` ranks of one host, starts an engine per rank and runs `body` in each
// rank's thread. The first error of any rank ends all of them and is returned.
struct LocalRun {
  plan::JobSpec spec;  // as a user gave it: resolved here
  int ranks = 1;
  bool shared_memory = true;  // false: over loopback TCP, gathers and exchanges by copy
  std::function<absl::Status(RankEngine& engine, int rank)> body = nullptr;
  // Changes the plan before it runs (may be empty): other options, planned anew.
  std::function<absl::Status(plan::ShardingPlan& plan)> adjust = nullptr;
  EngineOptions options = {};
  // All ranks on this device (comm/device_local_communicator.h); nullptr: on the host.
  kernels::CudaGpu* gpu = nullptr;
  std::optional<GemmOptions> gemms = std::nullopt;  // RankEngine::Args
};
absl::Status RunLocalRanks(const LocalRun& run);
// The plan that it runs.
absl::StatusOr<plan::ShardingPlan> PlanLocalRanks(const LocalRun& run);

}  // namespace ravel::trainer
