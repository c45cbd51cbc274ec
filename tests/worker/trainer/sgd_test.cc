// SGD with momentum: against PyTorch, on any number of ranks, and through checkpoints.

#include <filesystem>

#include <absl/strings/str_cat.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/testing/fake_supervisor.h"
#include "tests/testing/golden_curves.h"
#include "tests/testing/strategy_cases.h"

namespace ravel::trainer {
namespace {

// Its tensors are cut between ranks.
constexpr char kModel[] = "bundled_rope_scaling";

class Sgd : public ::testing::TestWithParam<plan::OptimizerKind> {
 protected:
  Sgd() : folder_(OwnFolder("ravel_sgd")) {}

  plan::JobSpec Job() const {
    plan::JobSpec spec = CaseJob(kModel, folder_);
    spec.optimizer.kind = GetParam();
    spec.optimizer.beta1 = 0.9;
    spec.optimizer.lr *= 10;
    return spec;
  }

  const std::string folder_;
};
INSTANTIATE_TEST_SUITE_P(Momentum,
                         Sgd,
                         ::testing::Values(plan::OptimizerKind::kSgd,
                                           plan::OptimizerKind::kSgdNesterov),
                         [](const auto& tested) {
                           return tested.param == plan::OptimizerKind::kSgd ? "plain" : "nesterov";
                         });

TEST_P(Sgd, EveryStepEqualsPyTorchToOneInTenThousand) {
  const std::vector<GoldenStep> golden = GoldenCurve(
      absl::StrCat(kModel, GetParam() == plan::OptimizerKind::kSgd ? "_sgd" : "_sgd_nesterov"));
  const Recording run = Record({.spec = Job(), .ranks = 2, .last_step = kGoldenSteps});
  const CurveDistance worst = DistanceToGolden(golden, run);
  EXPECT_LE(worst.loss, 1e-4);
  EXPECT_LE(worst.grad_norm, 1e-3);
  EXPECT_LT(run.steps.back().loss, 0.8f * run.steps.front().loss);
}

TEST_P(Sgd, OneToFourRanksGiveTheSameBits) {
  const Recording one = Record({.spec = Job(), .ranks = 1, .last_step = 12});
  EXPECT_FALSE(one.exp_avg.empty());
  EXPECT_TRUE(one.exp_avg_sq.empty());
  for (const int ranks : {2, 3, 4}) {
    EXPECT_EQ(FirstDifference(one, Record({.spec = Job(), .ranks = ranks, .last_step = 12})), "")
        << ranks << " ranks";
  }
}

TEST_P(Sgd, EveryStrategyGivesTheSameBits) {
  const auto run = [&](const StrategyCase& tested) {
    plan::JobSpec spec = JobOf(tested, kModel, folder_);
    spec.optimizer = Job().optimizer;
    RecordArgs args = ArgsOf(tested, spec);
    args.last_step = 4;
    return Record(args);
  };
  const Recording one = run({.width = 1});
  for (const NamedStrategy& strategy : MatrixStrategies()) {
    const StrategyCase tested = {.strategy = strategy.name, .width = 2};
    EXPECT_EQ(FirstDifference(one, run(tested)), "") << tested.name();
  }
}

class SgdCheckpoints : public Sgd {
 protected:
  SgdCheckpoints() { std::filesystem::remove_all(folder_); }

  EpochArgs Epoch(int ranks, int64_t epoch) const {
    EpochArgs args;
    args.spec = Job();
    args.spec.steps = 6;
    args.spec.evaluation_every = 0;
    args.spec.checkpoint.every_steps = 1;
    args.ranks = ranks;
    args.epoch = epoch;
    args.checkpoint_root = absl::StrCat(folder_, "/store-", epoch);
    return args;
  }
};
INSTANTIATE_TEST_SUITE_P(Momentum, SgdCheckpoints, ::testing::Values(plan::OptimizerKind::kSgd));

// Fails when the momentum is not saved, or not read: the losses after it differ.
TEST_P(SgdCheckpoints, AResumedRunOnAnotherNumberOfRanksHasTheSameLosses) {
  const EpochOutcome whole = RunEpoch(Epoch(2, 1));
  ASSERT_EQ(whole.steps.size(), 6u);
  EpochArgs args = Epoch(3, 2);
  args.restore_path = whole.committed.at(3);
  args.first_step = 3;
  const EpochOutcome resumed = RunEpoch(args);
  for (const absl::Status& result : resumed.results) {
    ASSERT_TRUE(result.ok()) << result;
  }
  ASSERT_EQ(resumed.steps.size(), 3u);
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(resumed.steps[i].loss, whole.steps[i + 3].loss) << i;
  }
}

// Fails when a run with another optimizer starts with states that are none of its own.
TEST_P(SgdCheckpoints, StatesOfAnotherOptimizerAreRefusedByField) {
  const EpochOutcome whole = RunEpoch(Epoch(1, 1));
  EpochArgs args = Epoch(1, 2);
  args.restore_path = whole.committed.at(3);
  args.first_step = 3;
  args.spec.optimizer.kind = plan::OptimizerKind::kAdamW;
  const EpochOutcome resumed = RunEpoch(args);
  ASSERT_FALSE(resumed.results.empty());
  EXPECT_THAT(std::string(resumed.results.front().message()),
              ::testing::HasSubstr("momentum_buffer: is of another optimizer; "
                                   "training.optimizer.name: expected the one that saved it, got "
                                   "adamw"));
}

}  // namespace
}  // namespace ravel::trainer
