// The collectives of every strategy as moves: over which axes, in which order, on which stream; and
// what is refused.

#include "common/plan/program/program_moves.h"

#include <string>
#include <vector>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_join.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/plan/plan_proto.h"
#include "common/plan/sharding_plan.h"
#include "tests/common/plan/plan_testing.h"

namespace ravel::plan {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

struct Choice {
  Strategy shard = Strategy::kOptimGradsParams;
  Strategy replicate = Strategy::kNoShard;
  int64_t replicas = 1;
  int64_t ranks = 4;
  int64_t lanes = 4;
};

absl::StatusOr<ShardingPlan> PlanWith(const Choice& choice) {
  JobSpec spec = testing::SpecOf(testing::Llama(64, 2, 96, 257), choice.lanes);
  spec.strategy = choice.shard;
  spec.replicate_strategy = choice.replicate;
  spec.replicas = choice.replicas;
  return BuildShardingPlan({.spec = spec, .ranks = choice.ranks, .shared_memory = false});
}

// "all-gather shard on gather"
std::string TextOf(const ProgramMove& move) {
  return absl::StrCat(std::string(MoveKindName(move.move.kind)),
                      " ",
                      absl::StrJoin(move.axes, ","),
                      " on ",
                      StreamName(move.stream));
}

std::string TextOf(const ShardingPlan& plan, const std::vector<MoveId>& moves) {
  std::vector<std::string> texts;
  for (const MoveId id : moves) {
    texts.push_back(TextOf(plan.moves.moves[id]));
  }
  return absl::StrJoin(texts, "; ");
}

struct Expected {
  Choice choice;
  std::string weights;
  std::string each_turn;
  std::string each_step;
  std::string whole;
};

TEST(ProgramMoves, AreThoseOfTheStrategy) {
  const std::string gather = "all-gather shard on gather";
  const std::string reduce = "reduce-scatter shard on reduce";
  const std::string back = "all-gather shard on reduce";
  const std::string sums = "all-reduce replicate on outer";
  const std::string part = "reduce-scatter replicate on outer";
  const std::string renew = "all-gather replicate on outer; ";
  constexpr Strategy kNone = Strategy::kNoShard;
  constexpr Strategy kOptim = Strategy::kOptim;
  const Expected all[] = {
      {{kNone}, "", reduce, "", back},
      {{kOptim}, gather, reduce, "", ""},
      {{Strategy::kOptimGrads}, gather, reduce, "", ""},
      {{Strategy::kOptimGradsParams}, gather, reduce, "", ""},
      {{Strategy::kOptimGradsParams, kNone, 2}, gather, reduce, sums, ""},
      {{Strategy::kOptimGradsParams, kOptim, 2}, renew + gather, reduce, part, ""},
      {{Strategy::kOptimGrads, kOptim, 2}, renew + gather, reduce, part, ""},
      {{Strategy::kOptimGrads, Strategy::kOptimGrads, 2}, renew + gather, reduce, part, ""},
      {{Strategy::kOptimGradsParams, Strategy::kOptimGrads, 2}, renew + gather, reduce, part, ""},
      {{kNone, kNone, 2}, "", reduce, sums, back},
      // Lanes in blocks are summed on their rank.
      {{kNone, kNone, 1, 4, 8}, "", "", reduce, back},
      {{kOptim, kOptim, 2, 4, 8}, renew + gather, "", reduce + "; " + part, ""},
  };
  for (const Expected& expected : all) {
    const absl::StatusOr<ShardingPlan> plan = PlanWith(expected.choice);
    ASSERT_TRUE(plan.ok()) << plan.status();
    for (const GroupMoves& moves : plan->moves.of_groups) {
      EXPECT_EQ(TextOf(*plan, moves.weights), expected.weights);
      EXPECT_EQ(TextOf(*plan, moves.each_turn), expected.each_turn);
      EXPECT_EQ(TextOf(*plan, moves.each_step), expected.each_step);
      EXPECT_EQ(TextOf(*plan, moves.whole), expected.whole);
    }
    const bool replicas = expected.choice.replicas > 1;
    EXPECT_EQ(TextOf(plan->moves.moves[plan->moves.statistics]),
              replicas ? "all-gather replicate,shard on reduce" : "all-gather shard on reduce");
  }
}

// Fails when a limit of the engine is not looked at: then the plan is made.
TEST(ProgramMoves, RefusalsNameTensorAxisFromAndTo) {
  const auto refusal = [](Strategy shard, Strategy replicate) {
    return std::string(PlanWith({shard, replicate, 2}).status().message());
  };
  constexpr Strategy kAll = Strategy::kOptimGradsParams;
  EXPECT_THAT(refusal(kAll, kAll),
              AllOf(HasSubstr("parallelism.replicateStrategy"),
                    HasSubstr("tensor model.embed_tokens.weight"),
                    HasSubstr("axis replicate: from Flat to Replicate"),
                    HasSubstr("weights are gathered for each use over axis shard alone")));
  // Replicas sum once per step.
  EXPECT_EQ(refusal(kAll, Strategy::kOptimGrads), "");
  EXPECT_THAT(refusal(Strategy::kNoShard, Strategy::kOptim),
              AllOf(HasSubstr("parallelism.replicateStrategy"),
                    HasSubstr("tensor model.embed_tokens.weight"),
                    HasSubstr("axis shard")));
}

TEST(ProgramMoves, LabelsAreThoseOfPlansOnDisk) {
  const ShardingPlan plan = *PlanWith({Strategy::kOptimGradsParams, Strategy::kOptim, 2});
  const ShardingPlan copied = *PlanWith({Strategy::kNoShard, Strategy::kNoShard, 2});
  int compared = 0;
  for (const ShardingPlan* each : {&plan, &copied}) {
    for (const StepProgram& program : each->programs) {
      for (const Instruction& at : program.instructions) {
        const OpLabel label = LabelOf(each->moves, at);
        EXPECT_EQ(OpOfLabel(label), at.op);
        EXPECT_EQ(MoveOfLabel(each->moves, at.group, label), at.move) << OpName(label);
        compared += IsCollective(at.op) ? 1 : 0;
      }
    }
  }
  EXPECT_GT(compared, 20);
  // A label of which the group has no move.
  EXPECT_LT(MoveOfLabel(plan.moves, 0, OpLabel::kGatherGradient), 0);
  EXPECT_LT(MoveOfLabel(copied.moves, 0, OpLabel::kOuterGather), 0);
  EXPECT_LT(MoveOfLabel(copied.moves, 99, OpLabel::kGather), 0);
}

}  // namespace
}  // namespace ravel::plan
