#include "coordinator/jobs/job_state_machine.h"

#include <map>
#include <random>
#include <set>
#include <string>

#include <absl/strings/str_cat.h>
#include <gtest/gtest.h>

namespace ravel::coordinator {
namespace {

JobRecord Record(JobState state) {
  JobRecord job;
  job.uid = "uid";
  job.spec.steps = 100;
  job.spec.elastic.sizes = {1, 2};
  job.state = state;
  job.epoch = 4;
  job.launched_epoch = 4;  // trainers of the present epoch exist
  job.attempt = 3;
  job.world_size = 2;
  return job;
}

JobEvent Event(JobEventKind kind) {
  JobEvent event;
  event.kind = kind;
  event.world_size = 2;
  event.cause.reason = "ProcessCrash";
  event.step = 50;
  event.path = "/step-50";
  event.now_ms = 1000;
  return event;
}

using S = JobState;
using E = JobEventKind;
struct Row {
  S from;
  E event;
  S to;
};

// Every pair that means something while trainers of the present epoch exist. What is not here is
// ignored.
constexpr Row kTable[] = {
    {S::kQueued, E::kPlaced, S::kStarting},
    {S::kRecovering, E::kPlaced, S::kRecovering},
    {S::kResizing, E::kPlaced, S::kResizing},
    {S::kRecovering, E::kBelowMinimum, S::kQueued},
    {S::kResizing, E::kBelowMinimum, S::kQueued},
    {S::kStarting, E::kAllReady, S::kRunning},
    {S::kRecovering, E::kAllReady, S::kRunning},
    {S::kResizing, E::kAllReady, S::kRunning},
    {S::kStarting, E::kEpochBroken, S::kRecovering},
    {S::kRunning, E::kEpochBroken, S::kRecovering},
    {S::kResizing, E::kEpochBroken, S::kRecovering},
    {S::kRecovering, E::kEpochBroken, S::kRecovering},
    {S::kFinishing, E::kEpochBroken, S::kRecovering},
    {S::kStopping, E::kQuiesced, S::kCancelled},
    {S::kRunning, E::kResizeRequested, S::kResizing},
    {S::kRunning, E::kLastStep, S::kFinishing},
    {S::kResizing, E::kLastStep, S::kFinishing},
    {S::kStarting, E::kAllDone, S::kRecovering},  // without the commit of the last step
    {S::kRunning, E::kAllDone, S::kRecovering},
    {S::kResizing, E::kAllDone, S::kRecovering},
    {S::kRecovering, E::kAllDone, S::kRecovering},
    {S::kFinishing, E::kAllDone, S::kRecovering},
    {S::kQueued, E::kCancelRequested, S::kCancelled},
    {S::kStarting, E::kCancelRequested, S::kStopping},
    {S::kRunning, E::kCancelRequested, S::kStopping},
    {S::kResizing, E::kCancelRequested, S::kStopping},
    {S::kRecovering, E::kCancelRequested, S::kStopping},
    {S::kFinishing, E::kCancelRequested, S::kStopping},
    {S::kStarting, E::kRunTimeOver, S::kStopping},
    {S::kRunning, E::kRunTimeOver, S::kStopping},
    {S::kResizing, E::kRunTimeOver, S::kStopping},
    {S::kRecovering, E::kRunTimeOver, S::kStopping},
    {S::kFinishing, E::kRunTimeOver, S::kStopping},
    {S::kStarting, E::kCoordinatorRestarted, S::kRecovering},
    {S::kRunning, E::kCoordinatorRestarted, S::kRecovering},
    {S::kResizing, E::kCoordinatorRestarted, S::kRecovering},
    {S::kRecovering, E::kCoordinatorRestarted, S::kRecovering},
    {S::kFinishing, E::kCoordinatorRestarted, S::kRecovering},
    {S::kStarting, E::kAdopted, S::kStarting},
    {S::kRunning, E::kAdopted, S::kRunning},
    {S::kResizing, E::kAdopted, S::kResizing},
    {S::kRecovering, E::kAdopted, S::kRecovering},
    {S::kFinishing, E::kAdopted, S::kFinishing},
    {S::kFailed, E::kRetryRequested, S::kQueued},
    {S::kCancelled, E::kRetryRequested, S::kQueued},
};

TEST(JobStateMachineTest, EveryPairOfStateAndEventHasItsRowOrIsIgnored) {
  std::map<std::pair<S, E>, S> rows;
  for (const Row& row : kTable) {
    rows[{row.from, row.event}] = row.to;
  }
  for (const S state : kAllJobStates) {
    rows[{state, E::kCommitted}] = state;  // a commit never changes the state
    if (!IsTerminal(state)) {
      rows[{state, E::kCommitLost}] = state;
    }
    for (int kind = 0; kind < kJobEventKinds; ++kind) {
      const JobEvent event = Event(static_cast<E>(kind));
      SCOPED_TRACE(absl::StrCat(
          std::string(StateName(state)), " + ", std::string(EventKindName(event.kind))));
      const auto result = Transition(Record(state), event);
      const auto row = rows.find({state, event.kind});
      ASSERT_EQ(result.has_value(), row != rows.end());
      if (result) {
        EXPECT_EQ(StateName(result->next.state), StateName(row->second));
        EXPECT_FALSE(result->events.empty()) << "every change is told";
      }
    }
  }
}

TEST(JobStateMachineTest, ALaunchNeverReusesAnEpoch) {
  JobRecord job = Record(S::kQueued);
  job.launched_epoch = job.epoch = 0;
  const auto first = Transition(job, Event(E::kPlaced));
  EXPECT_EQ(first->next.epoch, 1);
  EXPECT_EQ(first->next.launched_epoch, 1);
  const auto broken = Transition(first->next, Event(E::kEpochBroken));
  EXPECT_EQ(broken->next.epoch, 2);
  EXPECT_EQ(broken->next.launched_epoch, 1);
  EXPECT_EQ(broken->actions, std::vector<JobActionKind>{JobActionKind::kStopTrainers});
  const auto again = Transition(broken->next, Event(E::kPlaced));
  EXPECT_EQ(again->next.epoch, 2) << "the new epoch was raised already, and nobody has seen it";
  EXPECT_EQ(again->next.attempt, job.attempt + 2);
}

TEST(JobStateMachineTest, AFailureIsChargedWhenTheOldEpochIsQuiet) {
  const auto broken = Transition(Record(S::kRunning), Event(E::kEpochBroken));
  EXPECT_EQ(broken->next.budget.used, 0);
  EXPECT_FALSE(Transition(broken->next, Event(E::kEpochBroken)).has_value())
      << "one epoch breaks once";
  const auto quiet = Transition(broken->next, Event(E::kQuiesced));
  EXPECT_EQ(quiet->next.budget.used, 1);
  EXPECT_EQ(quiet->next.state, S::kRecovering);
}

TEST(JobStateMachineTest, AnExhaustedBudgetFailsTheJobWithTheClassOfTheLastCause) {
  JobRecord job = Record(S::kRecovering);
  job.launched_epoch = 3;
  job.budget.used = job.spec.restart.max_failures = 4;
  const auto failed = Transition(job, Event(E::kQuiesced));
  EXPECT_EQ(failed->next.state, S::kFailed);
  EXPECT_EQ(failed->next.reason, "BudgetExhausted");
  EXPECT_EQ(failed->next.failure_class, "infrastructure");
}

TEST(JobStateMachineTest, NothingCanTakeAwayAJobWhoseLastStepIsCommitted) {
  for (const S state : {S::kStarting, S::kRunning, S::kFinishing, S::kRecovering}) {
    JobRecord job = Record(state);
    job.committed_step = 100;
    for (const E kind : {E::kAllDone, E::kEpochBroken, E::kCoordinatorRestarted}) {
      const auto result = Transition(job, Event(kind));
      ASSERT_TRUE(result.has_value());
      EXPECT_EQ(result->next.state, S::kSucceeded);
    }
  }
}

TEST(JobStateMachineTest, OnlyAHigherCommitRefillsTheBudget) {
  JobRecord job = Record(S::kRunning);
  job.budget.used = 2;
  job.highest_commit = 60;
  job.committed_step = 40;  // after a rollback
  const auto lower = Transition(job, Event(E::kCommitted));
  EXPECT_EQ(lower->next.committed_step, 50);
  EXPECT_EQ(lower->next.budget.used, 2);
  JobEvent event = Event(E::kCommitted);
  event.step = 61;
  EXPECT_EQ(Transition(lower->next, event)->next.budget.used, 0);
  event.step = 50;
  EXPECT_FALSE(Transition(lower->next, event).has_value()) << "not newer";
}

TEST(JobStateMachineTest, ARollbackIsTheOnlyWordThatSetsAStepBack) {
  JobRecord job = Record(S::kRunning);
  job.committed_step = job.highest_commit = 80;
  JobEvent event = Event(E::kRollbackRequested);
  event.cause.message = "loss went up";
  const auto back = Transition(job, event);
  ASSERT_TRUE(back.has_value());
  EXPECT_EQ(back->next.state, S::kRecovering);
  EXPECT_EQ(back->next.epoch, job.epoch + 1);
  EXPECT_EQ(back->next.committed_step, 50);
  EXPECT_EQ(back->next.highest_commit, 80);
  EXPECT_EQ(back->next.rollback_step, 50);
  EXPECT_EQ(back->next.restarts, job.restarts) << "nothing has failed";
  EXPECT_EQ(back->events.front().type, "RolledBack");
  EXPECT_EQ(back->events.front().message, "from step 80 to 50: loss went up");
  EXPECT_EQ(back->actions, std::vector<JobActionKind>{JobActionKind::kStopTrainers});
  JobEvent commit = Event(E::kCommitted);
  commit.step = 90;
  EXPECT_FALSE(Transition(back->next, commit).has_value()) << "it was on its way, and is too late";
  const auto done = Transition(back->next, Event(E::kRolledBack));
  EXPECT_EQ(done->next.rollback_step, -1);
  EXPECT_TRUE(Transition(done->next, commit).has_value());
  event.step = 81;
  EXPECT_FALSE(Transition(job, event).has_value()) << "never forward";
  job.state = S::kQueued;
  const auto queued = Transition(job, Event(E::kRollbackRequested));
  EXPECT_EQ(queued->next.state, S::kQueued);
  EXPECT_EQ(queued->next.epoch, job.epoch) << "nothing runs";
  EXPECT_FALSE(Transition(Record(S::kFailed), Event(E::kRollbackRequested)).has_value());
}

TEST(JobStateMachineTest, AStoreThatIsAwayIsToldOnce) {
  JobRecord job = Record(S::kRunning);
  JobEvent event = Event(E::kEpochBroken);
  event.cause.reason = "StoreUnavailable";
  std::vector<std::string> told;
  for (int i = 0; i < 5; ++i) {
    for (const E kind : {E::kEpochBroken, E::kQuiesced, E::kPlaced}) {
      event.kind = kind;
      const auto result = Transition(job, event);
      ASSERT_TRUE(result.has_value());
      for (const JobEventRecord& record : result->events) {
        told.push_back(record.type);
      }
      job = result->next;
    }
  }
  EXPECT_EQ(told, std::vector<std::string>{"EpochChanged"});
  EXPECT_EQ(job.budget.used, 0);
  EXPECT_EQ(job.budget.store_waits, 5);
  EXPECT_EQ(job.restarts, 1);
  EXPECT_EQ(Transition(job, Event(E::kAllReady))->next.budget.store_waits, 0);
}

// Random lives: what must hold after every change.
TEST(JobStateMachineTest, InvariantsHoldOverRandomEvents) {
  std::mt19937_64 random(20261121);
  int64_t transitions = 0;
  for (int life = 0; life < 20'000; ++life) {
    JobRecord job = Record(S::kQueued);
    job.epoch = job.launched_epoch = job.attempt = job.world_size = 0;
    std::set<int64_t> launched;
    for (int i = 0; i < 60; ++i) {
      JobEvent event = Event(static_cast<E>(random() % kJobEventKinds));
      event.step = static_cast<int64_t>(random() % 101);
      event.world_size = 1 + static_cast<int64_t>(random() % 2);
      event.now_ms = i * 1000;
      const auto result = Transition(job, event);
      if (!result) {
        continue;
      }
      ++transitions;
      const JobRecord& next = result->next;
      ASSERT_GE(next.epoch, job.epoch);
      ASSERT_LE(next.epoch, job.epoch + 1);
      ASSERT_LE(next.launched_epoch, next.epoch);
      ASSERT_GE(next.attempt, job.attempt);
      ASSERT_GE(next.highest_commit, job.highest_commit);
      ASSERT_TRUE(!IsTerminal(job.state) || next.state == job.state ||
                  (event.kind == E::kRetryRequested && job.state != S::kSucceeded))
          << "terminal stays terminal";
      for (const JobActionKind action : result->actions) {
        if (action == JobActionKind::kLaunch) {
          ASSERT_TRUE(launched.insert(next.epoch).second) << "two launches in one epoch";
          ASSERT_GT(next.world_size, 0);
        }
        if (action == JobActionKind::kRun) {
          ASSERT_TRUE(launched.contains(next.epoch));
          ASSERT_EQ(next.state, S::kRunning);
        }
      }
      if (next.committed_step < job.committed_step) {
        ASSERT_TRUE(event.kind == E::kCommitLost || event.kind == E::kRollbackRequested)
            << "a step falls only by proven damage or a person's word";
      }
      if (next.state == S::kSucceeded && job.state != S::kSucceeded) {
        ASSERT_GE(next.committed_step, next.spec.steps);
      }
      job = next;
    }
  }
  EXPECT_GT(transitions, 100'000);
}

}  // namespace
}  // namespace ravel::coordinator
