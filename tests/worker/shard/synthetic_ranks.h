#pragma once

// Ranks as threads whose units compute nothing but whole numbers: every gradient element of lane l
// and micro-batch m is (l + 1) * (m + 1), so that sums are exact in any order and a part that is
// missing, doubled or scaled shows.

#include <cstdint>
#include <functional>
#include <vector>

#include "common/plan/sharding_plan.h"
#include "common/status.h"
#include "worker/shard/parameter_group.h"
#include "worker/shard/unit_executor.h"

namespace ravel::shard {

// Two layers, tied table; V lanes, k micro-batches each.
plan::JobSpec SyntheticJob(int64_t lanes, int64_t micro_batches);

struct SyntheticRun {
  plan::JobSpec spec;
  int ranks = 1;
  // Changes the plan before it runs; may be empty.
  std::function<void(plan::ShardingPlan& plan)> adjust = nullptr;
  // Whether a lane's micro-batch uses a unit (of optional ones); empty: always.
  std::function<bool(plan::UnitId unit, int64_t lane, int64_t micro_batch)> used = nullptr;
  ExecutorOptions executor = {};
  int64_t steps = 1;
  // Each rank's thread, when the gradients of a step are complete and nothing is updated yet.
  std::function<void(const plan::ShardingPlan& plan, int rank, ParameterGroups& groups)> inspect =
      nullptr;
};
absl::Status RunSynthetic(const SyntheticRun& run);

// Sum over all lanes and micro-batches.
double WholeSum(const plan::LaneMap& lanes);

}  // namespace ravel::shard
