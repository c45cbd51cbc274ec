// Lion: against the same rule in PyTorch, on any number of ranks and in every type of its state,
// and through checkpoints. Its kernels for devices are those of tests/gpu/mixed_ops_gpu_test.cc.

#include <filesystem>
#include <string>

#include <absl/strings/str_cat.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/testing/golden_curves.h"
#include "tests/testing/resume_runs.h"
#include "tests/testing/strategy_cases.h"

namespace ravel::trainer {
namespace {

// Its tensors are cut between ranks, and have rows that are no multiple of a group.
constexpr char kLionModel[] = "bundled_rope_scaling";

class Lion : public ::testing::TestWithParam<const char*> {
 protected:
  Lion() { std::filesystem::remove_all(folder_); }
  ~Lion() override { std::filesystem::remove_all(folder_); }

  static void UseLion(plan::OptimizerSpec& optimizer) {
    optimizer.kind = plan::OptimizerKind::kLion;
    optimizer.beta1 = 0.9;
    optimizer.beta2 = 0.99;
    optimizer.lr *= 0.2;
    optimizer.state_types = plan::ParseStateTypes(GetParam()).value();
  }
  plan::JobSpec Job() const {
    plan::JobSpec spec = CaseJob(kLionModel, folder_);
    UseLion(spec.optimizer);
    return spec;
  }
  EpochArgs Epoch(int ranks) { return runs_.Whole(Job(), ranks); }

  const std::string folder_ = OwnFolder(absl::StrCat("ravel_lion_", GetParam()));
  ResumeRuns runs_{folder_};
};
INSTANTIATE_TEST_SUITE_P(States,
                         Lion,
                         ::testing::Values("fp32", "bf16", "fp8"),
                         [](const auto& tested) { return std::string(tested.param); });

// Narrow states move other elements by other signs, and so reach another loss, as near as that.
TEST_P(Lion, EveryStepIsThatOfPyTorch) {
  const std::vector<GoldenStep> golden = GoldenCurve(absl::StrCat(kLionModel, "_lion"));
  const Recording run = Record({.spec = Job(), .ranks = 2, .last_step = kGoldenSteps});
  const CurveDistance worst = DistanceToGolden(golden, run);
  const bool fp32 = std::string(GetParam()) == "fp32";
  EXPECT_LE(worst.loss, fp32 ? 1e-4 : 2e-2);
  EXPECT_LE(worst.grad_norm, fp32 ? 1e-3 : 2e-1);
  EXPECT_LT(run.steps.back().loss, 0.8f * run.steps.front().loss);
}

TEST_P(Lion, OneToFourRanksGiveTheSameBits) {
  const Recording one = Record({.spec = Job(), .ranks = 1, .last_step = 8});
  EXPECT_FALSE(one.exp_avg.empty());
  EXPECT_TRUE(one.exp_avg_sq.empty());
  for (const int ranks : {2, 3, 4}) {
    EXPECT_EQ(FirstDifference(one, Record({.spec = Job(), .ranks = ranks, .last_step = 8})), "")
        << ranks << " ranks";
  }
}

TEST_P(Lion, EveryStrategyGivesTheSameBits) {
  const auto run = [&](const StrategyCase& tested) {
    plan::JobSpec spec = JobOf(tested, kLionModel, folder_);
    spec.optimizer = Job().optimizer;
    RecordArgs args = ArgsOf(tested, spec);
    args.last_step = 3;
    return Record(args);
  };
  const Recording one = run({.width = 1});
  for (const NamedStrategy& strategy : MatrixStrategies()) {
    const StrategyCase tested = {.strategy = strategy.name, .width = 2};
    EXPECT_EQ(FirstDifference(one, run(tested)), "") << tested.name();
  }
}

// Fails when the average or its scales are not saved, or not read: the losses after it differ.
TEST_P(Lion, AResumedRunOnAnotherNumberOfRanksHasTheSameLosses) {
  const EpochOutcome whole = RunWell(Epoch(2));
  ExpectSameEnd(RunWell(ResumeRuns::From(whole, Epoch(3))), whole);
}

// AdamW has an average of the same name: it is the other one that is missing, or too much.
TEST_P(Lion, StatesOfAnotherOptimizerAreRefused) {
  const auto first_error = [&](const EpochOutcome& whole, EpochArgs args) {
    const EpochOutcome resumed = RunEpoch(ResumeRuns::From(whole, std::move(args)));
    EXPECT_FALSE(resumed.results.empty());
    return std::string(resumed.results.front().message());
  };
  EpochArgs adamw = Epoch(1);
  adamw.spec.optimizer.kind = plan::OptimizerKind::kAdamW;
  EXPECT_THAT(first_error(RunEpoch(adamw), Epoch(1)),
              ::testing::HasSubstr("is of another optimizer; training.optimizer.name: expected the "
                                   "one that saved it, got lion"));
  EpochArgs after = Epoch(1);
  after.spec.optimizer.kind = plan::OptimizerKind::kAdamW;
  EXPECT_THAT(first_error(RunEpoch(Epoch(1)), after), ::testing::HasSubstr("exp_avg_sq"));
}

}  // namespace
}  // namespace ravel::trainer
