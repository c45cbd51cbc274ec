// One lane on one rank has one buffer for each gradient: micro-batches add up in the sum over
// lanes. More lanes have as many buffers as the fixed tree needs. No other plan stages there.

#include <bit>
#include <cstdint>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/plan/check/program_checker.h"
#include "common/plan/layout/strategy_table.h"
#include "common/plan/plan_pieces.h"
#include "common/plan/plan_proto.h"
#include "common/plan/program/buffer_index.h"
#include "common/plan/program/program_buffers.h"
#include "common/plan/sharding_plan.h"
#include "tests/common/plan/plan_testing.h"

namespace ravel::plan {
namespace {

using ::testing::StartsWith;

JobSpec StagedSpec(int64_t lanes, int64_t micro_batches, Strategy strategy) {
  JobSpec spec = testing::SpecOf(testing::Llama(64, 2, 96, 257), lanes);
  spec.strategy = strategy;
  spec.global_batch = lanes * micro_batches;
  spec.micro_batch = 1;
  return spec;
}

ShardingPlan StagedPlan(const JobSpec& spec, int64_t ranks = 1) {
  absl::StatusOr<ShardingPlan> plan =
      BuildShardingPlan({.spec = spec, .ranks = ranks, .shared_memory = true});
  EXPECT_TRUE(plan.ok()) << plan.status();
  return plan.ok() ? *std::move(plan) : ShardingPlan{};
}

constexpr Strategy kStrategies[] = {
    Strategy::kNoShard, Strategy::kOptim, Strategy::kOptimGrads, Strategy::kOptimGradsParams};

// Bytes that stay over a step for gradients, per byte of an fp32 gradient of all parameters.
double GradientBuffers(const ShardingPlan& plan) {
  int64_t bytes = 0;
  for (const ProgramBuffer& buffer : plan.buffers) {
    const bool gradient = buffer.kind == BufferKind::kStaging ||
                          buffer.kind == BufferKind::kLocalGrad ||
                          buffer.kind == BufferKind::kMainGrad;
    bytes += gradient && buffer.persistent && buffer.inside < 0 ? buffer.bytes : 0;
  }
  int64_t elements = 0;
  for (const GroupLayout& group : plan.groups) {
    elements += group.layout.total_elements();
  }
  return static_cast<double>(bytes) / static_cast<double>(4 * elements);
}

TEST(StagedInSum, OneRankHasTheLeastBuffersThatTheTreeNeeds) {
  for (const Strategy strategy : kStrategies) {
    for (const int64_t lanes : {1, 2, 4, 8, 16}) {
      const ShardingPlan plan = StagedPlan(StagedSpec(lanes, 3, strategy));
      const auto least =
          static_cast<int>(std::bit_width(static_cast<uint64_t>(lanes)));  // log2(V) + 1
      EXPECT_EQ(GradientBuffers(plan), least) << lanes << " lanes, " << RowOf(strategy).name;
    }
  }
}

TEST(StagedInSum, AloneIsALaneOfOneRankWithSeveralMicroBatches) {
  struct Case {
    int64_t lanes;
    int64_t ranks;
    int64_t replicas;
    int64_t micro_batches;
    bool in_sum;
  };
  for (const Case& at : {Case{1, 1, 1, 2, true},
                         Case{2, 2, 2, 2, true},
                         Case{1, 1, 1, 1, false},
                         Case{2, 1, 1, 2, false},
                         Case{2, 2, 1, 2, false},
                         Case{4, 2, 2, 2, false}}) {
    for (const Strategy strategy : kStrategies) {
      JobSpec spec = StagedSpec(at.lanes, at.micro_batches, strategy);
      spec.replicas = at.replicas;
      const ShardingPlan plan = StagedPlan(spec, at.ranks);
      EXPECT_EQ(StagedInSum(plan.lanes), at.in_sum);
      for (const ProgramBuffer& buffer : plan.buffers) {
        if (buffer.kind == BufferKind::kStaging) {
          EXPECT_EQ(buffer.inside >= 0, at.in_sum) << buffer.name;
        }
      }
    }
  }
}

// Buffers of whole gradients, and gathers that fill them.
int WholeGradients(const ShardingPlan& plan) {
  int count = 0;
  for (const ProgramBuffer& buffer : plan.buffers) {
    count += buffer.kind == BufferKind::kFullGrad ? 1 : 0;
  }
  for (const StepProgram& program : plan.programs) {
    for (const Instruction& at : program.instructions) {
      const bool gathers = WorkLabelOf(plan.moves, at) == OpLabel::kGatherGradient;
      count += gathers ? 1 : 0;
    }
  }
  return count;
}

// Its sum is the whole gradient, which takes no memory of its own and is not copied.
TEST(WholeGradient, OneRankOfAReplicaUpdatesFromItsSum) {
  for (const int64_t lanes : {2, 8}) {
    for (const int64_t replicas : {1, 2}) {
      for (const int64_t micro_batches : {1, 3}) {
        JobSpec spec = StagedSpec(lanes, micro_batches, Strategy::kNoShard);
        spec.replicas = replicas;
        const ShardingPlan plan = StagedPlan(spec, replicas);
        EXPECT_EQ(WholeGradients(plan), 0);
        for (const GroupId group : plan.groups.ids()) {
          EXPECT_EQ(UpdateGradient(plan, group), MeasuredGradient(plan, group));
        }
        EXPECT_TRUE(CheckPlan(plan).ok()) << CheckPlan(plan);
      }
    }
  }
  // A device's host takes the sum down when it is final.
  JobSpec offloaded = StagedSpec(8, 3, Strategy::kNoShard);
  offloaded.cpu_devices = false;
  offloaded.optimizer.offload.fraction = 1;
  const ShardingPlan of_device = StagedPlan(offloaded);
  EXPECT_EQ(WholeGradients(of_device), 0);
  EXPECT_GT(of_device.memory.offload_bytes, 0);

  const ShardingPlan two = StagedPlan(StagedSpec(8, 3, Strategy::kNoShard), 2);
  EXPECT_EQ(WholeGradients(two), 2 * std::ssize(two.groups));
}

// The plan that `change` makes of each staging buffer is refused.
template <typename Change>
void ExpectRefused(ShardingPlan plan, const Change& change) {
  for (const BufferId id : plan.buffers.ids()) {
    if (plan.buffers[id].kind == BufferKind::kStaging) {
      change(plan, id);
    }
  }
  EXPECT_THAT(std::string(CheckPlan(plan).message()), StartsWith("K12"));
}

TEST(StagedInSum, OtherMemoryOrSeveralLanesAreRefused) {
  const ShardingPlan plan = StagedPlan(StagedSpec(1, 2, Strategy::kOptimGradsParams));
  ASSERT_TRUE(CheckPlan(plan).ok()) << CheckPlan(plan);
  ExpectRefused(plan, [](ShardingPlan& mutant, BufferId id) {
    mutant.memory.offsets[id] -= mutant.memory.offsets[id] == 0 ? 0 : 256;
  });
  ExpectRefused(plan, [](ShardingPlan& mutant, BufferId id) {
    mutant.buffers[id].inside = BufferId(mutant.buffers[id].inside.value() - 1);
  });
  // Two lanes that are staged in the slot of the first.
  const auto stage_in_slot = [](ShardingPlan& mutant, BufferId id) {
    const ProgramBuffer& staging = mutant.buffers[id];
    mutant.buffers[id].inside =
        FindBuffer(mutant.buffers,
                   {.kind = BufferKind::kMainGrad, .owner = staging.group, .call = staging.call});
    mutant.buffers[id].memory = mutant.buffers[mutant.buffers[id].inside].memory;
    mutant.memory.offsets[id] = mutant.memory.offsets[mutant.buffers[id].inside];
  };
  ExpectRefused(StagedPlan(StagedSpec(2, 2, Strategy::kOptimGradsParams)), stage_in_slot);
}

TEST(StagedInSum, PlansGoThereAndBack) {
  const ShardingPlan plan = StagedPlan(StagedSpec(1, 3, Strategy::kOptimGradsParams));
  const absl::StatusOr<ShardingPlan> back = ParsePlan(SerializePlan(plan));
  ASSERT_TRUE(back.ok()) << back.status();
  EXPECT_EQ(back->buffers, plan.buffers);
}

}  // namespace
}  // namespace ravel::plan
