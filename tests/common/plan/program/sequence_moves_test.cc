// Steps of units whose ranks have their own tokens alone between products: where a pass is cut,
// what moves, what a rank keeps, and that the checker sees every fault of a sum that is not
// gathered.

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/model/architecture/architecture.h"
#include "common/plan/check/program_checker.h"
#include "common/plan/report/wire_table.h"
#include "tests/common/plan/plan_testing.h"
#include "tests/testing/tensor_plan.h"

namespace ravel::plan {
namespace {

using ::testing::ElementsAre;
using ::testing::StartsWith;

JobSpec SequenceJob(const ModelConfig& config,
                    Strategy strategy = Strategy::kOptimGradsParams,
                    RecomputePolicy recompute = RecomputePolicy::kNone) {
  JobSpec spec = testing::SpecOf(config, 4);
  spec.strategy = strategy;
  spec.recompute = recompute;
  spec.tensor = 2;
  spec.sequence_parallel = true;
  spec.allow_padding = true;
  return spec;
}

ShardingPlan SequencePlan(const JobSpec& spec, int64_t ranks = 4) {
  absl::StatusOr<ShardingPlan> plan =
      BuildShardingPlan({.spec = spec, .ranks = ranks, .shared_memory = true});
  EXPECT_TRUE(plan.ok()) << plan.status();
  return *std::move(plan);
}

ModelConfig SequenceModel() {
  return testing::Llama(64, 2, 96, 257);
}

TEST(SequenceSteps, ProductsReadWhatIsGatheredAndLeaveSums) {
  const ShardingPlan plan =
      SequencePlan(SequenceJob(SequenceModel(), Strategy::kOptim, RecomputePolicy::kBlock));
  const UnitId head = plan.inventory.units.last_id();
  EXPECT_THAT(StepTexts(plan, 0, UnitPass::kForward), ElementsAre("table", "table_sum+"));
  EXPECT_THAT(StepTexts(plan, 0, UnitPass::kBackward), ElementsAre("table_gradient*", "table"));
  EXPECT_THAT(StepTexts(plan, 1, UnitPass::kForward),
              ElementsAre("attention_norm",
                          "attention_normed*",
                          "attention attention_output",
                          "attention_residual+",
                          "mlp_norm",
                          "mlp_normed*",
                          "mlp mlp_output",
                          "mlp_residual+"));
  EXPECT_THAT(StepTexts(plan, 1, UnitPass::kBackward),
              ElementsAre("mlp_normed*",
                          "mlp_gradient*",
                          "mlp mlp_input_product",
                          "mlp_input+",
                          "mlp_weights",
                          "mlp_norm",
                          "attention_normed*",
                          "attention_gradient*",
                          "attention attention_input_product",
                          "attention_input+",
                          "attention_weights",
                          "attention_norm"));
  EXPECT_THAT(StepTexts(plan, head, UnitPass::kForward), ElementsAre("final_norm"));
  const std::vector<std::string> backward = StepTexts(plan, head, UnitPass::kBackward);
  EXPECT_EQ(backward.front(), "loss_normed*");
  EXPECT_EQ(backward[backward.size() - 2], "loss_input+");
  EXPECT_EQ(StepTexts(plan, head, UnitPass::kEvaluate)[1], "loss_normed*");
}

// A recomputation gathers what its products read: nothing where norms alone are made again.
TEST(SequenceSteps, RecomputationsGatherWhatTheirProductsRead) {
  const auto recompute = [](RecomputePolicy policy) {
    return StepTexts(SequencePlan(SequenceJob(SequenceModel(), Strategy::kOptim, policy)),
                     1,
                     UnitPass::kRecompute);
  };
  EXPECT_THAT(recompute(RecomputePolicy::kNorm), ElementsAre("attention_norm mlp_norm"));
  EXPECT_THAT(recompute(RecomputePolicy::kMlp),
              ElementsAre("attention_norm mlp_norm", "mlp_normed*", "mlp"));
  EXPECT_THAT(recompute(RecomputePolicy::kBlock),
              ElementsAre("attention_norm",
                          "attention_normed*",
                          "attention attention_output",
                          "attention_residual+",
                          "mlp_norm",
                          "mlp_normed*",
                          "mlp"));
}

TEST(SequenceSteps, EveryStrategyIsPlannedForEveryArchitecture) {
  for (const Architecture* architecture : AllArchitectures()) {
    ModelConfig config = architecture->defaults;
    config.vocab_size = 97;
    config.hidden_size = 64;
    config.intermediate_size = 96;
    config.num_hidden_layers = 2;
    config.num_attention_heads = 8;
    config.num_key_value_heads = architecture->qkv.names.size() == 1 ? 8 : 2;
    config.head_dim = 8;
    config.max_position_embeddings = 64;
    for (const Strategy strategy : {Strategy::kNoShard,
                                    Strategy::kOptim,
                                    Strategy::kOptimGrads,
                                    Strategy::kOptimGradsParams}) {
      const ShardingPlan plan = SequencePlan(SequenceJob(config, strategy));
      EXPECT_EQ(CheckPlan(plan), absl::OkStatus());
      EXPECT_LT(plan.moves.activation_sum, 0);
      ASSERT_GE(plan.moves.activation_scatter, 0);
      EXPECT_EQ(plan.moves.moves[plan.moves.activation_scatter].move.kind,
                MoveKind::kReduceScatter);
    }
  }
}

// Per micro-batch and rank, of T ranks: each product's addends (4 bytes per element) and what it
// reads (4 bytes of fp32), (T - 1) / T of each. A layer has two sums and two gathers forward, two
// and four backward; embedding and head a sum and a gather each.
TEST(SequenceSteps, WireIsCountedPerMove) {
  const ShardingPlan plan = SequencePlan(SequenceJob(SequenceModel()));
  const int64_t tokens = plan.micro_batch.sequences * plan.micro_batch.sequence_tokens;
  const int64_t layers = plan.inventory.config.num_hidden_layers;
  const int64_t statistics = 3 * 2 * tokens * 4;
  const int64_t activations = (4 + 6) * layers + 2 + 2;
  WireBytes expected;
  for (const Instruction& at : plan.programs.front().instructions) {
    if (IsCompute(at.op)) {
      expected += WireOf(plan, at, 1);
    }
  }
  EXPECT_EQ(expected.tensor(),
            (activations * tokens * plan.inventory.config.hidden_size * 4 + statistics) / 2);
}

// A rank's own tokens: half of the residual stream, and of what norms keep of it.
TEST(SequenceSteps, RanksKeepTheirOwnTokensOfWhatIsBetweenProducts) {
  JobSpec spec = SequenceJob(SequenceModel());
  const ShardingPlan own = SequencePlan(spec);
  spec.sequence_parallel = false;
  const ShardingPlan all = SequencePlan(spec);
  const auto rows = [](const ShardingPlan& plan, const char* name) {
    const ActivationSpec* found = FindActivation(plan.inventory.units[UnitId(1)].saved, name);
    return found == nullptr ? -1 : found->shape[0];
  };
  for (const char* name : {"x0", "n0", "rstd0", "x1", "n1", "rstd1"}) {
    EXPECT_EQ(2 * rows(own, name), rows(all, name)) << name;
  }
  for (const char* name : {"qkv", "att", "mlp_in"}) {
    EXPECT_EQ(rows(own, name), rows(all, name)) << name;
  }
  EXPECT_EQ(2 * FindActivation(own.inventory.shared, "hidden")->shape[0],
            FindActivation(all.inventory.shared, "hidden")->shape[0]);
  EXPECT_EQ(StreamShape(own.inventory), StreamShape(all.inventory));
}

using ChangeOfStep = std::function<void(Instruction&)>;

TEST(SequenceMutants, EveryFaultOfASumThatStaysIsCaught) {
  const ShardingPlan plan = SequencePlan(SequenceJob(SequenceModel()));
  const auto drop = [](Role role) -> ChangeOfStep {
    return [role](Instruction& at) {
      std::erase_if(at.operands, [role](const Operand& one) { return one.role == role; });
    };
  };
  const struct {
    const char* name;
    MoveId of;
    ChangeOfStep change;
  } mutants[] = {
      {"a sum without its move",
       plan.moves.activation_scatter,
       [](Instruction& at) { at.move = {}; }},
      {"a gather in place of a sum",
       plan.moves.activation_scatter,
       [&](Instruction& at) { at.move = plan.moves.activation_gather; }},
      {"a sum in place of a gather",
       plan.moves.activation_gather,
       [&](Instruction& at) { at.move = plan.moves.activation_scatter; }},
      {"no addend", plan.moves.activation_scatter, drop(Role::kSend)},
      {"no shared", plan.moves.activation_scatter, drop(Role::kShared)},
      {"no rows", plan.moves.activation_gather, drop(Role::kSum)},
      {"no scratch", plan.moves.activation_gather, drop(Role::kScratch)},
  };
  for (const StepProgram& program : plan.programs) {
    for (const auto& mutant : mutants) {
      StepProgram changed = program;
      const auto at = std::find_if(
          changed.instructions.begin(), changed.instructions.end(), [&](const Instruction& one) {
            return IsCompute(one.op) && one.move == mutant.of;
          });
      ASSERT_NE(at, changed.instructions.end());
      mutant.change(*at);
      at->stream = at->move >= 0 ? plan.moves.moves[at->move].stream : StreamId::kCompute;
      EXPECT_THAT(std::string(CheckProgram(plan, changed).message()), StartsWith("K1"))
          << mutant.name << " in " << PhaseName(program.phase);
    }
  }
}

TEST(SequenceMutants, AnotherMoveTableIsCaught) {
  ShardingPlan plan = SequencePlan(SequenceJob(SequenceModel()));
  std::swap(plan.moves.activation_scatter, plan.moves.activation_sum);
  EXPECT_THAT(std::string(CheckPlan(plan).message()), StartsWith("K13"));
}

}  // namespace
}  // namespace ravel::plan
