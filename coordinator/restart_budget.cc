#include "coordinator/restart_budget.h"

#include <algorithm>
#include <iterator>

#include <absl/strings/str_cat.h>

namespace ravel::coordinator {
namespace {

constexpr int64_t kDayMs = 24LL * 3600 * 1000;

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

int64_t Backoff(const plan::RestartSpec& limits,
                int64_t used,
                std::string_view uid,
                int64_t attempt) {
  if (used <= 1) {
    return 0;
  }
  const int64_t doublings = std::min<int64_t>(used - 2, 30);
  const int64_t base = std::min(limits.max_backoff_ms, limits.backoff_ms << doublings);
  const int64_t jitter = base / 10;
  return jitter == 0
             ? base
             : base - static_cast<int64_t>(HashOf(uid, attempt) % static_cast<uint64_t>(jitter));
}

// Trying again cannot help: the same input fails the same way.
bool FailsAtOnce(const BudgetState& before, const FailureCause& cause) {
  if (cause.reason == "DataError") {
    return true;
  }
  const bool again = before.last_reason == cause.reason && before.last_step == cause.step;
  return again && (ClassOf(cause.reason) == FailureClass::kUser || cause.reason == "PlanRejected");
}

}  // namespace

std::string ExitReason(int32_t exit_code, int32_t signal) {
  if (signal != 0) {
    return "ProcessCrash";
  }
  switch (exit_code) {
    case 10:
      return "Stopped";
    case 11:
      return "CommError";
    case 12:
      return "DeviceError";
    case 13:
      return "DataError";
    case 14:
      return "NonFinitePersistent";
    case 15:
      return "HostOutOfMemory";
    case 16:
      return "PlanRejected";
    case 17:
      return "StoreUnavailable";
    default:
      return "ProcessCrash";
  }
}

FailureClass ClassOf(std::string_view reason) {
  static constexpr std::string_view kUserReasons[] = {"DataError",
                                                      "UserExit",
                                                      "NonFinitePersistent",
                                                      "MaxRunTime",
                                                      "HostOutOfMemory",
                                                      "PlanRejected"};
  static constexpr std::string_view kControlReasons[] = {"CoordinatorRestart",
                                                         "StoreUnavailable",
                                                         "StoreFull",
                                                         "VersionSkew",
                                                         "ResizeRequested",
                                                         "NodeDrain",
                                                         "BelowMinimum"};
  if (std::find(std::begin(kUserReasons), std::end(kUserReasons), reason) !=
      std::end(kUserReasons)) {
    return FailureClass::kUser;
  }
  const bool control = std::find(std::begin(kControlReasons), std::end(kControlReasons), reason) !=
                       std::end(kControlReasons);
  return control ? FailureClass::kControl : FailureClass::kInfrastructure;
}

bool IsCharged(std::string_view reason) {
  // A store that fails is charged all the same: without it the job would restart for ever.
  return reason != "CoordinatorRestart" && reason != "ResizeRequested" && reason != "NodeDrain" &&
         reason != "BelowMinimum";
}

int CauseWeight(std::string_view reason) {
  if (reason == "Stopped") {
    return 0;
  }
  if (reason == "CommError") {
    return 1;
  }
  return ClassOf(reason) == FailureClass::kUser ? 3 : 2;
}

BudgetVerdict Charge(const plan::RestartSpec& limits,
                     const BudgetState& budget,
                     const FailureCause& cause,
                     std::string_view uid,
                     int64_t attempt,
                     int64_t now_ms) {
  BudgetVerdict verdict;
  verdict.next = budget;
  if (!IsCharged(cause.reason)) {
    return verdict;
  }
  BudgetState& next = verdict.next;
  next.used += 1;
  next.no_progress += 1;
  std::erase_if(next.failure_times_ms, [now_ms](int64_t time) { return time <= now_ms - kDayMs; });
  next.failure_times_ms.push_back(now_ms);
  next.last_reason = cause.reason;
  next.last_step = cause.step;
  verdict.backoff_ms = Backoff(limits, next.used, uid, attempt);
  if (FailsAtOnce(budget, cause)) {
    verdict.fail = true;
    verdict.final_reason = cause.reason;
  } else if (next.used > limits.max_failures ||
             static_cast<int64_t>(next.failure_times_ms.size()) > limits.max_per_day) {
    verdict.fail = true;
    verdict.final_reason = "BudgetExhausted";
  } else if (limits.max_no_progress > 0 && next.no_progress >= limits.max_no_progress) {
    verdict.fail = true;
    verdict.final_reason = "NoProgress";
  }
  return verdict;
}

BudgetState Refill(BudgetState budget) {
  budget.used = 0;
  budget.no_progress = 0;
  budget.last_reason.clear();
  budget.last_step = -1;
  return budget;
}

}  // namespace ravel::coordinator
