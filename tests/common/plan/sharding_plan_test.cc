#include "common/plan/sharding_plan.h"

#include <algorithm>
#include <limits>
#include <map>
#include <random>
#include <set>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/plan/check/program_checker.h"
#include "common/plan/program/program_order.h"
#include "common/plan/program/program_request.h"
#include "common/plan/report/wire_table.h"
#include "tests/common/plan/layout/rank_check.h"
#include "tests/common/plan/plan_testing.h"

namespace ravel::plan {
namespace {

using ::testing::HasSubstr;

int Count(const StepProgram& program, OpCode op) {
  return static_cast<int>(std::count_if(program.instructions.begin(),
                                        program.instructions.end(),
                                        [&](const auto& at) { return at.op == op; }));
}

class PlanTest : public ::testing::TestWithParam<testing::ModelCase> {};

TEST_P(PlanTest, EveryRankCountHasACheckedPlan) {
  for (int64_t ranks = 1; ranks <= 8; ++ranks) {
    for (const bool shared : {true, false}) {
      for (const int64_t lanes : {8, 16}) {
        const ShardingPlan plan = testing::PlanOf(GetParam().config, ranks, lanes, shared);
        ASSERT_TRUE(CheckPlan(plan).ok());
        const int calls = static_cast<int>(plan.inventory.units.size()) +
                          (GetParam().config.tie_word_embeddings ? 1 : 0);
        for (const StepProgram& program : plan.programs) {
          const bool eval = program.phase == Phase::kEval;
          const bool last = program.phase == Phase::kOnly || program.phase == Phase::kLast;
          EXPECT_EQ(Count(program, OpCode::kReduce), eval ? 0 : calls);
          EXPECT_EQ(Count(program, OpCode::kStatsReduce), last ? 1 : 0);
          EXPECT_EQ(program.instructions.back().op, OpCode::kEndPhase);
        }
      }
    }
  }
}

TEST_P(PlanTest, PackingIsCloseToItsBound) {
  for (const int64_t ranks : {1, 2, 3, 4}) {
    for (const bool shared : {true, false}) {
      const ShardingPlan plan = testing::PlanOf(GetParam().config, ranks, 4, shared);
      const auto packed = static_cast<double>(plan.memory.packed_bytes());
      const auto bound = static_cast<double>(plan.memory.lower_bound_bytes);
      EXPECT_GE(packed, bound);
      EXPECT_LE(packed / bound, 1.05) << ranks << " ranks, shared " << shared;
    }
  }
}

TEST_P(PlanTest, PrivateMemoryFallsAsRanksAreAdded) {
  int64_t before = std::numeric_limits<int64_t>::max();
  for (const int64_t ranks : {1, 2, 4, 8}) {
    const ShardingPlan plan = testing::PlanOf(GetParam().config, ranks, 8, true);
    int64_t persistent = 0;
    for (const ProgramBuffer& buffer : plan.buffers) {
      if (buffer.persistent && buffer.memory == MemoryKind::kPrivate) {
        persistent += buffer.bytes;
      }
    }
    EXPECT_LT(persistent, before);
    before = persistent;
  }
}

INSTANTIATE_TEST_SUITE_P(Models,
                         PlanTest,
                         ::testing::ValuesIn(testing::ModelCases()),
                         testing::CaseName);

TEST(Plan, SameRequestSamePlan) {
  const ModelConfig config = testing::Llama(64, 3, 96, 257);
  const ShardingPlan a = testing::PlanOf(config, 3, 8, false);
  const ShardingPlan b = testing::PlanOf(config, 3, 8, false);
  EXPECT_EQ(a.memory.offsets, b.memory.offsets);
  ASSERT_EQ(a.programs.size(), b.programs.size());
  for (size_t i = 0; i < a.programs.size(); ++i) {
    EXPECT_TRUE(CheckSameCollectives(a.programs[i], b.programs[i]).ok());
  }
}

// With k of n equal units in the window, a micro-batch gathers 2 (n - k) + k times.
TEST(Plan, GathersPerMicroBatchFollowTheWindow) {
  const ModelConfig config = testing::Llama(64, 10, 96, 32);
  JobSpec spec = testing::SpecOf(config, 4);
  const ShardingPlan base = *BuildShardingPlan({.spec = spec, .ranks = 4, .shared_memory = false});
  const int64_t layer = base.groups[1].layout.total_elements() * 4;
  ASSERT_LT(base.groups[0].layout.total_elements() * 4, layer);
  for (int64_t k = 2; k <= 6; ++k) {
    spec.gather_window_bytes = k * layer;
    const ShardingPlan plan =
        *BuildShardingPlan({.spec = spec, .ranks = 4, .shared_memory = false});
    const int units = static_cast<int>(plan.inventory.units.size());
    const int gathers = Count(plan.program(Phase::kOnly), OpCode::kGather);
    EXPECT_LE(gathers, 2 * units - static_cast<int>(k)) << "window " << k;
    EXPECT_GE(gathers, 2 * units - static_cast<int>(k) - 3) << "window " << k;
    EXPECT_EQ(Count(plan.program(Phase::kEval), OpCode::kGather), units);
  }
}

TEST(Plan, AWindowSmallerThanAUnitStillRuns) {
  JobSpec spec = testing::SpecOf(testing::Llama(64, 3, 96, 257), 4);
  spec.gather_window_bytes = 1;
  spec.staging_window_bytes = 1;
  for (const bool tied : {false, true}) {
    spec.model->tie_word_embeddings = tied;
    const absl::StatusOr<ShardingPlan> plan =
        BuildShardingPlan({.spec = spec, .ranks = 2, .shared_memory = false});
    ASSERT_TRUE(plan.ok()) << plan.status();
  }
}

TEST(Plan, InPlaceGathersOnlyWhereWeightsMayHaveChanged) {
  const ShardingPlan plan = testing::PlanOf(testing::Llama(64, 3, 96, 257), 2, 8, true);
  const int units = static_cast<int>(plan.inventory.units.size());
  EXPECT_EQ(Count(plan.program(Phase::kFirst), OpCode::kGather), units);
  EXPECT_EQ(Count(plan.program(Phase::kMiddle), OpCode::kGather), 0);
  EXPECT_EQ(Count(plan.program(Phase::kLast), OpCode::kGather), 0);
  EXPECT_EQ(Count(plan.program(Phase::kEval), OpCode::kGather), units);
  EXPECT_EQ(StepWire(plan).total() % 4, 0);
  for (const ProgramBuffer& buffer : plan.buffers) {
    if (buffer.kind == BufferKind::kMainWeight) {
      ASSERT_GE(buffer.inside, 0);
      EXPECT_EQ(plan.buffers[static_cast<size_t>(buffer.inside)].bytes, 2 * buffer.bytes);
    }
  }
}

TEST(Plan, TiedTableIsReducedTwiceHeadFirst) {
  ModelConfig config = testing::Llama(64, 2, 96, 257);
  config.tie_word_embeddings = true;
  const ShardingPlan plan = testing::PlanOf(config, 2, 2, false);
  std::vector<std::pair<UnitId, int>> reduces;
  for (const Instruction& at : plan.program(Phase::kOnly).instructions) {
    if (at.op == OpCode::kReduce) {
      reduces.emplace_back(at.unit, at.call);
    }
    if (at.op == OpCode::kBackward && at.unit == 3) {
      EXPECT_EQ(BuffersOf(at, Role::kWeights).size(), 2U);
      EXPECT_EQ(BuffersOf(at, Role::kGradient).size(), 2U);
    }
  }
  EXPECT_EQ(reduces, (std::vector<std::pair<UnitId, int>>{{3, 0}, {0, 0}, {2, 0}, {1, 0}, {0, 1}}));
}

TEST(Plan, WireBytesCountPiecesOfOtherRanks) {
  const ShardingPlan plan = testing::PlanOf(testing::Llama(64, 2, 96, 256), 2, 4, true);
  int64_t shard_bytes = 0;
  for (const GroupLayout& group : plan.groups) {
    shard_bytes += group.layout.shard_elements * 4;
  }
  EXPECT_EQ(StepWire(plan).total(), 2 * shard_bytes);  // two turns, one other rank
}

struct BadSpec {
  const char* name;
  void (*change)(JobSpec&);
  const char* message;
};

TEST(Plan, ImpossibleRequestsNameTheField) {
  const BadSpec cases[] = {
      {"strategy",
       [](JobSpec& s) {
         s.replicas = 2;
         s.replicate_strategy = Strategy::kOptimGradsParams;
       },
       "parallelism.replicateStrategy"},
      {"cut by replicas alone",
       [](JobSpec& s) {
         s.replicas = 2;
         s.replicate_strategy = Strategy::kOptim;
         s.strategy = Strategy::kNoShard;
       },
       "parallelism.replicateStrategy"},
      {"replicas", [](JobSpec& s) { s.replicas = 3; }, "parallelism.replicas"},
      {"too many replicas", [](JobSpec& s) { s.replicas = 8; }, "parallelism.replicas"},
      {"replicas and ranks", [](JobSpec& s) { s.replicas = 4; }, "parallelism.replicas"},
      {"freeze", [](JobSpec& s) { s.freeze = {"*"}; }, "training.freeze"},
      {"batch", [](JobSpec& s) { s.global_batch = 6; }, "training.globalBatch"},
      {"no batch", [](JobSpec& s) { s.global_batch = 0; }, "training.globalBatch"},
      {"lanes", [](JobSpec& s) { s.virtual_ranks = 3; }, "determinism.virtualRanks"},
      {"few lanes",
       [](JobSpec& s) {
         s.elastic.sizes = {1, 16};
       },
       "determinism.virtualRanks"},
      {"micro", [](JobSpec& s) { s.micro_batch = 3; }, "training.microBatch"},
      {"parts", [](JobSpec& s) { s.tensor_parts = 3; }, "determinism.tensorParts"},
      {"many parts", [](JobSpec& s) { s.tensor_parts = 32; }, "determinism.tensorParts"},
      {"parts of blocks",
       [](JobSpec& s) {
         s.tensor_parts = 4;
         s.compute = ComputeType::kBF16;
         s.recipe.recipe = Recipe::kMxFp8;
       },
       "precision.recipe"},
      {"length", [](JobSpec& s) { s.data.sequence_length = 1 << 20; }, "data.sequenceLength"},
      {"no length", [](JobSpec& s) { s.data.sequence_length = 0; }, "data.sequenceLength"},
      {"model", [](JobSpec& s) { s.model.reset(); }, "model"},
      {"heads", [](JobSpec& s) { s.model->num_key_value_heads = 3; }, "num_key_value_heads"},
      {"transport", [](JobSpec& s) { s.transport = Transport::kShm; }, "parallelism.transport"},
  };
  for (const BadSpec& bad : cases) {
    JobSpec spec = testing::SpecOf(testing::Llama(64, 2, 96, 257), 4);
    bad.change(spec);
    const absl::StatusOr<ShardingPlan> plan =
        BuildShardingPlan({.spec = spec, .ranks = 2, .shared_memory = false});
    ASSERT_FALSE(plan.ok()) << bad.name;
    EXPECT_THAT(std::string(plan.status().message()), HasSubstr(bad.message)) << bad.name;
  }
  const absl::StatusOr<ShardingPlan> plan =
      BuildShardingPlan({.spec = testing::SpecOf(testing::Llama(64, 2, 96, 257), 4), .ranks = 5});
  ASSERT_FALSE(plan.ok());
  EXPECT_THAT(std::string(plan.status().message()), HasSubstr("devices.count"));
}

TEST(ResolveBatch, LanesAreThePowerOfTwoAtOrAboveTheLargestSize) {
  JobSpec spec = testing::SpecOf(testing::Llama(64, 2, 96, 257), 4);
  spec.virtual_ranks = 0;
  spec.elastic.sizes = {1, 2, 3};
  spec.global_batch = 12;
  const absl::StatusOr<JobSpec> resolved = ResolveBatch(spec);
  ASSERT_TRUE(resolved.ok()) << resolved.status();
  EXPECT_EQ(resolved->virtual_ranks, 4);
  EXPECT_EQ(resolved->micro_batch, 3);
}

}  // namespace
}  // namespace ravel::plan
