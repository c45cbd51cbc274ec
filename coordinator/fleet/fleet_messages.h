#pragma once

// Messages between daemons and coordinator as plain values: proto/fleet.proto and trainer.proto
// without protobuf.

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "common/ckpt/manifest.h"
#include "common/path_facts.h"
#include "common/trainer_report.h"

namespace ravel::coordinator {

using StreamId = uint64_t;

struct DeviceFacts {
  std::string kind;
  std::string model;
  int64_t memory_bytes = 0;
  std::string uuid;
};

// The commands that a trainer has been told so far, as its daemon reports in each beat and Hello.
struct TrainerHas {
  int64_t until_step = -1;  // -1: it was not told to train
  int64_t save_sequence = 0;
  bool then_stop = false;
  std::vector<std::string> groups =
      {};  // whose records were delivered; only while it is not told to train
};

struct HeldTrainer {
  std::string job_uid;
  int64_t epoch = 0;
  int64_t attempt = 0;
  int64_t rank = 0;
  int64_t step = 0;
  std::string state;
  std::vector<ckpt::Seal> seals;
  TrainerHas has = {};
};

struct HelloMessage {
  std::string node_id;
  std::string incarnation;
  int64_t protocol = 0;  // the newest that it speaks
  std::string cluster_id;
  std::vector<DeviceFacts> devices;
  std::string data_address;
  std::string host_id;
  std::string cpu_isa;
  std::vector<HeldTrainer> trainers;
  std::string version;
  std::string device_message;
  int64_t term = 0;       // highest that the daemon has heard
  bool draining = false;  // it has said that it goes away
  // Which work folder the daemon has locked, on the host of host_id: no other daemon that lives has
  // it. Empty: unknown.
  std::string work_lock = {};
  int64_t oldest_protocol = 0;  // 0: only the newest
  int64_t path_bytes = 0;       // of padding in its first beats; 0: it pads nothing
  std::vector<std::string> networks = {};
};

struct TrainerBeat {
  std::string job_uid;
  int64_t rank = 0;
  int64_t epoch = 0;
  int64_t step = 0;
  std::string phase;
  int64_t phase_age_ms = 0;
  std::vector<CollectiveState> collectives = {};
  std::string state = {};  // as in HeldTrainer
  TrainerHas has = {};
  int64_t moved_bytes = 0;  // read so far of what is fetched for it, or of what it restores
};
struct BeatMessage {
  int64_t seq = 0;
  std::vector<TrainerBeat> trainers = {};  // all that the node holds
  // The newest command that arrived on this stream before the list was made; 0: none.
  int64_t heard_command = 0;
  std::string padding = {};    // goes back with the acknowledgement
  int64_t answered_bytes = 0;  // the most padding that came back to it on this stream
  int64_t next_bytes = 0;      // of padding in the next beat
  int64_t unanswered_ms = 0;   // age of its oldest padded beat without an acknowledgement
};

struct CommRecord {
  std::string group;
  int64_t rank = 0;
  std::string record;  // a secret: never logged
};
struct SaveStarted {
  int64_t step = 0;
  int64_t sequence = 0;
  int64_t attempt = 1;  // save attempt
};
struct TrainerFailed {
  int32_t code = 0;
  std::string reason;
  std::string message;
};
struct TrainerDone {
  int64_t step = 0;
};
struct TrainerProgress {
  int64_t step = 0;
};
struct TrainerFrame {
  std::string job_uid;
  int64_t epoch = 0;
  int64_t attempt = 0;
  int64_t rank = 0;
  std::variant<TrainerProgress,
               CommRecord,
               TrainerReady,
               StepReport,
               ckpt::Seal,
               SaveStarted,
               SaveFailed,
               TrainerFailed,
               TrainerDone,
               LedgerReport>
      frame;
};

struct TrainerExited {
  std::string job_uid;
  int64_t epoch = 0;
  int64_t attempt = 0;
  int64_t rank = 0;
  int32_t exit_code = 0;
  int32_t signal = 0;
  std::string reason;
  std::string message;
  std::string tail;
};

struct LogBatch {
  std::string job_uid;
  int64_t attempt = 0;
  int64_t rank = 0;
  int64_t first_seq = 0;
  std::vector<std::string> lines;
  int64_t time_ms = 0;
};

struct CommandResult {
  int64_t command_id = 0;
  bool ok = true;
  std::string message;
  std::string reason = {};
};
struct DrainNotice {
  std::string reason;
};
// Findings of a node at the paths of a Look.
struct LookResult {
  int64_t look_id = 0;
  std::string refused = {};  // why nothing was looked at; empty: the facts are there
  PathFacts facts = {};
};

using UpMessage = std::variant<BeatMessage,
                               TrainerFrame,
                               TrainerExited,
                               LogBatch,
                               CommandResult,
                               DrainNotice,
                               LookResult>;

// Down.

struct Welcome {
  std::string cluster_id;
  int64_t beat_interval_ms = 0;
  std::vector<HeldTrainer> stop;
  int64_t protocol = 0;  // 0: as agreed before
};
struct BeatAck {
  int64_t seq = 0;
  std::string padding = {};
};
struct StartTrainer {
  std::string job_name;
  int64_t rank = 0;
  int64_t world_size = 0;
  std::string job;  // serialized PlannedJob
  int64_t device = 0;
  std::string transport;
  std::string restore_path;
  std::string checkpoint_root;
  int64_t first_step = 0;
  std::string host_address;
  bool save_at_start = false;
  bool save_at_end = true;
  std::string save_plan_hash = {};
  int64_t save_attempt = 1;  // in the names of the epoch's saves
};
struct Launch {
  std::string job_uid;
  int64_t epoch = 0;
  int64_t attempt = 0;
  std::string plan_digest;
  std::vector<StartTrainer> trainers;
};
struct CommRecordSet {
  std::string group;
  std::vector<std::string> records;
};
struct RunTrainer {
  int64_t until_step = 0;
  int64_t save_every_ms = 0;
};
struct SaveTrainer {
  int64_t sequence = 0;
  bool then_stop = false;
};
struct CommitResult {
  int64_t step = 0;
  bool committed = false;
  std::string reason;
};
struct AskForLedger {
  int64_t most = 0;  // entries of each group
};
struct PeerLost {
  std::string reason;
};
// To one rank, or with rank -1 to all ranks of the job's epoch on the node.
struct TrainerCommand {
  std::string job_uid;
  int64_t epoch = 0;
  int64_t rank = -1;
  std::variant<CommRecordSet, RunTrainer, SaveTrainer, CommitResult, PeerLost, AskForLedger> frame;
};
struct StopTrainers {
  std::string job_uid;
  int64_t epoch = 0;  // this one and all before
  std::string reason;
  int64_t grace_ms = 0;
};
struct Rejected {
  std::string reason;
};
// A job that is deleted: what nodes keep of it may go.
struct ForgetJob {
  std::string job_uid;
};
// Before a job is accepted: what is at these paths, and would its other needs be served?
struct Look {
  int64_t look_id = 0;
  PathQuery query = {};
  int64_t limit_ms = 0;  // for all paths together
};
struct DownMessage {
  int64_t term = 0;
  int64_t command_id = 0;
  std::variant<Welcome, BeatAck, Launch, TrainerCommand, StopTrainers, Rejected, ForgetJob, Look>
      kind;
};

// The way down to daemons. Thread-safe; a stream that is gone swallows messages.
class FleetLink {
 public:
  virtual ~FleetLink() = default;
  virtual void Send(StreamId stream, DownMessage message) = 0;
  // Ends the stream after what was sent before.
  virtual void Close(StreamId stream) = 0;
  // Monotonic, of the newest message that came in; 0: not known.
  virtual int64_t ArrivalMs(StreamId /*stream*/) { return 0; }
};

}  // namespace ravel::coordinator
