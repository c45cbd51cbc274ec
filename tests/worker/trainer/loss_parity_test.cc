// Training by the engine against training by PyTorch (golden/make_golden.py), and against itself on
// other numbers of ranks.

#include <cstdio>

#include <gtest/gtest.h>

#include "tests/testing/golden_curves.h"
#include "tests/testing/training_cases.h"

namespace ravel::trainer {
namespace {

std::string CurveFolder() {
  return OwnFolder("ravel_loss_parity");
}

class LossParity : public ::testing::TestWithParam<std::string> {};

TEST_P(LossParity, EveryStepEqualsPyTorchToOneInTenThousandOnOneToFourRanks) {
  const std::vector<GoldenStep> golden = GoldenCurve(GetParam());
  ASSERT_EQ(static_cast<int64_t>(golden.size()), kGoldenSteps);
  for (int ranks = 1; ranks <= 4; ++ranks) {
    const Recording run = Record(
        {.spec = CaseJob(GetParam(), CurveFolder()), .ranks = ranks, .last_step = kGoldenSteps});
    const CurveDistance worst = DistanceToGolden(golden, run);
    EXPECT_LE(worst.loss, 1e-4) << ranks << " ranks";
    EXPECT_LE(worst.grad_norm, 1e-3) << ranks << " ranks";
    std::printf("%s on %d ranks: worst relative difference of the loss %.3g\n",
                GetParam().c_str(),
                ranks,
                worst.loss);
  }
}

TEST_P(LossParity, OneToEightRanksGiveTheSameBits) {
  const RecordArgs one = {
      .spec = CaseJob(GetParam(), CurveFolder()), .ranks = 1, .last_step = kGoldenSteps};
  const Recording reference = Record(one);
  for (const int ranks : {2, 3, 4, 5, 7, 8}) {
    RecordArgs args = one;
    args.ranks = ranks;
    EXPECT_EQ(FirstDifference(reference, Record(args)), "") << ranks << " ranks";
  }
}

TEST_P(LossParity, RanksThatShareNoMemoryGiveTheSameBits) {
  const RecordArgs one = {.spec = CaseJob(GetParam(), CurveFolder()), .ranks = 1, .last_step = 4};
  const Recording reference = Record(one);
  for (const int ranks : {2, 3}) {
    RecordArgs args = one;
    args.ranks = ranks;
    args.shared_memory = false;
    args.evaluate_every_step = ranks == 3;
    EXPECT_EQ(FirstDifference(reference, Record(args)), "") << ranks << " ranks";
  }
}

TEST_P(LossParity, EvaluationAfterEveryStepChangesNoBit) {
  RecordArgs args = {.spec = CaseJob(GetParam(), CurveFolder()), .ranks = 3, .last_step = 12};
  const Recording without = Record(args);
  args.evaluate_every_step = true;
  const Recording with = Record(args);
  EXPECT_EQ(FirstDifference(without, with), "");
  ASSERT_EQ(with.validation.size(), 12u);
  EXPECT_LT(with.validation.back(), with.validation.front());
  args.ranks = 2;
  EXPECT_EQ(Record(args).validation, with.validation);
}

TEST_P(LossParity, ResumeOnAnotherNumberOfRanksContinuesWithTheSameBits) {
  const plan::JobSpec spec = CaseJob(GetParam(), CurveFolder());
  const Recording whole = Record({.spec = spec, .ranks = 4, .last_step = 20});
  const Recording first = Record({.spec = spec, .ranks = 4, .last_step = 11});
  Recording resumed =
      Record({.spec = spec, .ranks = 3, .first_step = 11, .last_step = 20, .start = &first});
  resumed.steps.insert(resumed.steps.begin(), first.steps.begin(), first.steps.end());
  EXPECT_EQ(FirstDifference(whole, resumed), "");
}

std::string CurveCaseName(const ::testing::TestParamInfo<std::string>& tested) {
  return tested.param;
}

INSTANTIATE_TEST_SUITE_P(Cases, LossParity, ::testing::ValuesIn(CaseNames()), CurveCaseName);

}  // namespace
}  // namespace ravel::trainer
