// Quantized matrices beside determinism.tensorParts: codes, scales and losses have the bits of one
// rank on any number of ranks of a tensor axis, in every recipe. What the axis would cut of an
// activation has a scale for each part, on one rank, too.

#include <algorithm>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/model/recipes.h"
#include "common/plan/check/program_checker.h"
#include "common/plan/plan_proto.h"
#include "common/plan/program/program_uses.h"
#include "common/plan/sharding_plan.h"
#include "tests/testing/recipe_cases.h"
#include "tests/testing/strategy_cases.h"
#include "tests/testing/training_cases.h"

namespace ravel::trainer {
namespace {

constexpr int64_t kRecipeSteps = 4;
constexpr int64_t kRecipeParts = 4;

// Four query heads over two key heads, which two parts share each; of GPT-2 four.
plan::JobSpec RecipeJob(const StrategyCase& tested, const std::string& model, plan::Recipe recipe) {
  const std::string base = model == "gpt2" ? "recipes_gpt2" : "recipes";
  plan::JobSpec spec = JobOf(tested, base, OwnFolder("ravel_tensor_recipes"));
  spec.tensor_parts = kRecipeParts;
  UseRecipe(recipe, spec);
  if (model == "qwen3") {
    spec.model->architecture = plan::ArchitectureKind::kQwen3;
  }
  if (recipe == plan::Recipe::kFloat8Block) {  // parts are whole blocks of 128
    spec.model->hidden_size = model == "gpt2" ? 512 : spec.model->hidden_size;
    spec.model->head_dim = 128;
    spec.model->intermediate_size = 512;
  }
  return spec;
}

Recording RecordRecipe(const StrategyCase& tested, const std::string& model, plan::Recipe recipe) {
  RecordArgs args = ArgsOf(tested, RecipeJob(tested, model, recipe));
  args.last_step = kRecipeSteps;
  args.evaluate_every_step = true;
  return Record(args);
}

class TensorRecipes : public ::testing::TestWithParam<RecipeForm> {
 protected:
  void ExpectTheBitsOfOneRank(const std::string& model) {
    using plan::RecomputePolicy;
    const plan::Recipe recipe = GetParam().recipe;
    const Recording one = RecordRecipe({.strategy = "ZeRO0"}, model, recipe);
    const StrategyCase shared[] = {
        {.strategy = "ZeRO3",
         .width = 2,
         .micro_batches = 2,
         .recompute = RecomputePolicy::kBlock,
         .tensor = 2},
        {.strategy = "ZeRO1", .width = 1, .tensor = 4, .sequence = true},
        {.strategy = "ZeRO2", .width = 3, .tensor = 2, .sequence = true}};
    const Recording two = RecordRecipe({.strategy = "ZeRO0", .micro_batches = 2}, model, recipe);
    for (const StrategyCase& tested : shared) {
      EXPECT_EQ(FirstDifference(tested.micro_batches == 2 ? two : one,
                                RecordRecipe(tested, model, recipe)),
                "")
          << model << " " << tested.name();
    }
  }
};

// Chunks of tokens are quantized apart, with the scales of the whole; other recipes refuse them.
TEST_P(TensorRecipes, ChunksOfTokensHaveTheBitsOfOneRank) {
  const plan::Recipe recipe = GetParam().recipe;
  const StrategyCase own_tokens = {
      .strategy = "ZeRO1", .width = 1, .tensor = 4, .sequence = true, .chunks = 4};
  if (!plan::ScalesTokensApart(recipe)) {
    const plan::JobSpec job = RecipeJob(own_tokens, "llama", recipe);
    EXPECT_THAT(TryRecord(ArgsOf(own_tokens, job)).status().message(),
                ::testing::HasSubstr("parallelism.tensorChunks: expected 1 with "));
    return;
  }
  const Recording one = RecordRecipe({.strategy = "ZeRO0"}, "llama", recipe);
  const StrategyCase all_tokens = {.strategy = "ZeRO3", .width = 2, .tensor = 2, .chunks = 2};
  for (const StrategyCase& tested : {own_tokens, all_tokens}) {
    EXPECT_EQ(FirstDifference(one, RecordRecipe(tested, "llama", recipe)), "") << tested.name();
  }
}

TEST_P(TensorRecipes, ChunksOfTokensHaveTheBitsOfOneRankWithFusedMaps) {
  const plan::Recipe recipe = GetParam().recipe;
  if (plan::ScalesTokensApart(recipe)) {
    EXPECT_EQ(FirstDifference(
                  RecordRecipe({.strategy = "ZeRO0"}, "gpt2", recipe),
                  RecordRecipe({.strategy = "ZeRO2", .tensor = 2, .chunks = 2}, "gpt2", recipe)),
              "");
  }
}

TEST_P(TensorRecipes, RanksHaveTheBitsOfOne) {
  ExpectTheBitsOfOneRank("llama");
}

TEST_P(TensorRecipes, RanksHaveTheBitsOfOneWithNormsOfHeads) {
  ExpectTheBitsOfOneRank("qwen3");
}

TEST_P(TensorRecipes, RanksHaveTheBitsOfOneWithFusedMaps) {
  ExpectTheBitsOfOneRank("gpt2");
}

// Scales of parts are finer than those of the whole, and nothing else is new.
TEST_P(TensorRecipes, AreCloseToOnePart) {
  const auto record = [&](int64_t parts) {
    RecordArgs args =
        ArgsOf({.strategy = "ZeRO0"}, RecipeJob({.strategy = "ZeRO0"}, "llama", GetParam().recipe));
    args.spec.tensor_parts = parts;
    args.last_step = kRecipeSteps;
    return Record(args);
  };
  const Recording one = record(1);
  const Recording four = record(kRecipeParts);
  EXPECT_NE(FirstDifference(one, four), "");
  ASSERT_EQ(one.steps.size(), four.steps.size());
  for (size_t step = 0; step < one.steps.size(); ++step) {
    EXPECT_NEAR(four.steps[step].loss / one.steps[step].loss, 1.0, 0.01) << step;
  }
}

INSTANTIATE_TEST_SUITE_P(Five,
                         TensorRecipes,
                         ::testing::ValuesIn(kRecipeForms),
                         [](const auto& tested) { return std::string(tested.param.name); });

plan::ModelInventory InventoryOf(const std::string& model, plan::Recipe recipe) {
  const StrategyCase tested = {.strategy = "ZeRO3", .tensor = 2};
  RecordArgs args = ArgsOf(tested, RecipeJob(tested, model, recipe));
  return plan::BuildShardingPlan({.spec = args.spec, .ranks = args.ranks}).value().inventory;
}

int64_t QuantizedIn(const plan::ModelInventory& inventory) {
  return std::count_if(inventory.tensors.begin(), inventory.tensors.end(), [](const auto& tensor) {
    return tensor.recipe != plan::Recipe::kNone;
  });
}

// Seven matrices of each of two layers; of GPT-2 three: its q, k and v lie in one matrix, of which
// a rank has three ranges of columns.
TEST(TensorRecipesPlan, KeepsFusedMapsInBf16) {
  EXPECT_EQ(QuantizedIn(InventoryOf("llama", plan::Recipe::kMxFp8)), 14);
  const plan::ModelInventory gpt2 = InventoryOf("gpt2", plan::Recipe::kMxFp8);
  EXPECT_EQ(QuantizedIn(gpt2), 6);
  for (const plan::TensorSpec& tensor : gpt2.tensors) {
    if (tensor.name.ends_with("c_attn.weight")) {
      EXPECT_EQ(tensor.recipe, plan::Recipe::kNone) << tensor.name;
    }
  }
}

std::string RefusalOf(const plan::JobSpec& spec) {
  return std::string(plan::BuildShardingPlan({.spec = spec, .ranks = 2}).status().message());
}

TEST(TensorRecipesPlan, RefusesPartsThatAreNotWholeBlocks) {
  const StrategyCase tested = {.strategy = "ZeRO3", .tensor = 2};
  plan::JobSpec spec = ArgsOf(tested, RecipeJob(tested, "llama", plan::Recipe::kFloat8Block)).spec;
  EXPECT_EQ(RefusalOf(spec), "");
  spec.model->intermediate_size = 256;  // four parts of 64
  EXPECT_THAT(RefusalOf(spec),
              ::testing::AllOf(::testing::HasSubstr("precision.recipe"),
                               ::testing::HasSubstr("mlp.gate_proj.weight"),
                               ::testing::HasSubstr("multiples of 128")));
}

// Steps of chunks run beside others, and name the scales of the matrices that they multiply by.
TEST(TensorRecipesPlan, ChunksNameTheScalesThatTheyRead) {
  const StrategyCase tested = {.strategy = "ZeRO3", .tensor = 2, .chunks = 2};
  const plan::JobSpec spec = ArgsOf(tested, RecipeJob(tested, "llama", plan::Recipe::kMxFp8)).spec;
  const absl::StatusOr<plan::ShardingPlan> made =
      plan::BuildShardingPlan({.spec = spec, .ranks = 2});
  ASSERT_TRUE(made.ok()) << made.status();
  int later_chunks = 0;
  for (const plan::StepProgram& program : made->programs) {
    for (const plan::Instruction& at : program.instructions) {
      if (!plan::IsCompute(at.op)) {
        continue;
      }
      for (const plan::SegmentSpec& segment : plan::SegmentsOfStep(made->inventory, at)) {
        const bool quantized =
            std::any_of(segment.weights.begin(), segment.weights.end(), [&](plan::TensorId tensor) {
              return made->inventory.tensors[tensor].recipe != plan::Recipe::kNone;
            });
        const bool named = std::any_of(at.operands.begin(), at.operands.end(), [](const auto& one) {
          return one.role == plan::Role::kAmax;
        });
        EXPECT_TRUE(named || !quantized) << plan::SegmentName(segment.kind) << " " << segment.chunk;
        later_chunks += quantized && segment.chunk > 0 ? 1 : 0;
      }
    }
  }
  EXPECT_GE(later_chunks, 4);
}

// Devices whose gemms read codes take 16 tokens at a time; a plan with chunks is read as written.
TEST(TensorRecipesPlan, ChunksAreWholeStepsOfAGemm) {
  const StrategyCase tested = {.strategy = "ZeRO3", .tensor = 2, .chunks = 2};
  plan::JobSpec spec = ArgsOf(tested, RecipeJob(tested, "llama", plan::Recipe::kMxFp8)).spec;
  const absl::StatusOr<plan::ShardingPlan> made =
      plan::BuildShardingPlan({.spec = spec, .ranks = 2});
  ASSERT_TRUE(made.ok()) << made.status();
  EXPECT_EQ(plan::CheckPlan(*made), absl::OkStatus());
  const std::string bytes = plan::SerializePlan(*made);
  const absl::StatusOr<plan::ShardingPlan> read = plan::ParsePlan(bytes);
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(plan::SerializePlan(*read), bytes);

  spec.cpu_devices = false;
  EXPECT_EQ(RefusalOf(spec), "");
  spec.sequence_parallel = true;  // 32 tokens, of which a rank has 8 of each chunk
  EXPECT_THAT(RefusalOf(spec),
              ::testing::HasSubstr("training.microBatch: expected times data.sequenceLength a "
                                   "multiple of 64, since a gemm of mxfp8 takes 16 tokens"));
}

}  // namespace
}  // namespace ravel::trainer
