// Lion: against the same rule in PyTorch, on any number of ranks and in every type of its state,
// and through checkpoints. Its kernels for devices are those of tests/gpu/mixed_ops_gpu_test.cc.

#include <bit>
#include <filesystem>
#include <string>

#include <absl/strings/str_cat.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/testing/fake_supervisor.h"
#include "tests/testing/golden_curves.h"
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
  EpochArgs Epoch(int ranks, int64_t epoch) const {
    EpochArgs args;
    args.spec = Job();
    args.spec.steps = 6;
    args.spec.evaluation_every = 0;
    args.spec.checkpoint.every_steps = 3;
    args.ranks = ranks;
    args.epoch = epoch;
    args.checkpoint_root = absl::StrCat(folder_, "/store-", epoch);
    return args;
  }
  static EpochArgs From(const EpochOutcome& whole, EpochArgs args) {
    args.restore_path = whole.committed.at(3);
    args.first_step = 3;
    return args;
  }

  const std::string folder_ = absl::StrCat(::testing::TempDir(), "/ravel_lion_", GetParam());
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
  const EpochOutcome whole = RunEpoch(Epoch(2, 1));
  ASSERT_EQ(whole.steps.size(), 6u);
  const EpochOutcome resumed = RunEpoch(From(whole, Epoch(3, 2)));
  for (const absl::Status& result : resumed.results) {
    ASSERT_TRUE(result.ok()) << result;
  }
  ASSERT_EQ(resumed.steps.size(), 3u);
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(std::bit_cast<uint32_t>(resumed.steps[i].loss),
              std::bit_cast<uint32_t>(whole.steps[i + 3].loss))
        << i;
  }
}

// AdamW has an average of the same name: it is the other one that is missing, or too much.
TEST_P(Lion, StatesOfAnotherOptimizerAreRefused) {
  const auto first_error = [&](const EpochOutcome& whole, EpochArgs args) {
    const EpochOutcome resumed = RunEpoch(From(whole, std::move(args)));
    EXPECT_FALSE(resumed.results.empty());
    return std::string(resumed.results.front().message());
  };
  EpochArgs adamw = Epoch(1, 1);
  adamw.spec.optimizer.kind = plan::OptimizerKind::kAdamW;
  EXPECT_THAT(first_error(RunEpoch(adamw), Epoch(1, 2)),
              ::testing::HasSubstr("is of another optimizer; training.optimizer.name: expected the "
                                   "one that saved it, got lion"));
  EpochArgs after = Epoch(1, 4);
  after.spec.optimizer.kind = plan::OptimizerKind::kAdamW;
  EXPECT_THAT(first_error(RunEpoch(Epoch(1, 3)), after), ::testing::HasSubstr("exp_avg_sq"));
}

}  // namespace
}  // namespace ravel::trainer
