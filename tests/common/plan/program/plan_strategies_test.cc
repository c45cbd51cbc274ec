// Plans of every strategy on every shape of lanes: all of them pass the checker, and the
// collectives of a step are exactly those that the placements ask for.

#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/plan/check/program_checker.h"
#include "common/plan/plan_pieces.h"
#include "common/plan/program/program_order.h"
#include "tests/common/plan/layout/rank_check.h"
#include "tests/common/plan/memory/memory_timeline.h"
#include "tests/common/plan/plan_testing.h"
#include "tests/common/plan/random_units.h"
#include "tests/testing/sanitizer.h"

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
std::map<OpLabel, int64_t> StepCounts(const ShardingPlan& plan) {
  std::map<OpLabel, int64_t> counts;
  for (int64_t at = 0; at < plan.lanes.programs(); ++at) {
    const StepSlot slot = SlotOf(plan.lanes, at);
    for (const Instruction& instruction : plan.program(slot.phase, slot.part).instructions) {
      ++counts[LabelOf(plan.moves, instruction)];
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

// M micro-batches, U groups.
TEST(PlanStrategies, CollectivesPerStepAreExact) {
  for (const Axes& axes : kAxes) {
    for (const int64_t micro_batches : {1, 3}) {
      const JobSpec spec = SpecWith(testing::Llama(64, 4, 96, 257), axes, 16, micro_batches);
      const ShardingPlan plan =
          *BuildShardingPlan({.spec = spec, .ranks = 4, .shared_memory = false});
      const auto units = static_cast<int64_t>(plan.groups.size());
      std::map<OpLabel, int64_t> counts = StepCounts(plan);
      const bool local = plan.lanes.blocks;
      const bool outer = axes.replicas > 1;
      const bool cut = axes.replicate != Strategy::kNoShard;
      EXPECT_EQ(counts[OpLabel::kReduceScatter], local ? units : plan.lanes.turns() * units)
          << axes.name;
      EXPECT_EQ(counts[OpLabel::kAccumulateGrad], local ? plan.lanes.turns() * units : 0);
      EXPECT_EQ(counts[OpLabel::kOuterReduce], outer ? units : 0) << axes.name;
      EXPECT_EQ(counts[OpLabel::kOuterGather], cut ? units : 0) << axes.name;
      EXPECT_EQ(counts[OpLabel::kGatherGradient], axes.shard == Strategy::kNoShard ? units : 0);
      EXPECT_EQ(counts[OpLabel::kStatsReduce], 1);
      EXPECT_EQ(counts[OpLabel::kOptimizerStep], units);
      if (axes.shard == Strategy::kNoShard) {
        EXPECT_EQ(counts[OpLabel::kGather], 0);
      } else if (axes.shard != Strategy::kOptimGradsParams) {
        EXPECT_EQ(counts[OpLabel::kGather], units) << axes.name;
      }
    }
  }
}

// n equal units, of which the window holds k: 2 M (n - k) + k gathers per step.
TEST(PlanStrategies, GathersFollowTheWindow) {
  constexpr int kUnits = 9;
  for (int k = 2; k <= kUnits; ++k) {
    for (const int64_t turns : {1, 2, 4}) {
      testing::PlanShape shape;
      shape.lanes = {.lanes = 4 * turns, .ranks = 4};
      shape.options.gather_window_bytes = int64_t{k} * 64 * 256 * 4;
      const ShardingPlan plan = testing::PlanOfUnits(testing::EqualUnits(kUnits, 64), shape);
      ASSERT_TRUE(CheckPlan(plan).ok()) << CheckPlan(plan);
      EXPECT_EQ(StepCounts(plan)[OpLabel::kGather], 2 * turns * (kUnits - k) + k)
          << "window " << k << ", turns " << turns;
    }
  }
}

TEST(PlanStrategies, NeighboursDiffer) {
  std::vector<std::string> listings;
  for (const Axes& axes : kAxes) {
    for (const int64_t micro_batches : {1, 3}) {
      const JobSpec spec = SpecWith(testing::Llama(64, 3, 96, 257), axes, 16, micro_batches);
      const ShardingPlan plan =
          *BuildShardingPlan({.spec = spec, .ranks = 4, .shared_memory = false});
      std::string listing;
      for (const ProgramBuffer& buffer : plan.buffers) {
        listing += buffer.name + " " + std::to_string(buffer.bytes) + "\n";
      }
      for (const StepProgram& program : plan.programs) {
        for (size_t i = 0; i < program.instructions.size(); ++i) {
          listing += InstructionName(program, static_cast<int>(i)) + "\n";
        }
      }
      EXPECT_EQ(std::count(listings.begin(), listings.end(), listing), 0) << axes.name;
      listings.push_back(std::move(listing));
    }
  }
}

TEST(PlanStrategies, RandomUnitTreesPassTheChecker) {
  for (uint64_t trial = 0; trial < ravel::testing::Fewer<uint64_t>(1500, 15); ++trial) {
    const uint64_t seed = testing::kSeed + trial;
    const ShardingPlan plan = testing::RandomPlans(seed).Next();
    const absl::Status status = CheckPlan(plan);
    ASSERT_TRUE(status.ok()) << "seed " << seed << ": " << status;
    EXPECT_GE(plan.memory.packed_bytes(), plan.memory.lower_bound_bytes) << "seed " << seed;
  }
}

// Ranks of all replicas run a program together, streams apart or in list order.
TEST(PlanStrategies, RanksNeverWaitForEver) {
  for (uint64_t trial = 0; trial < 200; ++trial) {
    const ShardingPlan plan = testing::RandomPlans(testing::kSeed + trial).Next();
    for (const StepProgram& program : plan.programs) {
      const std::vector<const StepProgram*> all(static_cast<size_t>(plan.ranks), &program);
      for (const RankOrder order : {RankOrder::kStreams, RankOrder::kList}) {
        const absl::Status status = CheckRanks(plan, all, order);
        EXPECT_TRUE(status.ok()) << testing::kSeed + trial << ": " << status;
      }
    }
  }
}

TEST(PlanStrategies, ARankOfAnotherReplicaThatDiffersIsNamed) {
  JobSpec spec = SpecWith(testing::Llama(64, 3, 96, 257), kAxes[7], 8, 1);  // hfsdp
  const ShardingPlan plan = *BuildShardingPlan({.spec = spec, .ranks = 8, .shared_memory = false});
  const StepProgram& good = plan.program(Phase::kOnly);
  for (size_t drop = 0; drop < good.instructions.size(); ++drop) {
    if (!IsCollective(good.instructions[drop].op)) {
      continue;
    }
    StepProgram mutant = good;
    mutant.instructions.erase(mutant.instructions.begin() + static_cast<std::ptrdiff_t>(drop));
    for (Instruction& at : mutant.instructions) {
      std::vector<InstructionId> waits;
      for (const InstructionId wait : at.waits) {
        if (wait != static_cast<int>(drop)) {
          waits.push_back(wait > static_cast<int>(drop) ? wait.value() - 1 : wait);
        }
      }
      at.waits = waits;
    }
    for (const size_t rank : {size_t{1}, size_t{6}}) {
      std::vector<const StepProgram*> all(8, &good);
      all[rank] = &mutant;
      const std::string error(CheckRanks(plan, all).message());
      EXPECT_TRUE(error.rfind("K4", 0) == 0 || error.rfind("K5", 0) == 0)
          << InstructionName(good, static_cast<int>(drop)) << ": " << error;
    }
  }
}

TEST(PlanStrategies, MemoryTimelineStaysWithinTheArenas) {
  for (uint64_t trial = 0; trial < 100; ++trial) {
    const ShardingPlan plan = testing::RandomPlans(testing::kSeed + trial).Next();
    int64_t most = 0;
    for (const StepProgram& program : plan.programs) {
      const auto timeline = MemoryTimeline(plan, program.phase, program.part);
      ASSERT_TRUE(timeline.ok()) << timeline.status();
      ASSERT_EQ(timeline->size(), program.instructions.size());
      for (const MemoryMoment& moment : *timeline) {
        most = std::max(most, moment.total());
      }
    }
    EXPECT_GT(most, 0);
    EXPECT_LE(most, plan.memory.packed_bytes()) << testing::kSeed + trial;
  }
}

}  // namespace
}  // namespace ravel::plan
