// Judges a failure: restart now, wait, or give up. A job fails only if the same failure would come
// again anywhere (the reason's RepeatRule), or when a limit of the job file is passed; faults of
// machines wait and try again. The wait doubles from restart.backoff to restart.maxBackoff. Its
// jitter is a hash of (uid, attempt), not a random number, so the decision is a pure function and a
// replay gives the same times.

#include "coordinator/jobs/restart_budget.h"

#include <algorithm>
#include <cstddef>
#include <vector>

namespace ravel::coordinator {
namespace {

constexpr int64_t kDayMs = 24LL * 3600 * 1000;
constexpr int64_t kShortestWaitMs = 100;
constexpr int64_t kLongestWaitMs = 60 * 1000;  // for what is not charged
constexpr int64_t kMostTimes = 1000;           // of failures within a day that are kept
// Failures of the job's own making in a row without a higher commit, unless the job file says
// another number.
constexpr int64_t kUserFailuresWithoutProgress = 3;

uint64_t HashOf(std::string_view uid, int64_t attempt) {  // FNV-1a: the same on every machine
  uint64_t hash = 14695981039346656037ULL;
  const auto mix = [&hash](uint8_t byte) { hash = (hash ^ byte) * 1099511628211ULL; };
  for (const char c : uid) {
    mix(static_cast<uint8_t>(c));
  }
  for (int shift = 0; shift < 64; shift += 8) {
    mix(static_cast<uint8_t>(static_cast<uint64_t>(attempt) >> shift));
  }
  return hash;
}

// The wait that doubles `doublings` times, from restart.backoff up to `longest_ms`.
int64_t Doubled(const plan::RestartSpec& limits,
                int64_t doublings,
                int64_t longest_ms,
                std::string_view uid,
                int64_t attempt) {
  // A job file may ask for no wait at all: something that fails at once is still not tried in a
  // busy loop.
  const int64_t first = std::max(limits.backoff_ms, kShortestWaitMs);
  const int64_t base = std::min(longest_ms, first << std::min<int64_t>(doublings, 30));
  const int64_t jitter = base / 10;
  return jitter == 0
             ? base
             : base - static_cast<int64_t>(HashOf(uid, attempt) % static_cast<uint64_t>(jitter));
}

// The wait of a failure that is not charged: what is missing comes back by itself, or another node
// takes the job.
int64_t UnchargedWait(const plan::RestartSpec& limits,
                      const FailureReason& reason,
                      int64_t waits,
                      std::string_view uid,
                      int64_t attempt) {
  if (reason.name == "DataCacheTooSmall") {
    return 0;  // it is not placed there again, and ends when no node is left
  }
  const int64_t doublings = reason.answer == FailureAnswer::kWait ? waits - 1 : waits - 2;
  const int64_t longest =
      std::min(std::max(limits.max_backoff_ms, kShortestWaitMs), kLongestWaitMs);
  return doublings < 0 ? 0 : Doubled(limits, doublings, longest, uid, attempt);
}

// Trying again cannot help: the same input fails the same way wherever it is tried.
bool FailsAnywhere(const BudgetState& before,
                   const FailureCause& cause,
                   const FailureReason& reason) {
  if (reason.answer == FailureAnswer::kFail) {
    return true;
  }
  if (before.last_reason != cause.reason) {
    return false;
  }
  switch (reason.repeats) {
    case RepeatRule::kSameStep:
      return before.last_step == cause.step;
    case RepeatRule::kElsewhere:
      return before.last_node != cause.node || !cause.elsewhere;
    case RepeatRule::kNever:
      break;
  }
  return false;
}

bool OverLimit(int64_t count, int64_t limit) {
  return limit >= 0 && count > limit;
}

bool WithoutProgress(const plan::RestartSpec& limits, const BudgetState& budget) {
  if (limits.max_no_progress >= 0) {
    return limits.max_no_progress > 0 && budget.no_progress >= limits.max_no_progress;
  }
  return budget.user_failures >= kUserFailuresWithoutProgress;
}

// Steps beyond all that were trained before are progress, though only a commit keeps them.
void CountSteps(BudgetState& budget, int64_t step) {
  if (step > budget.furthest_step) {
    budget.furthest_step = step;
    budget.used = 0;
    budget.waits = 0;
  }
}

void KeepTime(const plan::RestartSpec& limits, std::vector<int64_t>& times, int64_t now_ms) {
  // A clock that was set back: no failure is of the future, or it would count for more than a day.
  for (int64_t& time : times) {
    time = std::min(time, now_ms);
  }
  std::erase_if(times, [now_ms](int64_t time) { return time <= now_ms - kDayMs; });
  times.push_back(now_ms);
  const size_t most = static_cast<size_t>(std::max(limits.max_per_day + 1, kMostTimes));
  if (times.size() > most) {
    times.erase(times.begin(), times.end() - static_cast<std::ptrdiff_t>(most));
  }
}

}  // namespace

std::string ExitReason(int32_t exit_code, int32_t signal) {
  const std::string_view reason = ReasonOfExit(exit_code, signal);
  // Exit code 0 of one that was not done is a crash like another.
  return std::string(reason == "Done" ? "ProcessCrash" : reason);
}

FailureClass ClassOf(std::string_view reason) {
  return FindFailureReason(reason).kind;
}

bool IsStoreWait(std::string_view reason) {
  return reason == "StoreUnavailable" || reason == "StoreFull";
}

bool IsCharged(std::string_view reason) {
  return FindFailureReason(reason).charged;
}

int CauseWeight(std::string_view reason) {
  return FindFailureReason(reason).weight;
}

BudgetVerdict Charge(const plan::RestartSpec& limits,
                     const BudgetState& budget,
                     const FailureCause& cause,
                     std::string_view uid,
                     int64_t attempt,
                     int64_t now_ms) {
  BudgetVerdict verdict;
  verdict.next = budget;
  BudgetState& next = verdict.next;
  const FailureReason& reason = FindFailureReason(cause.reason);
  CountSteps(next, cause.step);
  next.store_waits = IsStoreWait(cause.reason) ? next.store_waits + 1 : 0;
  if (reason.answer == FailureAnswer::kFail && !reason.charged) {
    verdict.fail = true;  // nobody's charge, and nothing that a new attempt could change
    verdict.final_reason = cause.reason;
    return verdict;
  }
  if (!reason.charged) {
    const bool waits =
        reason.answer == FailureAnswer::kWait || reason.answer == FailureAnswer::kAvoidNode;
    if (waits) {
      next.waits += 1;
      verdict.backoff_ms = UnchargedWait(limits, reason, next.waits, uid, attempt);
    }
    return verdict;
  }
  next.used += 1;
  next.no_progress += 1;
  next.waits = 0;
  next.user_failures += reason.repeats == RepeatRule::kSameStep ? 1 : 0;
  KeepTime(limits, next.failure_times_ms, now_ms);
  next.last_reason = cause.reason;
  next.last_step = cause.step;
  next.last_node = cause.node;
  if (next.used > 1) {
    const int64_t longest = std::max(limits.max_backoff_ms, kShortestWaitMs);
    verdict.backoff_ms = Doubled(limits, next.used - 2, longest, uid, attempt);
  }
  if (FailsAnywhere(budget, cause, reason)) {
    verdict.final_reason = cause.reason;
  } else if (OverLimit(next.used, limits.max_failures) ||
             OverLimit(static_cast<int64_t>(next.failure_times_ms.size()), limits.max_per_day)) {
    verdict.final_reason = "BudgetExhausted";
  } else if (WithoutProgress(limits, next)) {
    verdict.final_reason = "NoProgress";
  }
  verdict.fail = !verdict.final_reason.empty();
  return verdict;
}

BudgetState Refill(BudgetState budget) {
  budget.used = 0;
  budget.no_progress = 0;
  budget.user_failures = 0;
  budget.waits = 0;
  budget.last_reason.clear();
  budget.last_node.clear();
  budget.last_step = -1;
  budget.store_waits = 0;
  return budget;
}

}  // namespace ravel::coordinator
