#pragma once

// Commands to a trainer and its reports, as plain values: proto/trainer.proto without protobuf.

#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "common/ckpt/manifest.h"
#include "common/net_address.h"
#include "common/plan/sharding_plan.h"
#include "common/status.h"
#include "common/store/ravel_store_client.h"
#include "common/trainer_report.h"
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
  PortRange data_ports = {};  // of sockets that wait for peers of other hosts
  bool save_at_start = false;
  bool save_at_end = false;
  std::string save_plan_hash = {};  // the coordinator's, of this plan; empty: not compared
  std::string release = {};         // of the daemon; empty: not compared
  int64_t save_attempt = 1;         // in the names of this epoch's saves
  std::string store_token = {};     // common/job_token.h; a secret
  // Shown to a ravel-store, a secret; none: the one that the environment names.
  std::optional<store::StoreIdentity> store_identity = {};
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
// Shown to a ravel-store from now on: a renewed certificate.
struct UseStoreIdentity {
  store::StoreIdentity identity;
};
// End at once: told to, or a peer is lost.
struct Stop {
  ExitCode code = ExitCode::kStopped;
  std::string reason;
};
using Command = std::variant<Assignment,
                             RecordsOfGroup,
                             AllowSteps,
                             AskForSave,
                             Commit,
                             AskForLedger,
                             UseStoreIdentity,
                             Stop>;

// Up to whoever supervises this trainer. Thread-safe. An error means that nobody listens any more.
class Reporter {
 public:
  virtual ~Reporter() = default;
  // A rendezvous record of this rank; a secret.
  virtual absl::Status Publish(const std::string& group, const std::string& record) = 0;
  virtual absl::Status Ready(const TrainerReady& report) = 0;
  virtual absl::Status Step(const StepReport& record) = 0;
  virtual absl::Status Progress(const ProgressReport& report) = 0;
  virtual absl::Status Ledger(const LedgerReport& report) = 0;
  virtual absl::Status SaveStarted(int64_t step, int64_t sequence, int64_t attempt) = 0;
  virtual absl::Status Sealed(const ckpt::Seal& seal) = 0;
  virtual absl::Status SaveFailed(const ravel::SaveFailed& failure) = 0;
  // `failure` is marked with the exit code that follows.
  virtual absl::Status Failed(const absl::Status& failure) = 0;
  virtual absl::Status Done(int64_t step) = 0;
};

}  // namespace ravel::trainer
