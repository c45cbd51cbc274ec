#include "coordinator/restart_budget.h"

#include <gtest/gtest.h>

namespace ravel::coordinator {
namespace {

constexpr int64_t kHourMs = 3600 * 1000;

FailureCause Crash(int64_t step) {
  return {"ProcessCrash", "signal 9", "node", 1, step};
}

TEST(RestartBudgetTest, TheFirstFailureRestartsAtOnceThenBackoffDoublesToItsLimit) {
  plan::RestartSpec limits;
  limits.max_failures = 100;
  limits.max_no_progress = 100;
  BudgetState budget;
  std::vector<int64_t> waits;
  for (int i = 0; i < 10; ++i) {
    const BudgetVerdict verdict = Charge(limits, budget, Crash(i), "uid", i, 1000);
    EXPECT_FALSE(verdict.fail);
    waits.push_back(verdict.backoff_ms);
    budget = verdict.next;
  }
  EXPECT_EQ(waits[0], 0);
  for (size_t i = 1; i < waits.size(); ++i) {
    const int64_t full = std::min<int64_t>(limits.max_backoff_ms, limits.backoff_ms << (i - 1));
    EXPECT_LE(waits[i], full);
    EXPECT_GE(waits[i], full * 9 / 10);
  }
  EXPECT_EQ(Charge(limits, budget, Crash(0), "uid", 3, 0).backoff_ms,
            Charge(limits, budget, Crash(0), "uid", 3, 0).backoff_ms)
      << "jitter is a hash, not chance";
}

TEST(RestartBudgetTest, FailuresInARowWithoutACommitAreNoProgress) {
  plan::RestartSpec limits;
  BudgetState budget;
  for (int i = 1; i <= 3; ++i) {
    const BudgetVerdict verdict = Charge(limits, budget, Crash(i), "uid", i, 0);
    EXPECT_EQ(verdict.fail, i == 3);
    if (verdict.fail) {
      EXPECT_EQ(verdict.final_reason, "NoProgress");
    }
    budget = verdict.next;
  }
  EXPECT_FALSE(Charge(limits, Refill(budget), Crash(9), "uid", 4, 0).fail);
}

TEST(RestartBudgetTest, TooManyInADayFailEvenWithProgressAndOldOnesAreForgotten) {
  plan::RestartSpec limits;
  limits.max_per_day = 4;
  BudgetState budget;
  for (int i = 0; i < 4; ++i) {
    const BudgetVerdict verdict = Charge(limits, budget, Crash(i), "uid", i, i * kHourMs);
    EXPECT_FALSE(verdict.fail);
    budget = Refill(verdict.next);
  }
  EXPECT_EQ(Charge(limits, budget, Crash(9), "uid", 5, 5 * kHourMs).final_reason,
            "BudgetExhausted");
  EXPECT_FALSE(Charge(limits, budget, Crash(9), "uid", 5, 25 * kHourMs).fail);
}

TEST(RestartBudgetTest, UserErrorsFailAtOnceOrOnTheSecondTimeAtTheSameStep) {
  const plan::RestartSpec limits;
  EXPECT_TRUE(Charge(limits, {}, {"DataError", "", "", -1, 5}, "uid", 1, 0).fail);
  const FailureCause numeric{"NonFinitePersistent", "", "", -1, 5};
  const BudgetVerdict once = Charge(limits, {}, numeric, "uid", 1, 0);
  EXPECT_FALSE(once.fail);
  const BudgetVerdict twice = Charge(limits, once.next, numeric, "uid", 2, 0);
  EXPECT_TRUE(twice.fail);
  EXPECT_EQ(twice.final_reason, "NonFinitePersistent");
  const FailureCause later{"NonFinitePersistent", "", "", -1, 6};
  EXPECT_FALSE(Charge(limits, once.next, later, "uid", 2, 0).fail);
}

TEST(RestartBudgetTest, ACoordinatorsRestartCostsNothing) {
  const BudgetVerdict verdict = Charge({}, {}, {"CoordinatorRestart", "", "", -1, 5}, "uid", 1, 0);
  EXPECT_EQ(verdict.next, BudgetState());
  EXPECT_FALSE(verdict.fail);
}

TEST(RestartBudgetTest, TheTellingCauseOutweighsItsEchoes) {
  EXPECT_GT(CauseWeight("ProcessCrash"), CauseWeight("CommError"));
  EXPECT_GT(CauseWeight("DataError"), CauseWeight("ProcessCrash"));
  EXPECT_GT(CauseWeight("CommError"), CauseWeight("Stopped"));
}

TEST(RestartBudgetTest, ExitCodesHaveTheirReasons) {
  EXPECT_EQ(ExitReason(-1, 9), "ProcessCrash");
  EXPECT_EQ(ExitReason(11, 0), "CommError");
  EXPECT_EQ(ExitReason(13, 0), "DataError");
  EXPECT_EQ(ExitReason(17, 0), "StoreUnavailable");
  EXPECT_EQ(ExitReason(70, 0), "ProcessCrash");
  EXPECT_EQ(ExitReason(10, 0), "Stopped");
}

}  // namespace
}  // namespace ravel::coordinator
