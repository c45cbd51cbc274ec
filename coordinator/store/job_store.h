#pragma once

// The coordinator's durable state. Every change is one transaction: all of it or nothing, on disk
// before Apply returns.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "common/status.h"
#include "coordinator/store/job_record.h"

namespace ravel::coordinator {

// An answered mutating request: the same id with the same hash gets the same answer.
struct RequestRecord {
  std::string id;
  std::string hash;    // SHA-256 of the canonical request, hex
  std::string answer;  // uid of the job, or id of the operation
  int64_t time_ms = 0;
};

// One (job, epoch) that was launched.
struct EpochRecord {
  std::string job_uid;
  int64_t epoch = 0;
  int64_t attempt = 0;
  int64_t world_size = 0;
  std::string plan_digest;  // hex
  std::string members;      // "node-a:0 node-b:0", in rank order
  int64_t first_step = 0;
  std::string restore_path;
  int64_t time_ms = 0;
  std::string transport;  // of its ranks: see TransportOf
};

// On disk: do not renumber.
enum class SaveState {
  kIntended = 1,
  kCommitted = 2,
  kFailed = 3,
  kBad = 4,
  kDeleted = 5,
  kRolledBack = 6
};

// One save whose seals are complete: persisted as intended, then made in the checkpoint store, then
// as done.
struct SaveRecord {
  std::string job_uid;
  int64_t step = 0;
  int64_t epoch = 0;
  int64_t attempt = 0;  // save attempt
  SaveState state = SaveState::kIntended;
  int64_t world_size = 0;
  int64_t bytes = 0;
  int64_t files = 0;
  std::string path;
  std::string reason;
  std::string save_id;  // hex
  int64_t created_ms = 0;
  std::string mesh = {};  // "shard 2, tensor 2"; empty until it is committed, and in older rows
};

struct NodeRow {
  std::string id;
  std::string incarnation;
  int64_t seen_ms = 0;
  int64_t hold = 0;  // NodeHold
  std::string hold_reason = {};
  // Identity of the daemon (HelloMessage): tells which process of this name came later.
  std::string host_id = {};
  std::string work_lock = {};
  int64_t has_left = 0;          // 1: gone in order, LEFT
  std::string gone_reason = {};  // of a node that is gone
};

// Where the time of a job's devices went (Goodput), as of wall_ms.
struct GoodputRow {
  std::string job_uid;
  std::string times = {};  // "productive:12 replay:3": device-microseconds by name
  std::string curve = {};  // "step:productive" of some steps
  int64_t pending_us = 0;
  int64_t devices = 0;  // held then
  int64_t wall_ms = 0;
  int64_t last_step = -1;
  int64_t last_time_ms = 0;  // by the clock of rank 0's host
};

struct StoreChange {
  std::vector<JobRecord> jobs;  // inserted or replaced, by uid
  std::vector<JobEventRecord> events;
  std::optional<RequestRecord> request;
  std::vector<OperationRecord> operations;  // by id
  std::vector<EpochRecord> epochs;
  std::vector<SaveRecord> saves;  // by (job, step, epoch, attempt)
  std::vector<NodeRow> nodes;
  std::vector<GoodputRow> goodput;  // by job
  std::vector<std::string> deleted_nodes;
  // Jobs with all that belongs to them, by uid. Their requests stay for a while, as of
  // `deleted_ms`: a client that asks again gets no second job.
  std::vector<std::string> deleted_jobs;
  int64_t deleted_ms = 0;
  // With deleted jobs: the highest that were given out, which no row may tell afterwards.
  int64_t last_event_seq = 0;
  int64_t last_resource_version = 0;
};

// A save that left nothing in the checkpoint store.
inline bool IsGone(const SaveRecord& save) {
  return save.state == SaveState::kFailed || save.state == SaveState::kDeleted;
}

// An event in the place of older ones; its message begins with their number.
inline constexpr const char* kEventsRemoved = "EventsRemoved";
inline constexpr const char* kEventsRemovedText = " older events were removed";

// Limits on the rows that are kept of jobs that stay.
struct RowRetention {
  int64_t now_ms = 0;
  int64_t events_per_job = 100'000;
  int64_t event_days = 30;
  int64_t node_days = 1;       // of lost nodes
  int64_t request_days = 7;    // after the job's end, or its deletion
  int64_t operation_days = 7;  // of those that are over
  int64_t save_days = 30;      // of those whose step is gone
  int64_t epochs_per_job = 1000;
  int64_t most_rows = 5000;  // removed by one call: nobody else waits long
};

struct LoadedState {
  std::string cluster_id;
  int64_t term = 0;
  std::vector<JobRecord> jobs;  // `spec` is not decoded: see JobRecord::planned
  std::vector<OperationRecord> operations;
  std::vector<EpochRecord> epochs;  // the newest of each job that was launched
  std::vector<SaveRecord> saves;
  std::vector<NodeRow> nodes;
  std::vector<GoodputRow> goodput;
  int64_t last_event_seq = 0;
  int64_t last_resource_version = 0;
};

// Used by one thread at a time, the writer's after Open, but for FindRequest and Events.
class JobStore {
 public:
  virtual ~JobStore() = default;
  // Raises the term, durably, and reads everything: once, first.
  virtual absl::StatusOr<LoadedState> Open() = 0;
  // ResourceExhausted when the disk is full; Aborted when another coordinator has raised the term.
  // After an error nothing of the change stands.
  virtual absl::Status Apply(const StoreChange& change) = 0;
  // Changes that are applied between these two are on disk when CommitGroup returns OK, and else
  // none of them stands. A change that fails does not take the others of its group along.
  virtual absl::Status BeginGroup() { return absl::OkStatus(); }
  virtual absl::Status CommitGroup() { return absl::OkStatus(); }
  // Thread-safe, as Events.
  virtual absl::StatusOr<std::optional<RequestRecord>> FindRequest(const std::string& id) = 0;
  // Removes a job's old rows, at most policy.most_rows of each kind; the number removed. Events
  // that are gone leave one of type EventsRemoved in their place, which says how many there were.
  virtual absl::StatusOr<int64_t> SweepJob(const std::string& job_uid,
                                           const RowRetention& policy) = 0;
  // The same for requests of jobs that are over or gone, and for nodes that were lost long ago.
  virtual absl::StatusOr<int64_t> SweepRequests(const RowRetention& policy) = 0;
  // Events of a job with seq > after, oldest first, at most `limit`.
  virtual absl::StatusOr<std::vector<JobEventRecord>> Events(const std::string& job_uid,
                                                             int64_t after,
                                                             int64_t limit) = 0;
};

}  // namespace ravel::coordinator
