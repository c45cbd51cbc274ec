// A lane that is alone adds its micro-batches in the memory of the sum over lanes. That gives the
// bits of a plan that stages them apart, which takes 4 bytes per parameter more.

#include <cstdint>
#include <string>
#include <vector>

#include <absl/strings/str_cat.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/check.h"
#include "common/plan/check/program_checker.h"
#include "tests/testing/strategy_cases.h"

namespace ravel::trainer {
namespace {

using plan::BufferKind;

constexpr int64_t kOneLaneSteps = 6;

struct OneLaneCase {
  StrategyCase strategy;
  std::string model = "odd_tied";
  plan::WireType wire = plan::WireType::kF32;
  plan::ComputeType compute = plan::ComputeType::kF32;
  plan::Recipe recipe = plan::Recipe::kNone;

  std::string name() const {
    return absl::StrCat(strategy.name(),
                        "_",
                        model,
                        wire == plan::WireType::kBF16 ? "_wire" : "",
                        compute == plan::ComputeType::kBF16 ? "_bf16" : "",
                        recipe == plan::Recipe::kNone ? "" : "_codes");
  }
};

// One lane in each replica, an evaluation after each step; fresh staging memory holds NaN.
RecordArgs OneLaneArgs(const OneLaneCase& tested) {
  const std::string folder = OwnFolder("ravel_one_lane");
  RecordArgs args = ArgsOf(tested.strategy, JobOf(tested.strategy, tested.model, folder));
  args.spec.virtual_ranks = args.spec.replicas;
  args.spec.global_batch = args.spec.replicas * tested.strategy.micro_batches;
  args.spec.gradient_wire = tested.wire;
  args.spec.compute = tested.compute;
  args.spec.recipe.recipe = tested.recipe;
  args.spec.recipe.history = 3;
  args.last_step = kOneLaneSteps;
  args.evaluate_every_step = true;
  args.options.poison = true;
  return args;
}

// Gives staging memory of its own.
absl::Status StageApart(plan::ShardingPlan& plan) {
  for (plan::ProgramBuffer& buffer : plan.buffers) {
    if (buffer.kind == BufferKind::kStaging) {
      EXPECT_GE(buffer.inside, 0) << buffer.name;
      buffer.inside = {};
    }
  }
  ASSIGN_OR_RETURN(plan.memory, plan::PlanBuffers(plan.buffers, plan.programs));
  return plan::CheckPlan(plan);
}

std::vector<OneLaneCase> OneLaneCases() {
  using plan::ComputeType;
  using plan::WireType;
  std::vector<OneLaneCase> cases;
  for (const NamedStrategy& strategy : MatrixStrategies()) {
    for (const WireType wire : {WireType::kF32, WireType::kBF16}) {
      cases.push_back({.strategy = {.strategy = strategy.name, .micro_batches = 3}, .wire = wire});
      cases.push_back(
          {.strategy = {.strategy = strategy.name, .micro_batches = 2, .in_place = true},
           .model = "bundled_rope_scaling",
           .wire = wire,
           .compute = ComputeType::kBF16});
    }
  }
  cases.push_back({.strategy = {.micro_batches = 3, .recompute = plan::RecomputePolicy::kBlock},
                   .model = "layer_drop"});
  cases.push_back({.strategy = {.micro_batches = 3},
                   .model = "recipes",
                   .wire = WireType::kBF16,
                   .compute = ComputeType::kBF16,
                   .recipe = plan::Recipe::kDelayed});
  // Addends of the two ranks are summed in the staging.
  for (const WireType wire : {WireType::kF32, WireType::kBF16}) {
    cases.push_back(
        {.strategy = {.micro_batches = 3, .tensor = 2}, .model = "cut_qwen3_tied", .wire = wire});
  }
  return cases;
}

class OneLane : public ::testing::TestWithParam<OneLaneCase> {};

TEST_P(OneLane, StagedInItsSumHasTheBitsOfStagedApart) {
  const RecordArgs in_sum = OneLaneArgs(GetParam());
  RecordArgs apart = in_sum;
  apart.adjust = [&in_sum](plan::ShardingPlan& plan) -> absl::Status {
    if (in_sum.adjust) {
      RETURN_IF_ERROR(in_sum.adjust(plan));
    }
    return StageApart(plan);
  };
  const Recording run = Record(in_sum);
  ASSERT_EQ(run.steps.size(), static_cast<size_t>(kOneLaneSteps));
  EXPECT_EQ(FirstDifference(Record(apart), run), "");
}

INSTANTIATE_TEST_SUITE_P(Cases,
                         OneLane,
                         ::testing::ValuesIn(OneLaneCases()),
                         [](const auto& tested) { return tested.param.name(); });

// Updates read the sum of one rank, and a gathered gradient of two: a tied table is summed twice.
TEST(OneRankRuns, UpdatesFromTheSumHaveTheBitsOfAGatheredGradient) {
  for (const std::string model : {"odd_tied", "bundled_rope_scaling"}) {
    for (const plan::WireType wire : {plan::WireType::kF32, plan::WireType::kBF16}) {
      const auto run = [&](int64_t width) {
        const StrategyCase tested = {.strategy = "ZeRO0", .width = width, .micro_batches = 3};
        RecordArgs args = ArgsOf(tested, JobOf(tested, model, OwnFolder("ravel_one_rank")));
        args.spec.gradient_wire = wire;
        args.last_step = kOneLaneSteps;
        args.options.poison = true;
        return Record(args);
      };
      EXPECT_EQ(FirstDifference(run(2), run(1)), "") << model;
    }
  }
}

// The bits of a run do not depend on where a lane's micro-batches are added, but on their order: a
// lane of three and one of one sequence are different sums.
TEST(OneLaneRuns, MicroBatchesAreAllAdded) {
  OneLaneCase one = {.strategy = {.micro_batches = 3}};
  RecordArgs three = OneLaneArgs(one);
  RecordArgs whole = three;
  whole.spec.micro_batch = 3;
  const Recording added = Record(three);
  const Recording at_once = Record(whole);
  for (size_t step = 0; step < added.steps.size(); ++step) {
    EXPECT_NEAR(added.steps[step].loss, at_once.steps[step].loss, 1e-5) << step;
    EXPECT_NEAR(added.steps[step].grad_norm, at_once.steps[step].grad_norm, 1e-4) << step;
  }
}

}  // namespace
}  // namespace ravel::trainer
