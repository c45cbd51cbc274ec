// Classes of bugs that sharded training is known for, each named. The guard is a rule of the
// checker or of the builder; every test shows what it would let through.

#include <algorithm>
#include <string>
#include <vector>

#include <absl/strings/match.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/plan/check/program_checker.h"
#include "common/plan/plan_pieces.h"
#include "common/plan/program/program_order.h"
#include "tests/common/plan/plan_testing.h"
#include "tests/common/plan/random_units.h"

namespace ravel::plan {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr int64_t kUnitBytes = 64 * 256 * 4;  // of EqualUnits(_, 64)

ShardingPlan PlanOfEqual(int units, int64_t window_units, int64_t turns = 1) {
  testing::PlanShape shape;
  shape.lanes = {.lanes = 2 * turns, .ranks = 2};
  shape.options.gather_window_bytes = window_units * kUnitBytes;
  shape.options.staging_window_bytes = window_units * kUnitBytes;
  return testing::PlanOfUnits(testing::EqualUnits(units, 64), shape);
}

int Find(const StepProgram& program, OpCode op, int unit, int from = 0) {
  for (size_t i = static_cast<size_t>(from); i < program.instructions.size(); ++i) {
    if (program.instructions[i].op == op && program.instructions[i].unit == unit) {
      return static_cast<int>(i);
    }
  }
  return -1;
}
int CountOf(const StepProgram& program, OpCode op) {
  return static_cast<int>(std::count_if(program.instructions.begin(),
                                        program.instructions.end(),
                                        [&](const Instruction& at) { return at.op == op; }));
}
StepProgram Without(StepProgram program, int gone) {
  program.instructions.erase(program.instructions.begin() + gone);
  for (Instruction& at : program.instructions) {
    at.waits.erase(std::remove(at.waits.begin(), at.waits.end(), gone), at.waits.end());
    for (InstructionId& wait : at.waits) {
      wait = wait > gone ? wait.value() - 1 : wait;
    }
  }
  return program;
}

// Whether buffers of these two lifetimes may be in use at the same time.
bool Together(const HappensBefore& order, const Lifetime& a, const Lifetime& b) {
  return !order.Before(a.accesses.back(), b.begin) && !order.Before(b.accesses.back(), a.begin);
}

// The plan with the smaller one of two buffers in the bytes of the other.
ShardingPlan WithSharedBytes(ShardingPlan plan, BufferId a, BufferId b) {
  const bool larger =
      plan.buffers[static_cast<size_t>(a)].bytes > plan.buffers[static_cast<size_t>(b)].bytes;
  const BufferId stays = larger ? a : b;
  plan.memory.offsets[static_cast<size_t>(larger ? b : a)] =
      plan.memory.offsets[static_cast<size_t>(stays)];
  return plan;
}

std::string Verdict(const ShardingPlan& plan, const StepProgram& program) {
  return std::string(CheckProgram(plan, program).message());
}

TEST(PlanRegression, GatherWaitsForWeightWrite) {
  JobSpec spec = testing::SpecOf(testing::Llama(64, 2, 96, 257), 4);
  spec.replicas = 2;
  spec.replicate_strategy = Strategy::kOptim;
  const ShardingPlan plan = *BuildShardingPlan({.spec = spec, .ranks = 4, .shared_memory = false});
  StepProgram program = plan.program(Phase::kOnly);
  // The first gather renews what replicas have cut, the second one fills the gathered buffer.
  const int gather = Find(program, OpCode::kGather, 0, Find(program, OpCode::kGather, 0) + 1);
  ASSERT_GE(gather, 0);
  program.instructions[static_cast<size_t>(gather)].waits.clear();
  EXPECT_THAT(Verdict(plan, program), StartsWith("K1"));
}

TEST(PlanRegression, RefreshAfterStepNeverSkipped) {
  JobSpec spec = testing::SpecOf(testing::Llama(64, 2, 96, 257), 4);
  spec.strategy = Strategy::kOptim;  // resident weights
  const ShardingPlan plan = *BuildShardingPlan({.spec = spec, .ranks = 4, .shared_memory = false});
  for (const Phase phase : {Phase::kOnly, Phase::kEval}) {
    const StepProgram& program = plan.program(phase);
    const int gather = Find(program, OpCode::kGather, 1);
    ASSERT_GE(gather, 0);
    EXPECT_THAT(Verdict(plan, Without(program, gather)),
                HasSubstr("may run before the gather of gathered/layers.0"));
  }
}

TEST(PlanRegression, PrefetchBudgetIsACap) {
  for (const int64_t units : {1, 2, 3}) {
    const ShardingPlan plan = PlanOfEqual(8, units);
    EXPECT_TRUE(CheckPlan(plan).ok()) << CheckPlan(plan);
    for (int64_t ProgramOptions::*window :
         {&ProgramOptions::gather_window_bytes, &ProgramOptions::staging_window_bytes}) {
      ShardingPlan smaller = plan;
      smaller.options.*window = (units - 1) * kUnitBytes;
      // One unit may always be there alone; staging reaches no further than the next use.
      const bool fits =
          units == 1 || (units == 3 && window != &ProgramOptions::gather_window_bytes);
      EXPECT_EQ(CheckPlan(smaller).ok(), fits) << units;
      EXPECT_TRUE(fits || absl::StartsWith(CheckPlan(smaller).message(), "K6")) << units;
    }
  }
}

TEST(PlanRegression, RecomputeDoesNotRegatherFinishedUnit) {
  ModelInventory inventory = testing::EqualUnits(6, 64);
  for (UnitSpec& unit : inventory.units) {
    unit.remade = {{"r", {64}}};
  }
  testing::PlanShape shape;
  shape.lanes = {.lanes = 2, .ranks = 2};
  shape.options.gather_window_bytes = 2 * kUnitBytes;
  const ShardingPlan plan = testing::PlanOfUnits(inventory, shape);
  ASSERT_TRUE(CheckPlan(plan).ok()) << CheckPlan(plan);
  const StepProgram& program = plan.program(Phase::kOnly);
  EXPECT_EQ(CountOf(program, OpCode::kRecompute), 5) << "the last unit finds it in place";
  EXPECT_EQ(CountOf(program, OpCode::kGather), 2 * (6 - 2) + 2);
  const int done = Find(program, OpCode::kBackward, 5);
  EXPECT_EQ(Find(program, OpCode::kGather, 5, done), -1);
}

TEST(PlanRegression, RootPrefetchesInBackward) {
  const ShardingPlan plan = PlanOfEqual(6, 2);
  const StepProgram& program = plan.program(Phase::kOnly);
  const HappensBefore order(program);
  // Unit 0 is the last of backward: it is fetched like all others, but for what is still in place,
  // before the unit above it runs, and without a wait for that.
  for (int unit = 1; unit < 6; ++unit) {
    const int backward = Find(program, OpCode::kBackward, unit);
    const int again =
        Find(program, OpCode::kGather, unit - 1, Find(program, OpCode::kForward, unit - 1));
    ASSERT_EQ(again < 0, unit == 5) << unit;
    if (again >= 0) {
      EXPECT_LT(again, backward) << unit;
      EXPECT_FALSE(order.Before(backward, again)) << unit;
    }
  }
}

TEST(PlanRegression, SlowReduceDoesNotStallCompute) {
  const ShardingPlan plan = PlanOfEqual(6, 2);
  const StepProgram& program = plan.program(Phase::kOnly);
  const HappensBefore order(program);
  for (int unit = 1; unit < 6; ++unit) {
    EXPECT_FALSE(order.Before(Find(program, OpCode::kReduce, unit),
                              Find(program, OpCode::kBackward, unit - 1)));
  }
}

TEST(PlanRegression, StagingLivesUntilReduceDone) {
  const ShardingPlan plan = PlanOfEqual(4, 2);
  StepProgram program = plan.program(Phase::kOnly);
  const int reduce = Find(program, OpCode::kReduce, 3);
  // The free that follows the reduce goes before it.
  ASSERT_EQ(program.instructions[static_cast<size_t>(reduce) + 1].op, OpCode::kFree);
  std::swap(program.instructions[static_cast<size_t>(reduce)],
            program.instructions[static_cast<size_t>(reduce) + 1]);
  for (Instruction& at : program.instructions) {
    std::replace(at.waits.begin(), at.waits.end(), reduce, reduce + 1);
  }
  EXPECT_THAT(Verdict(plan, program), HasSubstr("uses a buffer that is not alive: staging/u3"));
}

// What may be alive together as far as streams and waits tell shares no bytes, although one ends
// before the other begins in the list: a side stream may be late.
TEST(PlanRegression, ArenaLivenessFollowsEvents) {
  const ShardingPlan plan = PlanOfEqual(6, 2);
  ASSERT_TRUE(CheckPlan(plan).ok()) << CheckPlan(plan);
  const StepProgram& program = plan.program(Phase::kOnly);
  const HappensBefore order(program);
  const std::vector<Lifetime> lives = *LifetimesOf(program, plan.buffers);
  int apart_in_list = 0;
  for (const Lifetime& first : lives) {
    for (const Lifetime& second : lives) {
      const bool same_arena = plan.buffers[static_cast<size_t>(first.buffer)].memory ==
                              plan.buffers[static_cast<size_t>(second.buffer)].memory;
      if (same_arena && first.buffer != second.buffer && first.accesses.back() < second.begin &&
          Together(order, first, second)) {
        ++apart_in_list;
        const ShardingPlan moved = WithSharedBytes(plan, first.buffer, second.buffer);
        EXPECT_THAT(Verdict(moved, program), StartsWith("K3"));
      }
    }
  }
  EXPECT_GE(apart_in_list, 1);
}

// Staging and outer sums of any number of layers take the memory of a window.
TEST(PlanRegression, ReduceInputsNotRetainedPerLayer) {
  testing::PlanShape shape;
  shape.lanes = {.lanes = 4, .ranks = 4, .replicas = 2};
  int64_t temporaries[2];
  for (const int more : {0, 1}) {
    const ShardingPlan plan = testing::PlanOfUnits(testing::EqualUnits(6 + 6 * more, 64), shape);
    int64_t of_layers = 0;
    for (const ProgramBuffer& buffer : plan.buffers) {
      switch (buffer.kind) {
        case BufferKind::kMainWeight:
        case BufferKind::kState:
        case BufferKind::kMainGrad:
        case BufferKind::kSaved:
          of_layers += ArenaBytes(buffer);
          break;
        default:
          break;
      }
    }
    temporaries[more] = plan.memory.packed_bytes() - of_layers;
  }
  EXPECT_LE(temporaries[1], temporaries[0] + 8 * 4096);  // pages between optimizer buffers
}

TEST(PlanRegression, OuterReduceOutputNotRetained) {
  JobSpec spec = testing::SpecOf(testing::Llama(64, 4, 96, 257), 4);
  spec.replicas = 2;
  const ShardingPlan plan = *BuildShardingPlan({.spec = spec, .ranks = 4, .shared_memory = false});
  for (const ProgramBuffer& buffer : plan.buffers) {
    EXPECT_FALSE(buffer.persistent && buffer.kind == BufferKind::kOuterGrad) << buffer.name;
  }
}

TEST(PlanRegression, OddSizedUnitFits) {
  ModelInventory inventory = testing::EqualUnits(4, 64);
  inventory.units.emplace_back();
  inventory.units.back().name = "odd";
  testing::AddTensor(inventory, 4, {1000, 256});
  testing::PlanShape shape;
  shape.lanes = {.lanes = 2, .ranks = 2};
  shape.options.gather_window_bytes = 2 * kUnitBytes;
  const ShardingPlan plan = testing::PlanOfUnits(inventory, shape);
  EXPECT_TRUE(CheckPlan(plan).ok()) << CheckPlan(plan);
}

TEST(PlanRegression, ArenaKnowsLastMicroBatchBuffers) {
  JobSpec spec = testing::SpecOf(testing::Llama(64, 2, 96, 257), 8);
  spec.strategy = Strategy::kNoShard;
  const ShardingPlan plan = *BuildShardingPlan({.spec = spec, .ranks = 2, .shared_memory = false});
  std::vector<int> whole;  // only `last` uses them, all until the weights are updated
  for (size_t i = 0; i < plan.buffers.size(); ++i) {
    if (plan.buffers[i].kind == BufferKind::kFullGrad) {
      whole.push_back(static_cast<int>(i));
    }
  }
  ASSERT_GE(whole.size(), 2U);
  const ShardingPlan shared = WithSharedBytes(plan, whole[0], whole[1]);
  for (const StepProgram& program : plan.programs) {
    EXPECT_EQ(Verdict(plan, program), "");
    EXPECT_EQ(absl::StartsWith(Verdict(shared, program), "K3"), program.phase == Phase::kLast);
  }
}

void SetGradientAccess(StepProgram& program, int instruction, Access access) {
  for (Operand& operand : program.instructions[static_cast<size_t>(instruction)].operands) {
    operand.access = operand.role == Role::kGradient ? access : operand.access;
  }
}

TEST(PlanRegression, EveryMicroBatchCounts) {
  JobSpec spec = testing::SpecOf(testing::Llama(64, 2, 96, 257), 2);
  spec.global_batch = 6;
  spec.micro_batch = 1;
  const ShardingPlan plan = *BuildShardingPlan({.spec = spec, .ranks = 2, .shared_memory = false});
  const StepProgram& middle = plan.program(Phase::kMiddle, LanePart::kMiddle);
  for (const Instruction& at : middle.instructions) {
    EXPECT_TRUE(at.op != OpCode::kBackward || Accumulates(at));
  }
  StepProgram fresh = middle;  // only the last survives
  SetGradientAccess(fresh, Find(fresh, OpCode::kBackward, 1), Access::kWrite);
  EXPECT_FALSE(CheckProgram(plan, fresh).ok());
}

TEST(PlanRegression, FreshStagingIsOverwritten) {
  const ShardingPlan plan = PlanOfEqual(3, 2);
  StepProgram program = plan.program(Phase::kOnly);
  SetGradientAccess(program, Find(program, OpCode::kBackward, 2), Access::kAdd);
  EXPECT_THAT(Verdict(plan, program), StartsWith("K1"));
}

TEST(PlanRegression, NormCountsEachTensorOnce) {
  JobSpec spec = testing::SpecOf(testing::Llama(64, 2, 96, 257), 8);
  spec.replicas = 2;
  for (const Strategy strategy : {Strategy::kNoShard, Strategy::kOptimGradsParams}) {
    spec.strategy = strategy;
    const ShardingPlan plan =
        *BuildShardingPlan({.spec = spec, .ranks = 6, .shared_memory = false});
    std::vector<int64_t> counted(plan.inventory.tensors.size(), 0);
    for (int64_t rank = 0; rank < plan.ranks; ++rank) {
      for (int group = 0; group < static_cast<int>(plan.groups.size()); ++group) {
        for (const OwnedPiece& piece : CountedPieces(plan, group, rank)) {
          counted[static_cast<size_t>(piece.tensor)] += piece.elements();
        }
      }
    }
    for (size_t i = 0; i < counted.size(); ++i) {
      EXPECT_EQ(counted[i], ElementCount(plan.inventory.tensors[i].shape));
    }
  }
}

TEST(PlanRegression, ReduceInPlaceOnlyOwnSlice) {
  JobSpec spec = testing::SpecOf(testing::Llama(64, 2, 96, 257), 4);
  spec.replicas = 2;
  spec.replicate_strategy = Strategy::kOptim;
  const ShardingPlan plan = *BuildShardingPlan({.spec = spec, .ranks = 4, .shared_memory = true});
  // Parts of one buffer are disjoint over the ranks of a replica, and inside it.
  for (size_t id = 0; id < plan.buffers.size(); ++id) {
    const ProgramBuffer& buffer = plan.buffers[id];
    if (buffer.kind != BufferKind::kMainWeight) {
      continue;
    }
    std::vector<int64_t> begins;
    for (int64_t rank = 0; rank < plan.ranks; ++rank) {
      const ElementRange range = StoredRange(plan, buffer.group, rank);
      EXPECT_EQ(BufferOffset(plan, static_cast<int>(id), rank),
                plan.memory.offsets[id] + 4 * range.begin);
      begins.push_back(range.begin);
    }
    std::sort(begins.begin(), begins.end());
    EXPECT_EQ(std::unique(begins.begin(), begins.end()), begins.end());
  }
  ShardingPlan mutant = plan;
  for (ProgramBuffer& buffer : mutant.buffers) {
    if (buffer.kind == BufferKind::kMainWeight) {
      buffer.inside = 0;
    }
  }
  EXPECT_THAT(std::string(CheckPlan(mutant).message()), StartsWith("K12"));
}

TEST(PlanRegression, UnitCalledTwice) {
  ModelInventory inventory = testing::EqualUnits(3, 64);
  inventory.order = {0, 1, 2, 1};
  testing::PlanShape shape;
  shape.lanes = {.lanes = 2, .ranks = 2};
  const ShardingPlan plan = testing::PlanOfUnits(inventory, shape);
  ASSERT_TRUE(CheckPlan(plan).ok()) << CheckPlan(plan);
  std::vector<std::pair<int, bool>> backward;
  for (const Instruction& at : plan.program(Phase::kOnly).instructions) {
    if (at.op == OpCode::kBackward && at.unit == 1) {
      backward.emplace_back(at.call, Accumulates(at));
    }
  }
  EXPECT_EQ(backward, (std::vector<std::pair<int, bool>>{{1, false}, {0, true}}));
  EXPECT_EQ(CountOf(plan.program(Phase::kOnly), OpCode::kReduce), 3);
}

TEST(PlanRegression, FrozenUnitInMiddle) {
  JobSpec spec = testing::SpecOf(testing::Llama(64, 4, 96, 257), 2);
  spec.freeze = {"model.layers.2.*"};
  const ShardingPlan plan = *BuildShardingPlan({.spec = spec, .ranks = 2, .shared_memory = false});
  const StepProgram& program = plan.program(Phase::kOnly);
  const int backward = Find(program, OpCode::kBackward, 3);
  ASSERT_GE(backward, 0) << "units below are trained";
  EXPECT_TRUE(
      BuffersOf(program.instructions[static_cast<size_t>(backward)], Role::kGradient).empty());
  EXPECT_EQ(Find(program, OpCode::kOptimizerStep, 3), -1);
  for (const ProgramBuffer& buffer : plan.buffers) {
    EXPECT_TRUE(buffer.unit != 3 || buffer.kind == BufferKind::kGathered ||
                buffer.kind == BufferKind::kModelWeight || buffer.group < 0)
        << buffer.name;
  }
}

TEST(PlanRegression, PartlyFrozenUnit) {
  JobSpec spec = testing::SpecOf(testing::Llama(64, 4, 96, 257), 2);
  spec.freeze = {"model.embed_tokens*", "model.layers.0.*", "model.layers.1.*q_proj*"};
  const ShardingPlan plan = *BuildShardingPlan({.spec = spec, .ranks = 2, .shared_memory = false});
  const StepProgram& program = plan.program(Phase::kOnly);
  EXPECT_EQ(Find(program, OpCode::kBackward, 0), -1);
  EXPECT_EQ(Find(program, OpCode::kBackward, 1), -1);
  const Instruction& partly =
      program.instructions[static_cast<size_t>(Find(program, OpCode::kBackward, 2))];
  EXPECT_EQ(BuffersOf(partly, Role::kWeights).size(), 2U);
  EXPECT_EQ(BuffersOf(partly, Role::kGradient).size(), 1U);
  std::vector<int> groups_of(plan.inventory.tensors.size(), 0);
  for (const GroupLayout& group : plan.groups) {
    for (const TensorId tensor : group.tensors) {
      ++groups_of[static_cast<size_t>(tensor)];
      EXPECT_EQ(plan.inventory.tensors[static_cast<size_t>(tensor)].trainable, group.trainable);
    }
  }
  EXPECT_EQ(groups_of, std::vector<int>(plan.inventory.tensors.size(), 1));
}

// Evaluation is a program of its own, begins and ends at rest, and writes no state.
TEST(PlanRegression, EvalBetweenSteps) {
  const ShardingPlan plan = PlanOfEqual(4, 2, 4);
  const StepProgram& eval = plan.program(Phase::kEval);
  EXPECT_TRUE(eval.live_at_start.empty() && eval.live_at_end.empty());
  EXPECT_FALSE(plan.program(Phase::kFirst).live_at_end.empty());
  EXPECT_TRUE(plan.program(Phase::kLast).live_at_end.empty());
  for (const Instruction& at : eval.instructions) {
    for (const Operand& operand : at.operands) {
      const ProgramBuffer& buffer = plan.buffers[static_cast<size_t>(operand.buffer)];
      EXPECT_TRUE(!operand.writes() || !buffer.persistent || buffer.kind == BufferKind::kShared)
          << buffer.name;
    }
  }
}

}  // namespace
}  // namespace ravel::plan
