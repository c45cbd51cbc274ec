// Training by the engine against training by PyTorch (golden/make_golden.py), and against itself on
// other numbers of ranks.

#include <cmath>
#include <filesystem>
#include <fstream>
#include <sstream>

#include <absl/strings/str_cat.h>
#include <gtest/gtest.h>

#include "tests/worker/trainer/training_cases.h"

namespace ravel::trainer {
namespace {

struct GoldenStep {
  double loss = 0;
  double grad_norm = 0;
  double learning_rate = 0;
};

std::vector<GoldenStep> GoldenCurve(const std::string& name) {
  std::ifstream file(RAVEL_GOLDEN_FILE);
  std::vector<GoldenStep> curve;
  std::string line;
  while (std::getline(file, line)) {
    std::istringstream words(line);
    std::string of_case;
    int64_t step = 0;
    GoldenStep golden;
    if (words >> of_case >> step >> golden.loss >> golden.grad_norm >> golden.learning_rate &&
        of_case == name) {
      EXPECT_EQ(step, static_cast<int64_t>(curve.size()));
      curve.push_back(golden);
    }
  }
  return curve;
}

std::string CurveFolder() {
  return absl::StrCat(::testing::TempDir(), "/ravel_loss_parity");
}

class LossParity : public ::testing::TestWithParam<std::string> {};

TEST_P(LossParity, EveryStepEqualsPyTorchToOneInTenThousandOnOneToFourRanks) {
  const std::vector<GoldenStep> golden = GoldenCurve(GetParam());
  ASSERT_EQ(static_cast<int64_t>(golden.size()), kGoldenSteps);
  for (int ranks = 1; ranks <= 4; ++ranks) {
    const Recording run = Record(
        {.spec = CaseJob(GetParam(), CurveFolder()), .ranks = ranks, .last_step = kGoldenSteps});
    ASSERT_EQ(run.steps.size(), golden.size());
    double worst = 0;
    for (size_t i = 0; i < golden.size(); ++i) {
      const StepResult& step = run.steps[i];
      const double relative =
          std::abs(static_cast<double>(step.loss) - golden[i].loss) / golden[i].loss;
      worst = std::max(worst, relative);
      EXPECT_LE(relative, 1e-4) << "step " << i << " on " << ranks << " ranks";
      EXPECT_NEAR(step.grad_norm / golden[i].grad_norm, 1.0, 1e-3) << "step " << i;
      EXPECT_NEAR(step.learning_rate / golden[i].learning_rate, 1.0, 1e-6) << "step " << i;
      EXPECT_FALSE(step.skipped);
    }
    std::printf("%s on %d ranks: worst relative difference of the loss %.3g\n",
                GetParam().c_str(),
                ranks,
                worst);
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
