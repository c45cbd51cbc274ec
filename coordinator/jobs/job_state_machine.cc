// The transitions, one function per event. Each checks whether the event means something in the
// job's present state, then builds the next record, the events to be stored and the actions for
// later. Nothing here has an effect: the caller stores the result and then acts, so a crash in
// between repeats harmlessly. An epoch number goes up with each launch and with each end that
// leaves trainers behind; that number is the fence against everything older.

#include "coordinator/jobs/job_state_machine.h"

#include <algorithm>
#include <string_view>
#include <utility>

#include <absl/strings/str_cat.h>

#include "common/check.h"
#include "common/time_text.h"

namespace ravel::coordinator {
namespace {

using Result = std::optional<TransitionResult>;

constexpr std::string_view kMaxRunTime = "MaxRunTime";

class Builder {
 public:
  Builder(const JobRecord& job, const JobEvent& event) : event_(event) { result_.next = job; }

  JobRecord& next() { return result_.next; }

  Builder& To(JobState state, std::string_view reason, std::string_view message = "") {
    result_.next.state = state;
    result_.next.reason = std::string(reason);
    result_.next.message = std::string(message);
    if (IsTerminal(state)) {
      result_.next.finished_ms = event_.now_ms;
      result_.next.world_size = 0;
      result_.actions.push_back(JobActionKind::kFinished);
    }
    return *this;
  }
  Builder& Emit(std::string_view type, std::string_view reason, std::string_view message) {
    JobEventRecord record;
    record.time_ms = event_.now_ms;
    record.job_uid = result_.next.uid;
    record.epoch = result_.next.epoch;
    record.attempt = result_.next.attempt;
    record.step = event_.step >= 0 ? event_.step : event_.cause.step;
    record.type = std::string(type);
    record.reason = std::string(reason);
    record.node = event_.cause.node;
    record.rank = event_.cause.rank;
    record.message = std::string(message);
    result_.events.push_back(std::move(record));
    return *this;
  }
  Builder& Do(JobActionKind action) {
    result_.actions.push_back(action);
    return *this;
  }
  Result Take() { return std::move(result_); }

 private:
  const JobEvent& event_;
  TransitionResult result_;
};

// The whole product is in the store: nothing that happens to trainers now can take it away.
bool HasFinalCommit(const JobRecord& job) {
  return job.committed_step >= job.spec.steps;
}

Result Succeed(const JobRecord& job, const JobEvent& event) {
  Builder builder(job, event);
  builder.next().epoch += 1;  // whatever still runs is stale
  return builder.To(JobState::kSucceeded, "Completed")
      .Emit("Succeeded", "Completed", absl::StrCat("final checkpoint at step ", job.committed_step))
      .Do(JobActionKind::kStopTrainers)
      .Take();
}

Result OnPlaced(const JobRecord& job, const JobEvent& event) {
  const bool allowed = job.state == JobState::kQueued || job.state == JobState::kRecovering ||
                       job.state == JobState::kResizing;
  if (!allowed || event.world_size <= 0) {
    return std::nullopt;
  }
  Builder builder(job, event);
  JobRecord& next = builder.next();
  if (next.launched_epoch == next.epoch) {
    next.epoch += 1;
  }
  next.epoch = std::max(next.epoch, event.epoch_floor + 1);
  next.launched_epoch = next.epoch;
  next.attempt += 1;
  next.world_size = event.world_size;
  const JobState to = job.state == JobState::kQueued ? JobState::kStarting : job.state;
  if (job.state == JobState::kResizing && event.world_size > job.world_size) {
    next.resized_ms = event.now_ms;
  }
  const std::string reason = job.state == JobState::kQueued ? "Placed" : job.reason;
  builder.To(to, reason, job.state == JobState::kQueued ? "" : job.message);
  if (job.budget.store_waits == 0) {  // another look at the store is no news
    builder.Emit(
        "Placed", reason, absl::StrCat("epoch ", next.epoch, ", ", event.world_size, " devices"));
  }
  return builder.Do(JobActionKind::kLaunch).Take();
}

Result OnBelowMinimum(const JobRecord& job, const JobEvent& event) {
  if (job.state != JobState::kRecovering && job.state != JobState::kResizing) {
    return std::nullopt;
  }
  Builder builder(job, event);
  builder.next().world_size = 0;
  const std::string message =
      absl::StrCat("waits for ",
                   job.spec.elastic.sizes.empty() ? 1 : job.spec.elastic.sizes[0],
                   " free devices");
  return builder.To(JobState::kQueued, "BelowMinimum", message)
      .Emit("Queued", "BelowMinimum", message)
      .Take();
}

Result OnAllReady(const JobRecord& job, const JobEvent& event) {
  const bool launching = job.state == JobState::kStarting || job.state == JobState::kRecovering ||
                         job.state == JobState::kResizing;
  if (!launching || job.launched_epoch != job.epoch) {
    return std::nullopt;
  }
  Builder builder(job, event);
  JobRecord& next = builder.next();
  if (next.started_ms == 0) {
    next.started_ms = event.now_ms;
  }
  next.budget.store_waits = 0;
  return builder.To(JobState::kRunning, "Training")
      .Emit("Started",
            IsStoreWait(job.reason) ? "StoreAvailable" : job.reason,
            absl::StrCat("epoch ", job.epoch, ", ", job.world_size, " ranks"))
      .Do(JobActionKind::kRun)
      .Take();
}

// Returns the text of a cause for an event.
std::string Told(const FailureCause& cause) {
  return IsStoreWait(cause.reason)
             ? absl::StrCat("waits for the store and goes on by itself, uncharged: ", cause.message)
             : cause.message;
}

Result OnEpochBroken(const JobRecord& job, const JobEvent& event) {
  if (job.state == JobState::kQueued || job.state == JobState::kStopping ||
      job.launched_epoch != job.epoch) {
    return std::nullopt;  // nothing runs in this epoch
  }
  if (HasFinalCommit(job)) {
    return Succeed(job, event);
  }
  Builder builder(job, event);
  builder.next().epoch = std::max(job.epoch, event.epoch_floor) + 1;
  builder.To(JobState::kRecovering, event.cause.reason, event.cause.message);
  if (job.budget.store_waits == 0 || !IsStoreWait(event.cause.reason)) {
    builder.next().restarts += 1;
    builder.Emit("EpochChanged", event.cause.reason, Told(event.cause));
  }
  return builder.Do(JobActionKind::kStopTrainers).Take();
}

Result Fail(Builder builder, std::string_view reason, const FailureCause& cause) {
  const bool user = ClassOf(cause.reason) == FailureClass::kUser;
  builder.next().failure_class = user ? "user" : "infrastructure";
  const std::string message =
      reason == cause.reason ? cause.message
                             : absl::StrCat("last failure: ", cause.reason, ": ", cause.message);
  return builder.To(JobState::kFailed, reason, message).Emit("Failed", reason, message).Take();
}

Result OnQuiesced(const JobRecord& job, const JobEvent& event) {
  if (job.state == JobState::kStopping && job.reason == kMaxRunTime) {
    Builder builder(job, event);
    builder.next().failure_class = "user";
    return builder.To(JobState::kFailed, kMaxRunTime, job.message)
        .Emit("Failed", kMaxRunTime, job.message)
        .Take();
  }
  if (job.state == JobState::kStopping) {
    return Builder(job, event)
        .To(JobState::kCancelled, job.reason, job.message)
        .Emit("Cancelled", job.reason, job.message)
        .Take();
  }
  if (job.state != JobState::kRecovering || job.launched_epoch == job.epoch) {
    return std::nullopt;
  }
  if (HasFinalCommit(job)) {
    return Succeed(job, event);
  }
  Builder builder(job, event);
  const BudgetVerdict verdict =
      Charge(job.spec.restart, job.budget, event.cause, job.uid, job.attempt, event.now_ms);
  builder.next().budget = verdict.next;
  if (verdict.fail) {
    return Fail(std::move(builder), verdict.final_reason, event.cause);
  }
  builder.next().not_before_ms = event.now_ms + verdict.backoff_ms;
  builder.next().world_size = 0;
  builder.To(JobState::kRecovering, event.cause.reason, event.cause.message);
  if (IsStoreWait(event.cause.reason)) {
    if (job.budget.store_waits == 0 && !IsStoreWait(job.reason)) {
      builder.Emit("Recovering", event.cause.reason, Told(event.cause));
    }
    return builder.Take();  // told when the epoch ended, and once is enough
  }
  return builder
      .Emit("Recovering",
            event.cause.reason,
            verdict.backoff_ms > 0
                ? absl::StrCat("next attempt in ", verdict.backoff_ms, " ms; ", event.cause.message)
                : event.cause.message)
      .Take();
}

Result OnResizeRequested(const JobRecord& job, const JobEvent& event) {
  if (job.state != JobState::kRunning) {
    return std::nullopt;
  }
  const std::string reason = event.cause.reason.empty() ? "ResizeRequested" : event.cause.reason;
  return Builder(job, event)
      .To(JobState::kResizing, reason, event.cause.message)
      .Emit("Resizing", reason, event.cause.message)
      .Do(JobActionKind::kSaveThenStop)
      .Take();
}

Result OnLastStep(const JobRecord& job, const JobEvent& event) {
  if (job.state != JobState::kRunning && job.state != JobState::kResizing) {
    return std::nullopt;
  }
  if (job.launched_epoch != job.epoch) {
    return std::nullopt;
  }
  return Builder(job, event)
      .To(JobState::kFinishing, "FinalSave")
      .Emit("LastStep", "FinalSave", absl::StrCat("step ", event.step, " is done"))
      .Take();
}

Result OnAllDone(const JobRecord& job, const JobEvent& event) {
  const bool active = job.state == JobState::kRunning || job.state == JobState::kResizing ||
                      job.state == JobState::kFinishing || job.state == JobState::kRecovering ||
                      job.state == JobState::kStarting;
  if (!active) {
    return std::nullopt;
  }
  if (HasFinalCommit(job)) {
    return Succeed(job, event);
  }
  JobEvent broken = event;
  broken.kind = JobEventKind::kEpochBroken;
  broken.cause.reason = "StoreUnavailable";
  broken.cause.message = "trainers finished, but the checkpoint of the last step is not committed";
  return OnEpochBroken(job, broken);
}

Result OnCommitted(const JobRecord& job, const JobEvent& event) {
  if (job.rollback_step >= 0) {
    return std::nullopt;  // it was on its way when the rollback came, and is moved aside with them
  }
  Builder builder(job, event);
  JobRecord& next = builder.next();
  next.committed_step = event.step;
  next.committed_path = event.path;
  if (event.step > job.highest_commit) {
    next.highest_commit = event.step;
    next.budget = Refill(next.budget);
  }
  return builder.Emit("CheckpointCommitted", "", event.path).Take();
}

Result OnCommitLost(const JobRecord& job, const JobEvent& event) {
  if (IsTerminal(job.state)) {
    return std::nullopt;
  }
  Builder builder(job, event);
  builder.next().committed_step = event.step;
  builder.next().committed_path = event.path;
  return builder.Emit("RolledBack", event.cause.reason, event.cause.message).Take();
}

Result OnRollbackRequested(const JobRecord& job, const JobEvent& event) {
  if (job.state == JobState::kStopping || event.step < 0 || event.step > job.committed_step) {
    return std::nullopt;
  }
  Builder builder(job, event);
  JobRecord& next = builder.next();
  next.committed_step = event.step;
  next.committed_path = event.path;
  next.rollback_step = event.step;
  const std::string message =
      absl::StrCat("from step ", job.committed_step, " to ", event.step, ": ", event.cause.message);
  if (job.state == JobState::kQueued || job.launched_epoch != job.epoch) {
    return builder.Emit("RolledBack", "UserRequest", message).Take();  // nothing runs
  }
  next.epoch = std::max(job.epoch, event.epoch_floor) + 1;
  return builder.To(JobState::kRecovering, "Rollback", message)
      .Emit("RolledBack", "UserRequest", message)
      .Do(JobActionKind::kStopTrainers)
      .Take();
}

Result OnRolledBack(const JobRecord& job, const JobEvent& event) {
  if (job.rollback_step < 0 || job.rollback_step != event.step) {
    return std::nullopt;
  }
  Builder builder(job, event);
  builder.next().rollback_step = -1;
  return builder.Take();
}

Result OnCancel(const JobRecord& job, const JobEvent& event) {
  Builder builder(job, event);
  const std::string message =
      event.cause.message.empty() ? "cancelled by user" : event.cause.message;
  if (job.state == JobState::kQueued) {
    return builder.To(JobState::kCancelled, "UserRequest", message)
        .Emit("Cancelled", "UserRequest", message)
        .Take();
  }
  if (job.state == JobState::kStopping) {
    return std::nullopt;
  }
  builder.next().epoch += 1;
  return builder.To(JobState::kStopping, "UserRequest", message)
      .Emit("Stopping", "UserRequest", message)
      .Do(JobActionKind::kStopTrainers)
      .Take();
}

Result OnAdopted(const JobRecord& job, const JobEvent& event) {
  const bool launched = job.launched_epoch == job.epoch && HoldsDevices(job.state);
  if (!launched || job.state == JobState::kStopping) {
    return std::nullopt;
  }
  return Builder(job, event).Emit("Adopted", "CoordinatorRestart", event.cause.message).Take();
}

// Ends it as a cancellation does, but as a failure that its user has asked for.
Result OnRunTimeOver(const JobRecord& job, const JobEvent& event) {
  if (!HoldsDevices(job.state) || job.state == JobState::kStopping) {
    return std::nullopt;
  }
  if (HasFinalCommit(job)) {
    return Succeed(job, event);
  }
  Builder builder(job, event);
  builder.next().epoch += 1;
  const std::string message = absl::StrCat("held devices for longer than maxRunTime, ",
                                           FormatDurationExact(job.spec.max_run_time_ms));
  return builder.To(JobState::kStopping, kMaxRunTime, message)
      .Emit("Stopping", kMaxRunTime, message)
      .Do(JobActionKind::kStopTrainers)
      .Take();
}

Result OnCoordinatorRestarted(const JobRecord& job, const JobEvent& event) {
  if (job.state == JobState::kQueued || job.state == JobState::kStopping) {
    return std::nullopt;
  }
  if (HasFinalCommit(job)) {
    return Succeed(job, event);
  }
  Builder builder(job, event);
  if (job.launched_epoch == job.epoch) {
    builder.next().epoch += 1;
  }
  builder.next().restarts += 1;
  builder.next().world_size = 0;
  return builder.To(JobState::kRecovering, "CoordinatorRestart")
      .Emit("EpochChanged", "CoordinatorRestart", "the coordinator was started anew")
      .Do(JobActionKind::kStopTrainers)
      .Take();
}

// The part of a retry's message that says what it changes.
std::string ChangesOf(const plan::JobSpec& before, const plan::JobSpec& after) {
  const bool allows = after.checkpoint.allow_numerics_change;
  return absl::StrCat(
      allows && !before.checkpoint.allow_numerics_change ? ", with other numerics allowed" : "",
      after.tensor == before.tensor
          ? ""
          : absl::StrCat(", with parallelism.tensor ", after.tensor, " after ", before.tensor));
}

Result OnRetry(const JobRecord& job, const JobEvent& event) {
  if (job.state != JobState::kFailed && job.state != JobState::kCancelled) {
    return std::nullopt;
  }
  Builder builder(job, event);
  JobRecord& next = builder.next();
  next.budget = Refill(next.budget);  // the failures of the last day stay known
  next.budget.furthest_step = -1;
  next.failure_class.clear();
  next.finished_ms = 0;
  next.held_ms = 0;  // maxRunTime begins anew
  next.not_before_ms = 0;
  if (event.changed_spec) {
    next.canonical = event.changed_spec->canonical;
    next.planned = event.changed_spec->planned;
    next.spec = event.changed_spec->spec;
    next.peak_bytes = event.changed_spec->peak_bytes;
  }
  const std::string message =
      absl::StrCat("was ",
                   std::string(StateName(job.state)),
                   " (",
                   job.reason,
                   "); goes on from ",
                   job.committed_step < 0 ? "its beginning"
                                          : absl::StrCat("the commit of step ", job.committed_step),
                   ChangesOf(job.spec, next.spec));
  return builder.To(JobState::kQueued, "RetryRequested", message)
      .Emit("Retried", "UserRequest", message)
      .Take();
}

void CountHeldTime(const JobRecord& before, int64_t now_ms, JobRecord& next) {
  const bool held = HoldsDevices(before.state);
  const bool holds = HoldsDevices(next.state);
  if (held && !holds) {
    next.held_ms = HeldMs(before, now_ms);
    next.held_since_ms = 0;
  } else if (holds && next.held_since_ms == 0) {
    next.held_since_ms = now_ms;
  }
}

Result Decide(const JobRecord& job, const JobEvent& event) {
  if (event.kind == JobEventKind::kCommitted) {
    return event.step > job.committed_step ? OnCommitted(job, event) : std::nullopt;
  }
  if (event.kind == JobEventKind::kRetryRequested) {
    return OnRetry(job, event);
  }
  if (IsTerminal(job.state)) {
    return std::nullopt;
  }
  switch (event.kind) {
    case JobEventKind::kPlaced:
      return OnPlaced(job, event);
    case JobEventKind::kBelowMinimum:
      return OnBelowMinimum(job, event);
    case JobEventKind::kAllReady:
      return OnAllReady(job, event);
    case JobEventKind::kEpochBroken:
      return OnEpochBroken(job, event);
    case JobEventKind::kQuiesced:
      return OnQuiesced(job, event);
    case JobEventKind::kResizeRequested:
      return OnResizeRequested(job, event);
    case JobEventKind::kLastStep:
      return OnLastStep(job, event);
    case JobEventKind::kAllDone:
      return OnAllDone(job, event);
    case JobEventKind::kCommitLost:
      return OnCommitLost(job, event);
    case JobEventKind::kCancelRequested:
      return OnCancel(job, event);
    case JobEventKind::kRunTimeOver:
      return OnRunTimeOver(job, event);
    case JobEventKind::kCoordinatorRestarted:
      return OnCoordinatorRestarted(job, event);
    case JobEventKind::kAdopted:
      return OnAdopted(job, event);
    case JobEventKind::kRollbackRequested:
      return OnRollbackRequested(job, event);
    case JobEventKind::kRolledBack:
      return OnRolledBack(job, event);
    case JobEventKind::kCommitted:
    case JobEventKind::kNoted:
    case JobEventKind::kRetryRequested:
      break;
  }
  return std::nullopt;
}

}  // namespace

std::string_view StateName(JobState state) {
  switch (state) {
    case JobState::kQueued:
      return "QUEUED";
    case JobState::kStarting:
      return "STARTING";
    case JobState::kRunning:
      return "RUNNING";
    case JobState::kResizing:
      return "RESIZING";
    case JobState::kRecovering:
      return "RECOVERING";
    case JobState::kFinishing:
      return "FINISHING";
    case JobState::kStopping:
      return "STOPPING";
    case JobState::kSucceeded:
      return "SUCCEEDED";
    case JobState::kFailed:
      return "FAILED";
    case JobState::kCancelled:
      return "CANCELLED";
  }
  return "UNKNOWN";
}

bool IsTerminal(JobState state) {
  return state == JobState::kSucceeded || state == JobState::kFailed ||
         state == JobState::kCancelled;
}

int64_t HeldMs(const JobRecord& job, int64_t now_ms) {
  return job.held_ms +
         (job.held_since_ms > 0 ? std::max<int64_t>(now_ms - job.held_since_ms, 0) : 0);
}

bool HoldsDevices(JobState state) {
  return state != JobState::kQueued && !IsTerminal(state);
}

std::string_view EventKindName(JobEventKind kind) {
  static constexpr std::string_view kNames[kJobEventKinds] = {"Placed",
                                                              "BelowMinimum",
                                                              "AllReady",
                                                              "EpochBroken",
                                                              "Quiesced",
                                                              "ResizeRequested",
                                                              "LastStep",
                                                              "AllDone",
                                                              "Committed",
                                                              "CommitLost",
                                                              "CancelRequested",
                                                              "RunTimeOver",
                                                              "CoordinatorRestarted",
                                                              "Adopted",
                                                              "Noted",
                                                              "RollbackRequested",
                                                              "RolledBack",
                                                              "RetryRequested"};
  return kNames[static_cast<int>(kind)];
}

std::optional<TransitionResult> Transition(const JobRecord& job, const JobEvent& event) {
  Result result = Decide(job, event);
  if (result) {
    CountHeldTime(job, event.now_ms, result->next);
  }
  return result;
}

}  // namespace ravel::coordinator
