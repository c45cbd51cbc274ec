#pragma once

// The states of a job and their transitions: a pure table. Transition reads no clock and no
// randomness; the controller persists `next` and `events` in one transaction, applies, and only
// then carries out `actions`. The diagram is in README.md.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "coordinator/jobs/restart_budget.h"
#include "coordinator/store/job_record.h"

namespace ravel::coordinator {

enum class JobEventKind {
  kPlaced,        // a gang of world_size devices was found, nothing of an older epoch runs any more
  kBelowMinimum,  // devices are held, but fewer remain than the smallest allowed size
  kAllReady,      // every rank of the epoch is READY
  kEpochBroken,   // a rank, a node or a communicator failed; cause so far
  kQuiesced,      // no trainer of the old epoch runs any more; final cause, to be charged
  kResizeRequested,  // more devices are free and a larger size is allowed
  kLastStep,         // the last step is done: final save
  kAllDone,          // every rank left with exit code 0
  kCommitted,        // the store holds a new step
  kCommitLost,  // a committed step turned out to be bad; step and path of the one before (-1: none)
  kCancelRequested,
  kRunTimeOver,           // it has held devices for longer than maxRunTime
  kCoordinatorRestarted,  // this process is new, and what ran cannot be taken over
  kAdopted,               // this process is new, and the trainers of the epoch went on
  kNoted,                 // nothing changes: records that go with it are kept
  kRollbackRequested,  // a person sets the newest commit back; step, path, cause.message: who, why
  kRolledBack,         // the steps above the target are moved aside
  kRetryRequested      // a failed or cancelled job is to start again
};
inline constexpr int kJobEventKinds = 18;

// A job's spec in its three forms, and the memory predicted from it (JobRecord).
struct ChangedSpec {
  std::string canonical;
  std::string planned;
  plan::JobSpec spec;
  std::vector<int64_t> peak_bytes = {};
};

struct JobEvent {
  JobEventKind kind = JobEventKind::kPlaced;
  int64_t world_size = 0;  // kPlaced
  FailureCause cause;      // kEpochBroken, kQuiesced, kCancelRequested (reason, message)
  int64_t step = -1;       // kCommitted, kCommitLost, kLastStep, kRollbackRequested
  std::string path;        // kCommitted, kCommitLost, kRollbackRequested
  int64_t now_ms = 0;      // wall time
  // Highest epoch of the job that a node has heard of: above the record's after an old backup was
  // restored. kPlaced, kEpochBroken and
  // kRollbackRequested go beyond it.
  int64_t epoch_floor = 0;
  std::optional<ChangedSpec> changed_spec = {};  // kRetryRequested
};

enum class JobActionKind {
  kLaunch,        // plan for world_size and start trainers in epoch
  kRun,           // tell all ranks to train
  kStopTrainers,  // end the trainers of epochs before the record's epoch
  kSaveThenStop,  // save at the next boundary, then exit
  kFinished,      // terminal: release what the job holds
};

struct TransitionResult {
  JobRecord next;
  std::vector<JobEventRecord> events;
  std::vector<JobActionKind> actions;
};

// nullopt: the event has no meaning in this state and is ignored (nothing changes).
std::optional<TransitionResult> Transition(const JobRecord& job, const JobEvent& event);

std::string_view EventKindName(JobEventKind kind);

}  // namespace ravel::coordinator
