#pragma once

// What a trainer is told and what it tells, as plain values: proto/trainer.proto without protobuf.

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "common/ckpt/manifest.h"
#include "common/plan/sharding_plan.h"
#include "common/status.h"
#include "worker/trainer/exit_code.h"

namespace ravel::trainer {

// All that a rank needs to begin.
struct Assignment {
  std::string job_uid;
  int64_t epoch = 0;
  int64_t rank = 0;
  int64_t world_size = 1;
  plan::JobSpec spec;
  plan::ShardingPlan plan;
  std::string transport;        // local, shm, gloo, nccl
  int64_t gpu = 0;              // of this host, where the job is for GPUs
  std::string restore_path;     // committed step directory, or empty
  std::string checkpoint_root;  // the job's folder in its store
  int64_t first_step = 0;       // steps that are done already
  std::string host_address;
  bool save_at_start = false;
  bool save_at_end = false;
  std::string save_plan_hash = {};  // the coordinator's, of this plan; empty: not compared
  std::string release = {};         // of the daemon; empty: not compared
};

// What the job's owner should know of a start: an event of the job.
struct StartRemark {
  std::string reason;  // one word in CamelCase
  std::string message;
};

struct ReadyReport {
  int64_t step = 0;
  int64_t planned_bytes = 0;
  int64_t measured_bytes = 0;
  double restore_seconds = 0;
  std::vector<StartRemark> remarks = {};
};

struct StepRecord {
  int64_t step = 0;  // finished steps
  float loss = 0;
  double grad_norm = 0;
  double learning_rate = 0;
  int64_t tokens = 0;
  double seconds = 0;
  bool skipped = false;
  bool has_validation_loss = false;
  float validation_loss = 0;
  int64_t time_ms = 0;
  int64_t planned_bytes = 0;
  int64_t measured_bytes = 0;
};

// Where this rank is in the collectives of one group.
struct CollectiveState {
  std::string group;
  int64_t first_member = 0;
  uint64_t sequence = 0;
  uint64_t hash = 0;
  uint64_t completed = 0;
  int64_t waiting_ms = 0;
  uint64_t mark_sequence = 0;
  uint64_t mark_hash = 0;
  std::string waiting_in = {};  // the last that was issued, when it is not through
};

// A save without a seal of this rank: proto/trainer.proto, SaveFailed.
struct SaveFailure {
  int64_t step = 0;
  int64_t sequence = 0;
  int64_t attempt = 0;
  std::string reason;  // one word in CamelCase
  std::string message;
  bool skipped = false;
};

struct ProgressReport {
  int64_t step = 0;
  std::string phase;
  int64_t phase_age_ms = 0;
  uint64_t collective_sequence = 0;
  uint64_t collective_hash = 0;
  std::vector<CollectiveState> collectives = {};
  int64_t moved_bytes = 0;
};

// What was issued last.
struct LedgerEntry {
  uint64_t sequence = 0;
  uint64_t hash = 0;
  uint64_t order = 0;
  std::string kind;
  std::string op;
  std::string unit;  // empty: of the whole step
  int64_t group = -1;
  int64_t call = 0;
  std::string phase;
  int64_t generation = 0;
  int64_t elements = 0;
  int64_t element_bytes = 0;
  int64_t age_ms = 0;
};
struct LedgerOfGroup {
  std::string group;
  std::vector<int> members;
  uint64_t completed = 0;
  std::vector<LedgerEntry> entries;  // oldest first
};
struct LedgerReport {
  int64_t epoch = 0;
  std::vector<LedgerOfGroup> groups;
};

// Commands.
struct RecordsOfGroup {
  int64_t epoch = 0;
  std::string group;
  std::vector<std::string> records;  // by rank
};
struct AllowSteps {
  int64_t epoch = 0;
  int64_t until_step = 0;
};
struct AskForSave {
  int64_t epoch = 0;
  int64_t sequence = 0;
  bool then_stop = false;
};
struct Commit {
  int64_t step = 0;
  bool committed = false;
  std::string reason;
};
struct AskForLedger {
  int64_t epoch = 0;
  int64_t most = 0;  // entries of each group
};
// End at once: told to, or a peer is lost.
struct Stop {
  ExitCode code = ExitCode::kStopped;
  std::string reason;
};
using Command =
    std::variant<Assignment, RecordsOfGroup, AllowSteps, AskForSave, Commit, AskForLedger, Stop>;

// Up to whoever supervises this trainer. Thread-safe. An error means that nobody listens any more.
class Reporter {
 public:
  virtual ~Reporter() = default;
  // A rendezvous record of this rank; a secret.
  virtual absl::Status Publish(const std::string& group, const std::string& record) = 0;
  virtual absl::Status Ready(const ReadyReport& report) = 0;
  virtual absl::Status Step(const StepRecord& record) = 0;
  virtual absl::Status Progress(const ProgressReport& report) = 0;
  virtual absl::Status Ledger(const LedgerReport& report) = 0;
  virtual absl::Status SaveStarted(int64_t step, int64_t sequence, int64_t attempt) = 0;
  virtual absl::Status Sealed(const ckpt::Seal& seal) = 0;
  virtual absl::Status SaveFailed(const SaveFailure& failure) = 0;
  // `failure` is marked with the exit code that follows.
  virtual absl::Status Failed(const absl::Status& failure) = 0;
  virtual absl::Status Done(int64_t step) = 0;
};

}  // namespace ravel::trainer
