// Quantized training on ranks of a host: every recipe gives the same bits on any number of ranks
// and under every strategy, reshards exactly, skips without a trace, and learns.

#include "common/model/recipes.h"

#include <cstdlib>
#include <filesystem>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include <absl/strings/str_cat.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/testing/recipe_cases.h"
#include "tests/testing/resume_runs.h"
#include "tests/testing/strategy_cases.h"
#include "worker/optim/stored_state.h"

namespace ravel::trainer {
namespace {

using plan::Recipe;

class Recipes : public ::testing::TestWithParam<RecipeForm> {
 protected:
  Recipes() { std::filesystem::remove_all(folder_); }
  ~Recipes() override { std::filesystem::remove_all(folder_); }

  plan::JobSpec Job(const std::string& model = "recipes") const {
    plan::JobSpec spec = CaseJob(model, folder_);
    UseRecipe(GetParam().recipe, spec);
    return spec;
  }
  Recording Steps(const StrategyCase& tested, int64_t steps, const std::string& model = "recipes") {
    plan::JobSpec spec = JobOf(tested, model, folder_);
    UseRecipe(GetParam().recipe, spec);
    RecordArgs args = ArgsOf(tested, spec);
    args.last_step = steps;
    args.evaluate_every_step = true;
    args.options.poison = true;
    return Record(args);
  }
  EpochArgs Epoch(int ranks) { return runs_.Whole(Job(), ranks); }

  const std::string folder_ = OwnFolder(absl::StrCat("ravel_recipes_", GetParam().name));
  ResumeRuns runs_{folder_};
};
INSTANTIATE_TEST_SUITE_P(Five, Recipes, ::testing::ValuesIn(kRecipeForms), [](const auto& tested) {
  return std::string(tested.param.name);
});

// Widths that cut blocks between ranks, and such that leave ranks without a row.
TEST_P(Recipes, OneToFourRanksGiveTheSameBits) {
  const Recording one = Steps({}, 5);
  for (const int64_t width : {2, 3, 4}) {
    EXPECT_EQ(FirstDifference(one, Steps({.width = width}, 5)), "") << width << " ranks";
  }
}

// Gathers in place and apart take turns, other ones for the next recipe; both with RAVEL_EVERY_CASE
// (label slow).
TEST_P(Recipes, EveryStrategyGivesTheSameBits) {
  const Recording one = Steps({}, 3);
  int turn = static_cast<int>(GetParam().recipe);
  for (const NamedStrategy& strategy : MatrixStrategies()) {
    ++turn;
    for (const bool in_place : {false, true}) {
      if (in_place != (turn % 2 == 0) && std::getenv("RAVEL_EVERY_CASE") == nullptr) {
        continue;
      }
      const StrategyCase tested = {.strategy = strategy.name, .width = 2, .in_place = in_place};
      EXPECT_EQ(FirstDifference(one, Steps(tested, 3)), "") << tested.name();
    }
  }
}

TEST_P(Recipes, RecomputeAndWindowsChangeNoBit) {
  const Recording one = Steps({}, 3);
  for (const StrategyCase& tested :
       {StrategyCase{.width = 2, .recompute = plan::RecomputePolicy::kBlock},
        StrategyCase{.strategy = "HFSDP", .width = 2, .small_windows = true}}) {
    EXPECT_EQ(FirstDifference(one, Steps(tested, 3)), "") << tested.name();
  }
}

// A delayed scale is constant within a step, and a gradient's random bits are those of its sample.
TEST_P(Recipes, MicroBatchesOfALaneAreTheSameOnAnyNumberOfRanks) {
  const Recording one = Steps({.micro_batches = 3}, 3);
  const StrategyCase tested = {.strategy = "ZeRO3", .width = 3, .micro_batches = 3};
  EXPECT_EQ(FirstDifference(one, Steps(tested, 3)), "");
}

TEST_P(Recipes, RanksThatShareNoMemoryGiveTheSameBits) {
  const Recording one = Record({.spec = Job(), .ranks = 1, .last_step = 3});
  EXPECT_EQ(FirstDifference(
                one, Record({.spec = Job(), .ranks = 3, .shared_memory = false, .last_step = 3})),
            "");
}

TEST_P(Recipes, MatricesOfInputsByOutputsTrain) {
  const Recording one = Steps({}, 3, "recipes_gpt2");
  EXPECT_EQ(FirstDifference(one, Steps({.width = 3}, 3, "recipes_gpt2")), "");
}

// Close to bf16, and not bf16, while the two have seen much the same weights.
TEST_P(Recipes, LossesFollowThoseOfBf16) {
  constexpr int64_t kRunSteps = 6;
  plan::JobSpec wide = Job();
  wide.recipe = {};
  const Recording bf16 = Record({.spec = wide, .ranks = 1, .last_step = kRunSteps});
  const Recording quantized = Record({.spec = Job(), .ranks = 1, .last_step = kRunSteps});
  EXPECT_NE(FirstDifference(bf16, quantized), "");
  const double bound = GetParam().recipe == Recipe::kNvFp4 ? 0.03 : 0.01;
  for (size_t step = 0; step < bf16.steps.size(); ++step) {
    EXPECT_NEAR(quantized.steps[step].loss, bf16.steps[step].loss, bound * bf16.steps[step].loss)
        << "step " << step;
  }
  EXPECT_LT(quantized.steps.back().loss, quantized.steps.front().loss);
}

TEST_P(Recipes, QuantStateIsTypedTensors) {
  const EpochOutcome whole = RunWell(Epoch(2));
  const std::string directory = whole.committed.at(6);
  int64_t histories = 0;
  for (const ckpt::TensorRecord& tensor : ManifestOf(directory).tensors) {
    if (tensor.role == ckpt::TensorRole::kAmax) {
      ++histories;
      EXPECT_EQ(tensor.shape, (Shape{plan::kSlotsPerDomain, kCaseHistory})) << tensor.name;
      EXPECT_TRUE(tensor.name.ends_with(".amax_history")) << tensor.name;
    }
  }
  EXPECT_EQ(histories, GetParam().recipe == Recipe::kDelayed ? 14 : 0);
  ExpectVerifies(directory);
}

// A NaN in an embedding reaches every gemm: codes would saturate it, the step must not be applied.
TEST_P(Recipes, ASkippedStepChangesNothing) {
  const auto body = [](RankEngine& engine, int rank) -> absl::Status {
    RETURN_IF_ERROR(engine.InitializeWeights());
    RETURN_IF_ERROR(engine.TrainStep(0).status());
    const shard::ParameterGroup& group = engine.groups().front();
    float kept = 0;
    if (rank == 0) {
      float& weight = group.main_weight()[group.pieces()[0].shard_offset];
      kept = std::exchange(weight, std::numeric_limits<float>::infinity());
    }
    RETURN_IF_ERROR(engine.RefreshWeights(shard::UnitExecutor::Refresh::kLoaded));
    std::vector<float> before;
    std::vector<float> after;
    const auto state = [&](std::vector<float>& to) -> absl::Status {
      const int64_t slots = engine.quant()->layout().slots;
      to.resize(static_cast<size_t>(slots * (1 + kCaseHistory)));
      if (slots > 0) {
        RETURN_IF_ERROR(optim::ReadScales(engine.memory(),
                                          *engine.quant(),
                                          plan::StateRole::kCastScale,
                                          0,
                                          std::span(to).first(static_cast<size_t>(slots))));
        RETURN_IF_ERROR(optim::ReadScales(engine.memory(),
                                          *engine.quant(),
                                          plan::StateRole::kAmaxHistory,
                                          0,
                                          std::span(to).subspan(static_cast<size_t>(slots))));
      }
      return absl::OkStatus();
    };
    RETURN_IF_ERROR(state(before));
    ASSIGN_OR_RETURN(const StepResult result, engine.TrainStep(1));
    EXPECT_TRUE(result.skipped);
    EXPECT_EQ(engine.updates(), 1);
    RETURN_IF_ERROR(state(after));
    EXPECT_EQ(before, after);
    if (rank == 0) {
      group.main_weight()[group.pieces()[0].shard_offset] = kept;
    }
    RETURN_IF_ERROR(engine.RefreshWeights(shard::UnitExecutor::Refresh::kLoaded));
    ASSIGN_OR_RETURN(const StepResult next, engine.TrainStep(2));
    EXPECT_FALSE(next.skipped);
    return absl::OkStatus();
  };
  const absl::Status ran = RunLocalRanks({.spec = Job(), .ranks = 2, .body = body});
  EXPECT_TRUE(ran.ok()) << ran;
}

TEST(RecipeChanges, AreRefusedUnlessAllowed) {
  // The text of numerics is compared by the trainer's start (tests/e2e/numerics_test.cc); what is
  // loaded then is main weights, so another recipe goes on from them.
  const std::string folder = OwnFolder("ravel_recipe_change");
  std::filesystem::remove_all(folder);
  plan::JobSpec first = CaseJob("recipes", folder);
  UseRecipe(Recipe::kCurrent, first);
  plan::JobSpec second = first;
  UseRecipe(Recipe::kDelayed, second);
  ResumeRuns runs(folder);
  const EpochOutcome saved = RunWell(runs.Whole(first, 2));
  const EpochOutcome other = RunWell(ResumeRuns::From(saved, runs.Whole(second, 2)));
  ASSERT_EQ(other.steps.size(), 3u);
  EXPECT_LT(other.steps.back().loss, saved.steps.front().loss);
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace ravel::trainer
