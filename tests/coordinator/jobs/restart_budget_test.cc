#include "coordinator/jobs/restart_budget.h"

#include <map>
#include <set>
#include <string>
#include <vector>

#include <gtest/gtest.h>

namespace ravel::coordinator {
namespace {

constexpr int64_t kHourMs = 3600 * 1000;

FailureCause Cause(const std::string& reason, int64_t step, const std::string& node = "node") {
  return {reason, "what happened", node, 1, step};
}
FailureCause Crash(int64_t step) {
  return Cause("ProcessCrash", step);
}
FailureCause Elsewhere(FailureCause cause) {
  cause.elsewhere = true;
  return cause;
}

// Judges the causes one after the other, as of the same moment.
BudgetVerdict ChargeAll(const plan::RestartSpec& limits, const std::vector<FailureCause>& causes) {
  BudgetVerdict verdict;
  for (const FailureCause& cause : causes) {
    verdict = Charge(limits, verdict.next, cause, "uid", 1, 1000);
  }
  return verdict;
}

TEST(FailureReasonTest, EachReasonHasOneRowAndEachExitCodeOneReason) {
  std::set<std::string_view> names;
  std::set<int32_t> codes;
  for (const FailureReason& reason : FailureReasons()) {
    EXPECT_TRUE(names.insert(reason.name).second) << reason.name;
    if (reason.exit_code >= 0) {
      EXPECT_TRUE(codes.insert(reason.exit_code).second) << reason.name;
      EXPECT_EQ(ReasonOfExit(reason.exit_code, 0), reason.name);
    }
  }
  EXPECT_EQ(codes, (std::set<int32_t>{0, 10, 11, 12, 13, 14, 15, 16, 17, 18}));
  EXPECT_EQ(FindFailureReason("FromTheFuture").name, "ProcessCrash");
}

// The classes of all reasons, written down a second time.
TEST(FailureReasonTest, ClassesAndChargesAreThoseOfTheSpecification) {
  const std::map<FailureClass, std::set<std::string_view>> classes = {
      {FailureClass::kUser,
       {"DataError",
        "EnvironmentRefused",
        "StoreRefused",
        "UserExit",
        "NonFinitePersistent",
        "MaxRunTime",
        "NumericsChanged",
        "HostOutOfMemory",
        "PlanRejected"}},
      {FailureClass::kInfrastructure,
       {"ProcessCrash",
        "DeviceError",
        "NodeLost",
        "CommError",
        "CollectiveMismatch",
        "Stall",
        "CheckpointCorrupt",
        "DeviceOutOfMemory",
        "SavesFailing",
        "CheckpointTooOld",
        "StartFailed",
        "PreflightFailed",
        "DataCacheTooSmall",
        "DataCachesTooSmall"}},
      {FailureClass::kPreemption, {"Preempted", "NodeDrain", "CapacityNotice", "ResizeRequested"}},
      {FailureClass::kCapacity,
       {"WaitingForDevices", "WaitingForQuota", "BelowMinimum", "HigherPriorityAhead", "Backoff"}},
      {FailureClass::kControl,
       {"Done",
        "Stopped",
        "CoordinatorRestart",
        "StoreUnavailable",
        "StoreFull",
        "VersionSkew",
        "Rollback"}},
      {FailureClass::kFinal, {"BudgetExhausted", "NoProgress", "NoGoodCheckpoint"}}};
  std::map<FailureClass, std::set<std::string_view>> found;
  for (const FailureReason& reason : FailureReasons()) {
    found[reason.kind].insert(reason.name);
    const bool machines_or_own =
        reason.kind == FailureClass::kUser || reason.kind == FailureClass::kInfrastructure;
    const bool refused_before_it_ran = reason.name == "StartFailed" ||
                                       reason.name == "PreflightFailed" ||
                                       reason.name == "DataCacheTooSmall";
    EXPECT_EQ(reason.charged, machines_or_own && !refused_before_it_ran) << reason.name;
  }
  EXPECT_EQ(found, classes);
}

// Ten times the same at the same step on the same node, while others could take the job.
TEST(RestartBudgetTest, OnlyTheJobsOwnFailuresEndItWithoutALimitInTheJobFile) {
  for (const FailureReason& reason : FailureReasons()) {
    const FailureCause cause = Elsewhere(Cause(std::string(reason.name), 5));
    const BudgetVerdict verdict = ChargeAll({}, std::vector<FailureCause>(10, cause));
    const bool own = reason.repeats == RepeatRule::kSameStep;
    EXPECT_EQ(verdict.fail, own || reason.answer == FailureAnswer::kFail) << reason.name;
  }
}

TEST(RestartBudgetTest, ARefusedLaunchIsNotCharged) {
  const auto wait_ms = [](const char* reason) {
    const BudgetVerdict verdict = ChargeAll({}, std::vector<FailureCause>(100, Cause(reason, 0)));
    EXPECT_FALSE(verdict.fail) << reason;
    EXPECT_EQ(verdict.next.used, 0) << reason;
    return verdict.backoff_ms;
  };
  EXPECT_LE(wait_ms("PreflightFailed"), 60'000);
  EXPECT_GT(wait_ms("PreflightFailed"), 1'000);
  // Each such refusal takes one node out: the next attempt follows at once.
  EXPECT_EQ(wait_ms("DataCacheTooSmall"), 0);
}

TEST(RestartBudgetTest, AThousandCrashesOnlyWaitLonger) {
  const BudgetVerdict verdict = ChargeAll({}, std::vector<FailureCause>(1000, Crash(0)));
  EXPECT_FALSE(verdict.fail);
  EXPECT_LE(verdict.backoff_ms, 300'000);
  EXPECT_GE(verdict.backoff_ms, 270'000);
}

TEST(RestartBudgetTest, DataThatIsBadOnOneNodeIsTriedOnAnother) {
  const FailureCause here = Elsewhere(Cause("DataError", 5, "a"));
  const FailureCause there = Elsewhere(Cause("DataError", 5, "b"));
  EXPECT_FALSE(ChargeAll({}, {here}).fail);
  EXPECT_FALSE(ChargeAll({}, {here, here, here, here}).fail) << "b may be busy";
  EXPECT_TRUE(ChargeAll({}, {here, there}).fail);
  EXPECT_EQ(ChargeAll({}, {here, there}).final_reason, "DataError");
  EXPECT_FALSE(ChargeAll({}, {here, Crash(5), there}).fail) << "in a row";
}

TEST(RestartBudgetTest, DataThatIsBadOnTheOnlyNodeIsTriedTwice) {
  const FailureCause only = Cause("DataError", 5, "a");
  EXPECT_FALSE(ChargeAll({}, {only}).fail);
  EXPECT_TRUE(ChargeAll({}, {only, only}).fail);
}

TEST(RestartBudgetTest, AStoreThatIsAwayCostsNothingAndWaitsUpToAMinute) {
  for (const char* reason : {"StoreUnavailable", "StoreFull"}) {
    BudgetState budget;
    int64_t last = 0;
    for (int i = 0; i < 100; ++i) {
      const BudgetVerdict verdict = Charge({}, budget, Cause(reason, 7), "uid", 1, 0);
      EXPECT_FALSE(verdict.fail);
      EXPECT_GE(verdict.backoff_ms, 4500);
      EXPECT_LE(verdict.backoff_ms, 60'000);
      EXPECT_GE(verdict.backoff_ms, last);
      last = verdict.backoff_ms;
      budget = verdict.next;
    }
    EXPECT_EQ(budget.used, 0);
    EXPECT_EQ(budget.no_progress, 0);
    EXPECT_TRUE(budget.failure_times_ms.empty());
    EXPECT_GE(last, 54'000);
    EXPECT_LE(Charge({}, Refill(budget), Cause(reason, 7), "uid", 1, 0).backoff_ms, 5000);
  }
}

TEST(RestartBudgetTest, ANodeThatCannotStartTheJobIsLeftAtOnceAndThenWithAWait) {
  const FailureCause cause = Cause("StartFailed", -1);
  EXPECT_EQ(ChargeAll({}, {cause}).backoff_ms, 0);
  EXPECT_GE(ChargeAll({}, {cause, cause}).backoff_ms, 4500);
  EXPECT_EQ(ChargeAll({}, {cause, cause}).next.used, 0);
}

TEST(RestartBudgetTest, NoWaitInTheJobFileIsNoBusyLoop) {
  plan::RestartSpec limits;
  limits.backoff_ms = limits.max_backoff_ms = 0;
  EXPECT_GE(ChargeAll(limits, {Crash(1), Crash(1)}).backoff_ms, 90);
}

TEST(RestartBudgetTest, StepsBeyondAllBeforeRefillTheBudget) {
  EXPECT_EQ(ChargeAll({}, {Crash(5), Crash(5), Crash(5)}).next.used, 3);
  const BudgetVerdict further = ChargeAll({}, {Crash(5), Crash(5), Crash(5), Crash(6)});
  EXPECT_EQ(further.next.used, 1);
  EXPECT_EQ(further.backoff_ms, 0);
  EXPECT_EQ(further.next.no_progress, 4) << "only a commit counts for restart.maxNoProgress";
  EXPECT_EQ(ChargeAll({}, {Crash(5), Crash(3)}).next.used, 2);
}

TEST(RestartBudgetTest, TheFirstFailureRestartsAtOnceThenBackoffDoublesToItsLimit) {
  plan::RestartSpec limits;
  limits.max_failures = 100;
  limits.max_no_progress = 100;
  BudgetState budget;
  std::vector<int64_t> waits;
  for (int i = 0; i < 10; ++i) {
    const BudgetVerdict verdict = Charge(limits, budget, Crash(0), "uid", i, 1000);
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

TEST(RestartBudgetTest, FailuresInARowWithoutACommitAreNoProgressWhereTheJobFileSaysSo) {
  plan::RestartSpec limits;
  limits.max_no_progress = 3;
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

TEST(RestartBudgetTest, MoreFailuresThanTheJobFileAllowsExhaustTheBudget) {
  plan::RestartSpec limits;
  limits.max_failures = 2;
  EXPECT_FALSE(ChargeAll(limits, {Crash(1), Crash(1)}).fail);
  EXPECT_EQ(ChargeAll(limits, {Crash(1), Crash(1), Crash(1)}).final_reason, "BudgetExhausted");
  limits.max_failures = 0;
  EXPECT_TRUE(ChargeAll(limits, {Crash(1)}).fail);
}

TEST(RestartBudgetTest, UserErrorsFailOnTheSecondTimeAtTheSameStepOrTheThirdWithoutACommit) {
  const plan::RestartSpec limits;
  const FailureCause numeric = Cause("NonFinitePersistent", 5);
  EXPECT_FALSE(ChargeAll(limits, {numeric}).fail);
  const BudgetVerdict twice = ChargeAll(limits, {numeric, numeric});
  EXPECT_TRUE(twice.fail);
  EXPECT_EQ(twice.final_reason, "NonFinitePersistent");
  const FailureCause later = Cause("NonFinitePersistent", 6);
  EXPECT_FALSE(ChargeAll(limits, {numeric, later}).fail);
  EXPECT_EQ(ChargeAll(limits, {numeric, later, numeric}).final_reason, "NoProgress");
}

TEST(RestartBudgetTest, WhatIsNotTheJobsFaultCostsNothing) {
  for (const char* reason : {"CoordinatorRestart", "NodeDrain", "ResizeRequested", "Preempted"}) {
    const BudgetVerdict verdict = Charge({}, {}, Cause(reason, -1), "uid", 1, 0);
    EXPECT_EQ(verdict.next, BudgetState()) << reason;
    EXPECT_FALSE(verdict.fail);
    EXPECT_EQ(verdict.backoff_ms, 0);
  }
}

TEST(RestartBudgetTest, TriesForWantOfTheStoreAreCountedApart) {
  plan::RestartSpec limits;
  limits.max_failures = 1;
  limits.max_no_progress = 1;
  BudgetState budget;
  for (int i = 0; i < 9; ++i) {
    const BudgetVerdict verdict =
        Charge(limits, budget, {"StoreUnavailable", "", "", -1, 5}, "uid", i, 0);
    EXPECT_FALSE(verdict.fail);
    EXPECT_EQ(verdict.next.used, 0);
    EXPECT_LE(verdict.backoff_ms, 60'000);
    budget = verdict.next;
  }
  EXPECT_EQ(budget.store_waits, 9);
  EXPECT_EQ(Charge(limits, budget, {"Rollback", "", "", -1, 5}, "uid", 1, 0).next.store_waits, 0);
  EXPECT_EQ(Refill(budget).store_waits, 0);
}

TEST(RestartBudgetTest, WithoutAGoodCheckpointTheJobFailsAtOnce) {
  const BudgetVerdict verdict =
      Charge({}, {}, {"NoGoodCheckpoint", "step 5: checksum", "", -1, 5}, "uid", 1, 0);
  EXPECT_TRUE(verdict.fail);
  EXPECT_EQ(verdict.final_reason, "NoGoodCheckpoint");
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
