// Checkpoints of quantized training on other meshes, at the size of a small real layer: whatever is
// read and trained on another number of ranks has the bits of the uninterrupted run, in every
// recipe. State digests cover main weights, moments and their scales, the count of updates, delayed
// scales and histories; the manifest's digests cover codes and scales of weights.

#include <filesystem>
#include <string>

#include <absl/strings/str_cat.h>
#include <gtest/gtest.h>

#include "common/model/recipes.h"
#include "tests/testing/recipe_cases.h"
#include "tests/testing/resume_runs.h"
#include "tests/testing/strategy_cases.h"

namespace ravel::trainer {
namespace {

class RecipeReshard : public ::testing::TestWithParam<RecipeForm> {
 protected:
  RecipeReshard() {
    std::filesystem::remove_all(folder_);
    std::filesystem::create_directories(disk());
  }
  ~RecipeReshard() override { std::filesystem::remove_all(folder_); }

  std::string disk() const { return folder_ + "/disk"; }
  // Hidden 256, 1024 in the MLP, 8 heads, 2 layers; 8 lanes.
  plan::JobSpec Job() const {
    plan::JobSpec spec = CaseJob("recipes_wide", folder_);
    UseRecipe(GetParam().recipe, spec);
    return spec;
  }
  EpochArgs Epoch(int ranks) { return runs_.Whole(Job(), ranks); }
  EpochArgs Replicated() {
    plan::JobSpec spec = Job();
    const NamedStrategy hsdp = StrategyNamed("HSDP");
    spec.strategy = hsdp.shard;
    spec.replicate_strategy = hsdp.replicate;
    spec.replicas = hsdp.replicas;
    return runs_.Whole(spec, 4);
  }
  // A run of half the steps, which ends with the save.
  static EpochArgs Half(EpochArgs args) {
    args.spec.steps = kResumeStep;
    return args;
  }

  const std::string folder_ =
      absl::StrCat(::testing::TempDir(), "/ravel_reshard_", GetParam().name);
  ResumeRuns runs_{folder_};
};
INSTANTIATE_TEST_SUITE_P(Five,
                         RecipeReshard,
                         ::testing::ValuesIn(kRecipeForms),
                         [](const auto& tested) { return std::string(tested.param.name); });

// On 1 to 4 ranks after 4, on 4 after 2, on 8 after 1 (ranks without a row of some tensors), on 4
// after two replicas of 2. Fails where a load leaves a parameter out, or makes a scale of its own.
TEST_P(RecipeReshard, ReshardFourToTwo) {
  const EpochOutcome whole = RunWell(Epoch(4));
  ASSERT_EQ(ManifestOf(whole.committed.at(kResumeStep)).quant.tensors.size(), 14u);
  for (const int ranks : {2, 3}) {
    SCOPED_TRACE(absl::StrCat("4 -> ", ranks));
    ExpectSameStart(RunWell(Half(ResumeRuns::ReadBack(whole, Epoch(ranks)))), whole);
    ExpectSameEnd(RunWell(ResumeRuns::From(whole, Epoch(ranks))), whole);
  }
  const auto expect = [&](const char* meshes, EpochArgs from, int ranks) {
    SCOPED_TRACE(meshes);
    ExpectSameEnd(RunWell(ResumeRuns::From(RunWell(Half(std::move(from))), Epoch(ranks))), whole);
  };
  expect("2 -> 4", Epoch(2), 4);
  expect("1 -> 8", Epoch(1), 8);
  expect("HSDP {2, 2} -> 4", Replicated(), 4);
}

// Each type of state, both forms of main weights, state in memory and on disks.
TEST_P(RecipeReshard, ReshardFourToTwoInEveryForm) {
  struct Form {
    plan::StateTypes states;
    plan::MainWeightForm main_weights;
    double offload;
  };
  constexpr plan::MainWeightForm kRemainder = plan::MainWeightForm::kBF16Remainder;
  constexpr plan::MainWeightForm kF32 = plan::MainWeightForm::kF32;
  for (const Form& form : {Form{plan::kF32States, kRemainder, 1},
                           Form{plan::kBf16States, kF32, 0.5},
                           Form{plan::kBf16States, kRemainder, 0},
                           Form{plan::kFp8States, kF32, 0},
                           Form{plan::kFp8States, kRemainder, 1}}) {
    SCOPED_TRACE(absl::StrCat(plan::StateTypesText(form.states),
                              form.main_weights == kRemainder ? ", remainder" : "",
                              ", offload ",
                              form.offload));
    const auto with = [&](EpochArgs args, double offload) {
      args.spec.optimizer.state_types = form.states;
      args.spec.optimizer.main_weights = form.main_weights;
      args.spec.optimizer.offload = {.fraction = offload, .path = disk()};
      return args;
    };
    const EpochOutcome whole = RunWell(with(Epoch(4), form.offload));
    const EpochArgs other = with(Epoch(2), form.offload > 0 ? 0 : 1);
    ExpectSameEnd(RunWell(ResumeRuns::From(whole, other)), whole);
  }
}

}  // namespace
}  // namespace ravel::trainer
