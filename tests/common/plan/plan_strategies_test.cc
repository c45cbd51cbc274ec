// Plans of every strategy on every shape of lanes: all of them pass the checker, and the
// collectives of a step are exactly those that the placements ask for.

#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/plan/plan_pieces.h"
#include "common/plan/program_checker.h"
#include "tests/common/plan/plan_testing.h"

namespace ravel::plan {
namespace {

using ::testing::HasSubstr;

struct Axes {
  const char* name;
  Strategy shard;
  Strategy replicate;
  int64_t replicas;
};
constexpr Axes kAxes[] = {
    {"zero0", Strategy::kNoShard, Strategy::kNoShard, 1},
    {"zero1", Strategy::kOptim, Strategy::kNoShard, 1},
    {"zero2", Strategy::kOptimGrads, Strategy::kNoShard, 1},
    {"zero3", Strategy::kOptimGradsParams, Strategy::kNoShard, 1},
    {"zero0 x 2", Strategy::kNoShard, Strategy::kNoShard, 2},
    {"zero1 x 2", Strategy::kOptim, Strategy::kNoShard, 2},
    {"hsdp", Strategy::kOptimGradsParams, Strategy::kNoShard, 2},
    {"hfsdp", Strategy::kOptimGradsParams, Strategy::kOptim, 2},
    {"hfsdp x 4", Strategy::kOptimGradsParams, Strategy::kOptim, 4},
    {"optim in optim", Strategy::kOptim, Strategy::kOptim, 2},
    {"optim_grads in optim", Strategy::kOptimGrads, Strategy::kOptim, 2},
};

JobSpec SpecWith(const ModelConfig& config,
                 const Axes& axes,
                 int64_t lanes,
                 int64_t micro_batches) {
  JobSpec spec = testing::SpecOf(config, lanes);
  spec.strategy = axes.shard;
  spec.replicate_strategy = axes.replicate;
  spec.replicas = axes.replicas;
  spec.global_batch = lanes * micro_batches;
  spec.micro_batch = 1;
  return spec;
}

// How often a step runs each instruction.
std::map<OpCode, int64_t> StepCounts(const ShardingPlan& plan) {
  std::map<OpCode, int64_t> counts;
  for (int64_t at = 0; at < plan.lanes.programs(); ++at) {
    const StepSlot slot = SlotOf(plan.lanes, at);
    for (const Instruction& instruction : plan.program(slot.phase, slot.part).instructions) {
      ++counts[instruction.op];
    }
  }
  return counts;
}

TEST(PlanStrategies, EveryStrategyWidthAndMicroBatchPassesTheChecker) {
  int plans = 0;
  for (const Axes& axes : kAxes) {
    for (const int64_t ranks : {1, 2, 3, 4, 6, 8}) {
      for (const int64_t micro_batches : {1, 2, 3}) {
        for (const bool shared : {true, false}) {
          for (const RecomputePolicy recompute :
               {RecomputePolicy::kNone, RecomputePolicy::kBlock}) {
            ModelConfig config = testing::Llama(64, 3, 96, 257);
            config.tie_word_embeddings = plans % 2 == 0;
            JobSpec spec = SpecWith(config, axes, 16, micro_batches);
            spec.recompute = recompute;
            const absl::StatusOr<ShardingPlan> plan =
                BuildShardingPlan({.spec = spec, .ranks = ranks, .shared_memory = shared});
            if (ranks % axes.replicas != 0) {
              EXPECT_THAT(std::string(plan.status().message()), HasSubstr("parallelism.replicas"));
              continue;
            }
            ASSERT_TRUE(plan.ok()) << axes.name << ", " << ranks << " ranks, " << micro_batches
                                   << " micro-batches, shared " << shared << ": " << plan.status();
            ++plans;
          }
        }
      }
    }
  }
  EXPECT_GT(plans, 500);
}

}  // namespace
}  // namespace ravel::plan
