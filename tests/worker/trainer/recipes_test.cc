// Quantized training on ranks of a host: every recipe gives the same bits on any number of ranks
// and under every strategy, reshards exactly, skips without a trace, and learns.

#include "common/model/recipes.h"

#include <bit>
#include <filesystem>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include <absl/strings/str_cat.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/store/committed_step.h"
#include "common/store/file_store.h"
#include "common/store/step_verifier.h"
#include "tests/testing/fake_supervisor.h"
#include "tests/testing/strategy_cases.h"

namespace ravel::trainer {
namespace {

using plan::Recipe;

struct RecipeForm {
  const char* name;
  Recipe recipe;
};
constexpr RecipeForm kRecipes[] = {{"delayed", Recipe::kDelayed},
                                   {"current", Recipe::kCurrent},
                                   {"fp8_block", Recipe::kFloat8Block},
                                   {"mxfp8", Recipe::kMxFp8},
                                   {"nvfp4", Recipe::kNvFp4}};

constexpr int64_t kHistory = 3;  // shorter than the runs

void UseRecipe(Recipe recipe, plan::JobSpec& spec) {
  spec.compute = plan::ComputeType::kBF16;
  spec.recipe = {.recipe = recipe, .keep_bf16 = {}, .history = kHistory};
}

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
  EpochArgs Epoch(int ranks) {
    EpochArgs args;
    args.spec = Job();
    args.spec.steps = 6;
    args.spec.evaluation_every = 0;
    args.spec.checkpoint.every_steps = 3;
    args.ranks = ranks;
    args.epoch = ++epoch_;
    args.checkpoint_root = absl::StrCat(folder_, "/store-", epoch_);
    return args;
  }
  static EpochArgs From(const EpochOutcome& whole, EpochArgs args) {
    args.restore_path = whole.committed.at(3);
    args.first_step = 3;
    return args;
  }
  static EpochOutcome RunWell(const EpochArgs& args) {
    EpochOutcome outcome = RunEpoch(args);
    for (const absl::Status& result : outcome.results) {
      EXPECT_TRUE(result.ok()) << result;
    }
    EXPECT_TRUE(outcome.commit_errors.empty());
    return outcome;
  }
  static ckpt::Manifest ManifestOf(const std::string& directory) {
    const std::filesystem::path path(directory);
    const store::FileStore store(path.parent_path().string());
    return store::CommittedStep::Open(&store, path.filename().string()).value().manifest();
  }
  static void ExpectSameLosses(const EpochOutcome& resumed, const EpochOutcome& whole) {
    ASSERT_EQ(resumed.steps.size(), 3u);
    for (size_t i = 0; i < 3; ++i) {
      EXPECT_EQ(std::bit_cast<uint32_t>(resumed.steps[i].loss),
                std::bit_cast<uint32_t>(whole.steps[i + 3].loss));
    }
  }

  const std::string folder_ =
      absl::StrCat(::testing::TempDir(), "/ravel_recipes_", GetParam().name);
  int64_t epoch_ = 0;
};
INSTANTIATE_TEST_SUITE_P(Five, Recipes, ::testing::ValuesIn(kRecipes), [](const auto& tested) {
  return std::string(tested.param.name);
});

// Widths that cut blocks between ranks, and such that leave ranks without a row.
TEST_P(Recipes, OneToFourRanksGiveTheSameBits) {
  const Recording one = Steps({}, 5);
  for (const int64_t width : {2, 3, 4}) {
    EXPECT_EQ(FirstDifference(one, Steps({.width = width}, 5)), "") << width << " ranks";
  }
}

TEST_P(Recipes, EveryStrategyGivesTheSameBits) {
  const Recording one = Steps({}, 3);
  for (const NamedStrategy& strategy : MatrixStrategies()) {
    for (const bool in_place : {false, true}) {
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

// State digests cover main weights, moments, delayed scales and histories. Fails where a load
// leaves a parameter out, or makes a scale of its own.
TEST_P(Recipes, ReshardFourToTwo) {
  const EpochOutcome whole = RunWell(Epoch(4));
  ASSERT_EQ(whole.steps.size(), 6u);
  const ckpt::Manifest end = ManifestOf(whole.committed.at(6));
  for (const int ranks : {2, 1, 3}) {
    EpochArgs read = From(whole, Epoch(ranks));
    read.first_step = 0;
    read.save_at_start = true;
    EXPECT_EQ(ManifestOf(RunWell(read).committed.at(0)).state_digest,
              ManifestOf(whole.committed.at(3)).state_digest)
        << "read on " << ranks;
    const EpochOutcome resumed = RunWell(From(whole, Epoch(ranks)));
    EXPECT_EQ(ManifestOf(resumed.committed.at(6)).state_digest, end.state_digest)
        << "trained on " << ranks;
    ExpectSameLosses(resumed, whole);
  }
}

TEST_P(Recipes, ReshardFourToTwoInEveryStateTypeAndFormOfMainWeights) {
  for (const plan::StateTypes& states : {plan::kBf16States, plan::kFp8States}) {
    for (const plan::MainWeightForm form :
         {plan::MainWeightForm::kF32, plan::MainWeightForm::kBF16Remainder}) {
      const auto with = [&](EpochArgs args) {
        args.spec.optimizer.state_types = states;
        args.spec.optimizer.main_weights = form;
        return args;
      };
      const EpochOutcome whole = RunWell(with(Epoch(4)));
      ASSERT_EQ(whole.steps.size(), 6u);
      const EpochOutcome resumed = RunWell(From(whole, with(Epoch(2))));
      EXPECT_EQ(ManifestOf(resumed.committed.at(6)).state_digest,
                ManifestOf(whole.committed.at(6)).state_digest);
      ExpectSameLosses(resumed, whole);
    }
  }
}

TEST_P(Recipes, ASaveVerifiesAndHasDelayedScalesAsTensors) {
  const EpochOutcome whole = RunWell(Epoch(2));
  const std::string directory = whole.committed.at(6);
  int64_t histories = 0;
  for (const ckpt::TensorRecord& tensor : ManifestOf(directory).tensors) {
    if (tensor.role == ckpt::TensorRole::kAmax) {
      ++histories;
      EXPECT_EQ(tensor.shape, (Shape{plan::kSlotsPerDomain, kHistory})) << tensor.name;
      EXPECT_TRUE(tensor.name.ends_with(".amax_history")) << tensor.name;
    }
  }
  EXPECT_EQ(histories, GetParam().recipe == Recipe::kDelayed ? 14 : 0);
  const std::filesystem::path path(directory);
  const store::FileStore store(path.parent_path().string());
  EXPECT_TRUE(store::VerifyStep(store, path.filename().string(), store::VerifyDepth::kDeep).ok());
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
    const auto state = [&](std::vector<float>& to) {
      const int64_t slots = engine.quant()->layout().slots;
      to.resize(static_cast<size_t>(slots * (1 + kHistory)));
      if (slots > 0) {
        engine.quant()->ReadState(
            plan::StateRole::kCastScale, 0, std::span(to).first(static_cast<size_t>(slots)));
        engine.quant()->ReadState(
            plan::StateRole::kAmaxHistory, 0, std::span(to).subspan(static_cast<size_t>(slots)));
      }
    };
    state(before);
    ASSIGN_OR_RETURN(const StepResult result, engine.TrainStep(1));
    EXPECT_TRUE(result.skipped);
    EXPECT_EQ(engine.updates(), 1);
    state(after);
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
  const std::string folder = absl::StrCat(::testing::TempDir(), "/ravel_recipe_change");
  std::filesystem::remove_all(folder);
  plan::JobSpec first = CaseJob("recipes", folder);
  UseRecipe(Recipe::kCurrent, first);
  plan::JobSpec second = first;
  UseRecipe(Recipe::kDelayed, second);
  EpochArgs args;
  args.spec = first;
  args.spec.steps = 3;
  args.spec.evaluation_every = 0;
  args.spec.checkpoint.every_steps = 3;
  args.ranks = 2;
  args.epoch = 1;
  args.checkpoint_root = absl::StrCat(folder, "/a");
  const EpochOutcome saved = RunEpoch(args);
  ASSERT_EQ(saved.committed.count(3), 1u);
  args.spec = second;
  args.spec.steps = 6;
  args.spec.evaluation_every = 0;
  args.spec.checkpoint.every_steps = 3;
  args.epoch = 2;
  args.checkpoint_root = absl::StrCat(folder, "/b");
  args.restore_path = saved.committed.at(3);
  args.first_step = 3;
  const EpochOutcome other = RunEpoch(args);
  for (const absl::Status& result : other.results) {
    EXPECT_TRUE(result.ok()) << result;
  }
  ASSERT_EQ(other.steps.size(), 3u);
  EXPECT_LT(other.steps.back().loss, saved.steps.front().loss);
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace ravel::trainer
