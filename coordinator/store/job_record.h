#pragma once

// The durable facts of a job, as the store keeps them and the state machine changes them.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "common/model/job_spec.h"

namespace ravel::coordinator {

// On disk: do not renumber. The same numbers as v1::JobState.
enum class JobState {
  kQueued = 1,
  kStarting = 2,
  kRunning = 3,
  kResizing = 4,
  kRecovering = 5,
  kFinishing = 8,
  kStopping = 9,
  kSucceeded = 10,
  kFailed = 11,
  kCancelled = 12,
};
inline constexpr JobState kAllJobStates[] = {JobState::kQueued,
                                             JobState::kStarting,
                                             JobState::kRunning,
                                             JobState::kResizing,
                                             JobState::kRecovering,
                                             JobState::kFinishing,
                                             JobState::kStopping,
                                             JobState::kSucceeded,
                                             JobState::kFailed,
                                             JobState::kCancelled};

std::string_view StateName(JobState state);
bool IsTerminal(JobState state);
// Holds devices: everything but Queued and the terminal states.
bool HoldsDevices(JobState state);
struct JobRecord;
// Time for which a job has held devices, over all its spells.
int64_t HeldMs(const JobRecord& job, int64_t now_ms);

// The part of its restart budget that a job has used. Durable.
struct BudgetState {
  int64_t used = 0;  // charged failures since progress: a new highest commit, or a step further
  int64_t no_progress = 0;                // charged failures in a row without a higher commit
  int64_t user_failures = 0;              // those of them that the job itself causes
  int64_t waits = 0;                      // failures in a row that are not charged but wait
  int64_t furthest_step = -1;             // trained by any attempt
  std::vector<int64_t> failure_times_ms;  // wall times of charged failures of the last 24 h
  std::string last_reason;                // of the last charged failure, with node and step
  std::string last_node;
  int64_t last_step = -1;
  int64_t store_waits = 0;  // tries in a row that ended for want of the store: not charged
  bool operator==(const BudgetState&) const = default;
};

// On disk: do not renumber. A job that somebody wants deleted, which happens once it is over and
// quiet.
enum class DeleteWish { kNone = 0, kKeepCheckpoints = 1, kWithCheckpoints = 2 };

struct JobRecord {
  std::string uid;
  std::string namespace_name;
  std::string name;
  std::string canonical;  // serialized v1::TrainingJob with every default filled in
  std::string planned;    // serialized v1::PlannedJob: what trainers receive
  plan::JobSpec spec;     // decoded from `planned`

  JobState state = JobState::kQueued;
  std::string reason;
  std::string message;
  int64_t generation = 1;
  int64_t epoch = 0;
  int64_t launched_epoch = 0;  // the epoch of the newest Launch; a launch never reuses an epoch
  int64_t attempt = 0;
  int64_t world_size = 0;
  int64_t committed_step = -1;  // newest commit, -1: none
  std::string committed_path;
  int64_t highest_commit = -1;  // for the budget: falls never
  int64_t restarts = 0;
  BudgetState budget;
  int64_t not_before_ms = 0;  // wall time before which no new attempt starts (backoff)
  int64_t created_ms = 0;
  int64_t started_ms = 0;
  int64_t finished_ms = 0;
  int64_t resized_ms = 0;      // wall time of the last growth
  int64_t rollback_step = -1;  // >= 0: the next launch moves the steps above it aside first
  std::string failure_class;   // user or infrastructure, in Failed
  // Run time for maxRunTime: ms that earlier spells held devices, and the wall time at which the
  // present spell began (0: it holds none).
  int64_t held_ms = 0;
  int64_t held_since_ms = 0;
  DeleteWish delete_wish = DeleteWish::kNone;
  // Predicted memory of the worst rank, by index of spec.elastic.sizes; empty: not known.
  std::vector<int64_t> peak_bytes;
  int64_t resource_version = 0;
};

// One aspect of a job's health, as it is now: Kubernetes' conditions.
struct JobCondition {
  std::string type = {};    // CheckpointFresh
  bool status = false;      // true: as it should be
  std::string reason = {};  // one word in CamelCase
  std::string message = {};
  int64_t time_ms = 0;  // wall time of the last change of status
};

struct JobEventRecord {
  int64_t seq = 0;  // given by the store, rising over all jobs
  int64_t time_ms = 0;
  std::string job_uid;
  int64_t epoch = 0;
  int64_t attempt = 0;
  int64_t step = -1;
  std::string type;
  std::string reason;
  std::string node;
  int64_t rank = -1;
  std::string message;
};

// On disk: do not renumber. The same numbers as v1::Operation::State.
enum class OperationState { kAccepted = 1, kWriting = 2, kSealed = 3, kCommitted = 4, kFailed = 5 };

// A request whose effect comes later: checkpoint now.
struct OperationRecord {
  std::string id;
  std::string job_uid;
  OperationState state = OperationState::kAccepted;
  std::string reason;
  int64_t step = -1;
  std::string save_id;
  int64_t sequence = 0;  // of the SaveTrainer that carries it out
  int64_t created_ms = 0;
  int64_t deadline_ms = 0;  // wall time after which it fails; 0: of an older release
};

}  // namespace ravel::coordinator
