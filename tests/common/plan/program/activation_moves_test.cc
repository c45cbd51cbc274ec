// Steps of units on a mesh with a tensor axis: where a pass is cut, what each step touches, and
// that the checker sees every fault of a step or a move.

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/plan/report/wire_table.h"
#include "tests/common/plan/plan_testing.h"
#include "tests/testing/tensor_plan.h"

namespace ravel::plan {
namespace {

using ::testing::ElementsAre;
using ::testing::StartsWith;

ShardingPlan PlanOnTensor(int64_t tensor_ranks,
                          Strategy strategy = Strategy::kOptimGradsParams,
                          RecomputePolicy recompute = RecomputePolicy::kBlock) {
  JobSpec spec = testing::SpecOf(testing::Llama(64, 2, 96, 257), 4);
  spec.strategy = strategy;
  spec.recompute = recompute;
  absl::StatusOr<ShardingPlan> plan =
      TensorPlan({.spec = spec, .data_ranks = 2, .tensor_ranks = tensor_ranks});
  EXPECT_TRUE(plan.ok()) << plan.status();
  return *std::move(plan);
}

TEST(ActivationSteps, PassesAreCutWhereRanksExchange) {
  const ShardingPlan plan = PlanOnTensor(2);
  const UnitId head = plan.inventory.units.last_id();
  EXPECT_THAT(StepTexts(plan, 0, UnitPass::kForward), ElementsAre("table", "table_sum*"));
  EXPECT_THAT(StepTexts(plan, 0, UnitPass::kBackward), ElementsAre("table"));
  EXPECT_THAT(StepTexts(plan, 1, UnitPass::kForward),
              ElementsAre("attention_norm attention attention_output",
                          "attention_residual*",
                          "mlp_norm mlp mlp_output",
                          "mlp_residual*"));
  EXPECT_THAT(
      StepTexts(plan, 1, UnitPass::kRecompute),
      ElementsAre(
          "attention_norm attention attention_output", "attention_residual*", "mlp_norm mlp"));
  EXPECT_THAT(StepTexts(plan, 1, UnitPass::kBackward),
              ElementsAre("mlp mlp_input_product",
                          "mlp_input*",
                          "mlp_weights",
                          "mlp_norm attention attention_input_product",
                          "attention_input*",
                          "attention_weights",
                          "attention_norm"));
  EXPECT_THAT(StepTexts(plan, head, UnitPass::kForward), ElementsAre("final_norm"));
  EXPECT_THAT(StepTexts(plan, head, UnitPass::kBackward),
              ElementsAre("loss_statistics*",
                          "loss_of_chunk",
                          "loss_statistics*",
                          "loss_of_chunk",
                          "loss_input*",
                          "final_norm"));
  EXPECT_THAT(
      StepTexts(plan, head, UnitPass::kEvaluate),
      ElementsAre(
          "final_norm", "loss_statistics*", "loss_of_chunk", "loss_statistics*", "loss_of_chunk"));
}

// Without the axis a call is one instruction, as ever.
TEST(ActivationSteps, OneRankHasOneStep) {
  const ShardingPlan plan = testing::PlanOf(testing::Llama(64, 2, 96, 257), 2, 2, false);
  for (const StepProgram& program : plan.programs) {
    for (const Instruction& at : program.instructions) {
      EXPECT_LT(at.segment, 0);
      EXPECT_TRUE(!IsCompute(at.op) || at.move < 0);
    }
  }
  EXPECT_LT(plan.moves.activation_sum, 0);
}

TEST(ActivationSteps, EveryStrategyIsPlanned) {
  for (const Strategy strategy :
       {Strategy::kNoShard, Strategy::kOptim, Strategy::kOptimGrads, Strategy::kOptimGradsParams}) {
    for (const int64_t ranks : {2, 4}) {
      const ShardingPlan plan = PlanOnTensor(ranks, strategy);
      EXPECT_TRUE(CheckPlan(plan).ok());
      EXPECT_GT(StepWire(plan).tensor(), 0);
      EXPECT_EQ(StepWire(plan).total(),
                StepWire(plan).shard() + StepWire(plan).replicate() + StepWire(plan).tensor());
    }
  }
}

// Per micro-batch and rank, of T ranks: each of the sums receives the addends of its rows and the
// rows of others, (T - 1) / T of 8 bytes per element; statistics 3 T words of each token.
TEST(ActivationSteps, WireIsCountedPerMove) {
  const ShardingPlan plan = PlanOnTensor(2, Strategy::kOptimGradsParams, RecomputePolicy::kNone);
  const int64_t tokens = plan.micro_batch.sequences * plan.micro_batch.sequence_tokens;
  const int64_t layers = plan.inventory.config.num_hidden_layers;
  const int64_t sums = 1 + 4 * layers + 1;  // table, two each way of each layer, head
  const int64_t statistics = 3 * 2 * RoundUp(tokens, 2) * 4;
  EXPECT_EQ(StepWire(plan).tensor(),
            plan.lanes.programs() *
                (sums * tokens * plan.inventory.config.hidden_size * 8 + statistics) / 2);
}

using Change = std::function<void(const ShardingPlan&, IdVector<InstructionId, Instruction>&)>;

// Changes the first instruction that `where` holds for.
Change First(const std::function<bool(const ShardingPlan&, const Instruction&)>& where,
             const std::function<void(Instruction&)>& change) {
  return [=](const ShardingPlan& plan, IdVector<InstructionId, Instruction>& list) {
    const auto at = std::find_if(
        list.begin(), list.end(), [&](const Instruction& one) { return where(plan, one); });
    ASSERT_NE(at, list.end());
    change(*at);
  };
}
bool Sums(const ShardingPlan& plan, const Instruction& at) {
  return IsCompute(at.op) && at.move == plan.moves.activation_sum && at.move >= 0;
}
bool Gathers(const ShardingPlan& plan, const Instruction& at) {
  return IsCompute(at.op) && at.move == plan.moves.activation_gather && at.move >= 0;
}
bool Later(const ShardingPlan&, const Instruction& at) {
  return IsCompute(at.op) && at.segment > 0 && at.move < 0;
}
void Drop(Instruction& at, Role role) {
  std::erase_if(at.operands, [role](const Operand& operand) { return operand.role == role; });
}
// Swaps an instruction with the next one of its stream.
Change SwapFirst(const std::function<bool(const ShardingPlan&, const Instruction&)>& where) {
  return [=](const ShardingPlan& plan, IdVector<InstructionId, Instruction>& list) {
    for (size_t i = 0; i < list.size(); ++i) {
      for (size_t next = i + 1; where(plan, list[i]) && next < list.size(); ++next) {
        if (IsCompute(list[next].op)) {
          std::swap(list[i].segment, list[next].segment);
          std::swap(list[i].move, list[next].move);
          std::swap(list[i].stream, list[next].stream);
          std::swap(list[i].operands, list[next].operands);
          return;
        }
      }
    }
    FAIL() << "nothing to swap";
  };
}

TEST(ActivationMutants, EveryFaultOfAStepIsCaught) {
  const struct {
    const char* name;
    const char* rule;
    Change change;
  } mutants[] = {
      {"a sum without its move",
       "K1",
       First(Sums,
             [](Instruction& at) {
               at.move = {};
               at.stream = StreamId::kCompute;
             })},
      {"a gather without its move", "K1", First(Gathers, [](Instruction& at) { at.move = {}; })},
      {"a move of weights", "K4", First(Sums, [](Instruction& at) { at.move = 0; })},
      {"a move where there is none", "K4", First(Later, [](Instruction& at) { at.move = 0; })},
      {"another segment", "K1", First(Sums, [](Instruction& at) { at.segment = 0; })},
      {"no segment", "K1", First(Later, [](Instruction& at) { at.segment = {}; })},
      {"another stream", "K4", First(Sums, [](Instruction& at) { at.stream = StreamId::kReduce; })},
      {"no addend", "K1", First(Sums, [](Instruction& at) { Drop(at, Role::kSend); })},
      {"no rows", "K1", First(Sums, [](Instruction& at) { Drop(at, Role::kSum); })},
      {"no rows of a gather", "K1", First(Gathers, [](Instruction& at) { Drop(at, Role::kSum); })},
      {"a later step that begins scratch anew",
       "K1",
       First(Later,
             [](Instruction& at) {
               for (Operand& operand : at.operands) {
                 operand.access = operand.role == Role::kScratch ? Access::kWrite : operand.access;
               }
             })},
      {"steps in another order", "K1", SwapFirst(Sums)},
      {"a gather after what reads it", "K1", SwapFirst(Gathers)},
      {"a step too few",
       "K1",
       [](const ShardingPlan& plan, IdVector<InstructionId, Instruction>& list) {
         const auto last = std::find_if(
             list.begin(), list.end(), [&](const Instruction& at) { return Sums(plan, at); });
         testing::Erase(list, static_cast<int32_t>(last - list.begin()));
       }},
  };
  const ShardingPlan plan = PlanOnTensor(2);
  for (const StepProgram& program : plan.programs) {
    for (const auto& mutant : mutants) {
      StepProgram changed = program;
      mutant.change(plan, changed.instructions);
      EXPECT_THAT(std::string(CheckProgram(plan, changed).message()), StartsWith(mutant.rule))
          << mutant.name << " in " << PhaseName(program.phase);
    }
  }
}

TEST(ActivationMutants, BuffersOfAnotherSizeOrTypeAreCaught) {
  for (const BufferKind kind : {BufferKind::kAddend, BufferKind::kRows}) {
    ShardingPlan plan = PlanOnTensor(2);
    for (ProgramBuffer& buffer : plan.buffers) {
      buffer.bytes -= buffer.kind == kind ? 256 : 0;
    }
    EXPECT_THAT(std::string(CheckPlan(plan).message()), StartsWith("K13"));
  }
  ShardingPlan plan = PlanOnTensor(2);
  for (ProgramBuffer& buffer : plan.buffers) {
    buffer.dtype = buffer.kind == BufferKind::kAddend ? DType::kBF16 : buffer.dtype;
  }
  EXPECT_THAT(std::string(CheckPlan(plan).message()), StartsWith("K13"));
}

TEST(ActivationMoves, AxisMustDivideTheTokens) {
  JobSpec spec = testing::SpecOf(testing::Llama(64, 2, 96, 257), 4);
  spec.data.sequence_length = 7;
  spec.global_batch = spec.virtual_ranks;  // one sequence at a time
  const auto plan = TensorPlan({.spec = spec, .data_ranks = 1, .tensor_ranks = 2});
  EXPECT_THAT(std::string(plan.status().message()),
              StartsWith("axis tensor of 2 ranks does not divide the 7 tokens"));
}

TEST(ActivationMoves, OnlyActivationsAreReducedToPartsOfRows) {
  const Mesh mesh = *Mesh::Create({{.name = "shard", .size = 2}, {.name = "tensor", .size = 4}});
  const PlacedTensor hidden = {.name = "hidden", .shape = {8, 6}};
  const auto plan = [&](const Placement& from, const Placement& to, BufferUse use) {
    return PlanMove(hidden, mesh, {{"tensor", from}}, {"tensor", to}, use);
  };
  const Placement rows = Placement::Shard(0);
  EXPECT_EQ(plan(Placement::Partial(), rows, BufferUse::kActivation)->kind,
            MoveKind::kReduceScatter);
  EXPECT_EQ(plan(rows, Placement::Replicate(), BufferUse::kActivation)->kind, MoveKind::kAllGather);
  EXPECT_EQ(plan(Placement::Partial(), Placement::Replicate(), BufferUse::kActivation)->kind,
            MoveKind::kAllReduce);
  EXPECT_FALSE(plan(Placement::Partial(), rows, BufferUse::kGradient).ok());
  EXPECT_FALSE(plan(rows, Placement::Replicate(), BufferUse::kGradient).ok());
  EXPECT_FALSE(plan(Placement::Partial(), rows, BufferUse::kValues).ok());
}

}  // namespace
}  // namespace ravel::plan
