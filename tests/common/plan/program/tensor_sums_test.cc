// Gradients of which each rank of the tensor axis has an addend: which they are, that they are
// summed over the axis when a lane closes, before any data axis, and that the checker sees a sum
// that is missing, late or of other ranks.

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include <absl/strings/str_cat.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/model/architecture/architecture.h"
#include "common/plan/check/program_checker.h"
#include "common/plan/plan_proto.h"
#include "common/plan/report/wire_table.h"
#include "tests/common/plan/plan_testing.h"

namespace ravel::plan {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr int64_t kSumRanks = 4;

// Eight query heads and two key heads, on 2 x 4 ranks.
JobSpec SumsJob(ArchitectureKind kind, Strategy strategy, int64_t micro_batches) {
  ModelConfig config = ArchitectureOf(kind).defaults;
  config.vocab_size = 97;
  config.hidden_size = 64;
  config.intermediate_size = 96;
  config.num_hidden_layers = 2;
  config.num_attention_heads = 8;
  config.num_key_value_heads = ArchitectureOf(kind).qkv.names.size() == 1 ? 8 : 2;
  config.head_dim = 8;
  config.max_position_embeddings = 64;
  JobSpec spec = testing::SpecOf(config, 4);
  spec.tensor = kSumRanks;
  spec.strategy = strategy;
  spec.micro_batch = 1;
  spec.global_batch = 4 * micro_batches;
  return spec;
}

ShardingPlan SumsPlan(const JobSpec& spec) {
  absl::StatusOr<ShardingPlan> plan =
      BuildShardingPlan({.spec = spec, .ranks = 2 * kSumRanks, .shared_memory = true});
  EXPECT_TRUE(plan.ok()) << plan.status();
  return *std::move(plan);
}

bool IsSum(const ShardingPlan& plan, const Instruction& at) {
  return at.op == OpCode::kReduce && SumsAddends(plan.moves.moves[at.move]);
}

// Ranks that sum the gradient of a tensor; 1: each has all of it.
int64_t RanksThatSum(const ShardingPlan& plan, std::string_view name) {
  for (const GroupId group : plan.groups.ids()) {
    for (const TensorId tensor : plan.groups[group].tensors) {
      if (plan.inventory.tensors[tensor].name == name) {
        const std::vector<MoveId>& moves = plan.moves.of_groups[group].each_lane;
        return moves.empty() ? 1 : plan.moves.moves[moves.front()].move.axis_size;
      }
    }
  }
  return 0;
}

TEST(TensorSums, AreOfWeightsThatHeadsShareAndOfCopiedHeads) {
  const ShardingPlan qwen =
      SumsPlan(SumsJob(ArchitectureKind::kQwen3, Strategy::kOptimGradsParams, 1));
  const std::string layer = "model.layers.1.";
  EXPECT_EQ(RanksThatSum(qwen, layer + "self_attn.q_norm.weight"), 4);
  EXPECT_EQ(RanksThatSum(qwen, layer + "self_attn.k_norm.weight"), 4);
  EXPECT_EQ(RanksThatSum(qwen, layer + "self_attn.k_proj.weight"), 2);
  EXPECT_EQ(RanksThatSum(qwen, layer + "self_attn.v_proj.weight"), 2);
  EXPECT_EQ(RanksThatSum(qwen, layer + "self_attn.q_proj.weight"), 1);
  EXPECT_EQ(RanksThatSum(qwen, layer + "mlp.down_proj.weight"), 1);
  EXPECT_EQ(RanksThatSum(qwen, layer + "input_layernorm.weight"), 1);
  const ShardingPlan gpt2 = SumsPlan(SumsJob(ArchitectureKind::kGpt2, Strategy::kOptim, 1));
  for (const GroupMoves& moves : gpt2.moves.of_groups) {
    EXPECT_TRUE(moves.each_lane.empty());
  }
}

TEST(TensorSums, OfSequenceParallelJobsAreThoseOfTokensToo) {
  JobSpec spec = SumsJob(ArchitectureKind::kLlama, Strategy::kOptimGrads, 1);
  spec.sequence_parallel = true;
  const ShardingPlan plan = SumsPlan(spec);
  EXPECT_EQ(RanksThatSum(plan, "model.layers.0.input_layernorm.weight"), 4);
  EXPECT_EQ(RanksThatSum(plan, "model.norm.weight"), 4);
  EXPECT_EQ(RanksThatSum(plan, "model.embed_tokens.weight"), 1);
}

// In programs that close a lane, once for each gradient, of staging in fp32 and before it leaves.
TEST(TensorSums, ComeBeforeAnyDataAxis) {
  for (const Strategy strategy :
       {Strategy::kNoShard, Strategy::kOptim, Strategy::kOptimGrads, Strategy::kOptimGradsParams}) {
    for (const int64_t micro_batches : {1, 2}) {
      JobSpec spec = SumsJob(ArchitectureKind::kQwen3, strategy, micro_batches);
      spec.compute = ComputeType::kBF16;
      spec.gradient_wire = WireType::kBF16;
      const ShardingPlan plan = SumsPlan(spec);
      for (const StepProgram& program : plan.programs) {
        const bool closes = program.phase != Phase::kEval &&
                            (program.part == LanePart::kWhole || program.part == LanePart::kClose);
        int64_t sums = 0;
        for (const InstructionId i : program.instructions.ids()) {
          const Instruction& at = program.instructions[i];
          if (!IsSum(plan, at)) {
            continue;
          }
          ++sums;
          const BufferId staging = BufferOf(at, Role::kSend);
          EXPECT_EQ(plan.buffers[staging].dtype, DType::kF32);
          EXPECT_EQ(plan.buffers[staging].memory, MemoryKind::kSymmetric);
          for (InstructionId before = 0; before < i; ++before) {
            const Instruction& other = program.instructions[before];
            EXPECT_FALSE((other.op == OpCode::kReduce || other.op == OpCode::kAccumulateGrad) &&
                         BufferOf(other, Role::kSend) == staging);
          }
        }
        // Two groups of each of two layers: copied heads, and norms of heads.
        EXPECT_EQ(sums, closes ? 4 : 0) << PhaseName(program.phase);
      }
    }
  }
}

TEST(TensorSums, SurviveThePlansBytes) {
  const ShardingPlan plan = SumsPlan(SumsJob(ArchitectureKind::kQwen3, Strategy::kOptim, 2));
  const std::string bytes = SerializePlan(plan);
  const absl::StatusOr<ShardingPlan> back = ParsePlan(bytes);
  ASSERT_TRUE(back.ok()) << back.status();
  EXPECT_EQ(SerializePlan(*back), bytes);
  EXPECT_EQ(back->moves.moves, plan.moves.moves);
  ASSERT_EQ(back->programs.size(), plan.programs.size());
  for (size_t i = 0; i < plan.programs.size(); ++i) {
    EXPECT_EQ(back->programs[i].instructions, plan.programs[i].instructions);
  }
}

// An all-reduce receives (k - 1) / k of the gradient twice.
TEST(TensorSums, AreCountedOnTheWireOfTheirAxis) {
  const ShardingPlan plan = SumsPlan(SumsJob(ArchitectureKind::kQwen3, Strategy::kOptim, 1));
  for (const Instruction& at : plan.programs.front().instructions) {
    if (IsSum(plan, at)) {
      const int64_t ranks = plan.moves.moves[at.move].move.axis_size;
      const int64_t bytes = plan.groups[at.group].layout.total_elements() * 4;
      EXPECT_EQ(WireOf(plan, at, 1), WireBytes{.tensor_reduces = 2 * bytes / ranks * (ranks - 1)});
    }
  }
}

using Change = std::function<void(const ShardingPlan&, IdVector<InstructionId, Instruction>&)>;

Change FirstSum(const std::function<void(const ShardingPlan&, Instruction&)>& change) {
  return [=](const ShardingPlan& plan, IdVector<InstructionId, Instruction>& list) {
    const auto sum = std::find_if(
        list.begin(), list.end(), [&](const Instruction& at) { return IsSum(plan, at); });
    ASSERT_NE(sum, list.end());
    change(plan, *sum);
  };
}

// Exchanges op, move and operands of the first sum and of what follows it on its gradient.
void SwapWithNext(const ShardingPlan& plan, IdVector<InstructionId, Instruction>& list) {
  const auto sum = std::find_if(
      list.begin(), list.end(), [&](const Instruction& at) { return IsSum(plan, at); });
  ASSERT_NE(sum, list.end());
  const auto next = std::find_if(sum + 1, list.end(), [&](const Instruction& at) {
    return at.group == sum->group && (at.op == OpCode::kReduce || at.op == OpCode::kAccumulateGrad);
  });
  ASSERT_NE(next, list.end());
  std::swap(sum->op, next->op);
  std::swap(sum->move, next->move);
  std::swap(sum->operands, next->operands);
}

TEST(TensorSumMutants, EveryFaultIsCaught) {
  const ShardingPlan plan = SumsPlan(SumsJob(ArchitectureKind::kQwen3, Strategy::kOptimGrads, 1));
  const auto other_ranks = [](const ShardingPlan& in, Instruction& sum) {
    for (const MoveId id : in.moves.moves.ids()) {
      if (id != sum.move && SumsAddends(in.moves.moves[id])) {
        sum.move = id;
        return;
      }
    }
    FAIL() << "one move of addends";
  };
  const struct {
    const char* name;
    const char* rule;
    Change change;
  } mutants[] = {
      {"no sum",
       "K7",
       [](const ShardingPlan& in, IdVector<InstructionId, Instruction>& list) {
         const auto sum = std::find_if(
             list.begin(), list.end(), [&](const Instruction& at) { return IsSum(in, at); });
         testing::Erase(list, static_cast<int32_t>(sum - list.begin()));
       }},
      {"among other ranks", "K1", FirstSum(other_ranks)},
      {"after the gradient has left", "K7", SwapWithNext},
      {"on another stream", "K4", FirstSum([](const ShardingPlan&, Instruction& sum) {
         sum.stream = StreamId::kOuter;
       })},
      {"into no buffer", "K1", FirstSum([](const ShardingPlan&, Instruction& sum) {
         std::erase_if(sum.operands, [](const Operand& one) { return one.role == Role::kSum; });
       })},
  };
  for (const auto& mutant : mutants) {
    StepProgram changed = plan.programs.front();
    mutant.change(plan, changed.instructions);
    EXPECT_THAT(std::string(CheckProgram(plan, changed).message()), StartsWith(mutant.rule))
        << mutant.name;
  }
}

TEST(TensorSumMutants, BuffersOfAnotherSizeAreCaught) {
  ShardingPlan plan = SumsPlan(SumsJob(ArchitectureKind::kQwen3, Strategy::kOptim, 1));
  for (ProgramBuffer& buffer : plan.buffers) {
    buffer.bytes *= buffer.kind == BufferKind::kTensorSum ? 2 : 1;
  }
  EXPECT_THAT(std::string(CheckPlan(plan).message()), StartsWith("K13"));
}

}  // namespace
}  // namespace ravel::plan
