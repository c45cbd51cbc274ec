#pragma once

// The coordinator's Jobs service as plain values. Errors: Unavailable names the address; refusals
// carry the violations (ViolationsOf). Thread-safe.

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "common/json.h"
#include "common/status.h"
#include "common/step_record.h"
#include "coordinator/api/job_file_proto.h"
#include "coordinator/ctl/checkpoint_mark.h"
#include "coordinator/ctl/endpoint.h"

namespace ravel::ctl {

struct JobName {
  std::string namespace_name = "default";
  std::string name;
};

// These structs hold what ravelctl itself reads; `document` is the whole message as proto JSON.
struct ConditionView {
  std::string type;
  bool status = false;
  std::string reason;
  std::string message;
  int64_t time_ms = 0;
};

struct GemmPathView {
  std::string gemms;  // "forward"
  std::string path;   // "fp8_tensor"
};

// One axis of the mesh of devices that runs a job.
struct MeshAxisView {
  std::string name;
  int64_t size = 1;
};

struct JobView {
  std::string uid;
  std::string namespace_name;
  std::string name;
  std::string state;
  std::string reason;
  std::string message;
  int64_t epoch = 0;
  int64_t attempt = 0;
  int64_t world_size = 0;
  int64_t step = 0;
  int64_t total_steps = 0;
  double loss = 0;
  double first_loss = 0;
  double tokens_per_second = 0;
  double eta_seconds = -1;
  int64_t committed_step = -1;
  std::string committed_path;
  int64_t restarts = 0;
  int64_t created_ms = 0;
  int64_t started_ms = 0;
  int64_t finished_ms = 0;
  std::string failure_class;
  int64_t failed_saves = 0;
  int64_t skipped_saves = 0;
  std::vector<ConditionView> conditions;
  std::vector<GemmPathView> gemm_paths;  // of quantized matrices
  // Outermost axis first; empty while the job has no devices, or where its spec was not asked for.
  std::vector<MeshAxisView> mesh;
  json::Value document;

  bool terminal() const {
    return state == "SUCCEEDED" || state == "FAILED" || state == "CANCELLED";
  }
};

struct EventView {
  int64_t seq = 0;
  int64_t time_ms = 0;
  int64_t epoch = 0;
  int64_t attempt = 0;
  int64_t step = 0;
  std::string type;
  std::string reason;
  std::string node;
  int64_t rank = -1;
  std::string message;
  json::Value document;
};

struct LogView {
  int64_t time_ms = 0;
  int64_t attempt = 0;
  int64_t rank = 0;
  std::string node;
  std::string text;
  json::Value document;
};

struct NodeView {
  std::string id;
  std::string state;
  int64_t devices = 0;
  int64_t devices_free = 0;
  std::string device_kind;
  std::string device_model;
  std::string address;
  int64_t last_beat_ms = 0;
  std::string message;
  std::string version;
  int64_t penalties = 0;
  std::vector<std::string> networks;
  json::Value document;
};

enum class NodeHold { kDrained, kQuarantined };

struct CheckpointView {
  int64_t step = 0;
  std::string path;
  std::string state;
  int64_t bytes = 0;
  int64_t files = 0;
  int64_t epoch = 0;
  std::string mesh;  // "replicate 2, shard 4"; empty: of an older coordinator
  int64_t created_ms = 0;
  bool pinned = false;
  int64_t world_size = 0;
  std::string save_id;
  json::Value document;
};

struct LeftoverView {
  std::string path;
  std::string kind;
  std::string reason;
  int64_t changed_ms = 0;  // 0: not known
  json::Value document;
};

// A job's steps, and what else lies in its folder.
struct CheckpointsView {
  std::vector<CheckpointView> checkpoints;
  std::vector<LeftoverView> leftovers;
  std::string store_problem;  // why the folder could not be looked at
};

struct OperationView {
  std::string id;
  std::string state;  // ACCEPTED, WRITING, SEALED, COMMITTED, OPERATION_FAILED
  std::string reason;
  int64_t step = 0;
  json::Value document;

  bool done() const { return state == "COMMITTED" || state == "OPERATION_FAILED"; }
};

struct LagView {
  double p50_ms = 0;
  double p99_ms = 0;
  double max_ms = 0;
  double longest_turn_ms = 0;
  std::string longest_turn;
};

struct ServerView {
  std::string version;
  std::string cluster_id;
  int64_t term = 0;
  bool insecure = false;
  LagView lag;  // of the coordinator's deciding thread, in the last minutes
  int64_t lag_alarms = 0;
};

struct SubmitResult {
  JobView job;
  std::vector<std::string> warnings;
};

struct ValidateResult {
  json::Value canonical;
  std::vector<JobViolation> violations;
  std::vector<std::string> warnings;
};

struct EventFilter {
  int64_t after_seq = 0;
  bool follow = false;
  int64_t since_ms = 0;  // wall time; 0: all
};

struct LogFilter {
  int64_t rank = -1;    // -1: all
  int64_t attempt = 0;  // 0: all
  bool follow = false;
  int64_t tail = 0;      // 0: all
  int64_t since_ms = 0;  // wall time; 0: all
};

struct MetricsFilter {
  bool all = false;  // also steps that a restart replaced
  bool follow = false;
  int64_t from_step = 0;  // 0: no bound
  int64_t to_step = 0;
  int64_t every = 1;
  int64_t last = 0;  // 0: all
};

// Selects jobs, and how much of each is sent.
struct JobQuery {
  std::string namespace_name = "default";  // "*": all
  std::string selector;                    // key=value,...
  std::vector<std::string> states;         // such as RUNNING; none: all
  bool documents = false;                  // also JobView::document, with the spec
};

// Receives one message of a stream; false ends the stream.
template <typename View>
using Receiver = std::function<bool(const View&)>;

class JobsClient {
 public:
  // InvalidArgument: plaintext to another address than loopback.
  static absl::StatusOr<std::unique_ptr<JobsClient>> Connect(const Endpoint& endpoint);
  virtual ~JobsClient() = default;
  virtual const Endpoint& endpoint() const = 0;

  virtual absl::StatusOr<SubmitResult> Submit(const v1::TrainingJob& job,
                                              const std::string& request_id,
                                              bool dry_run) = 0;
  virtual absl::StatusOr<ValidateResult> Validate(const v1::TrainingJob& job) = 0;
  virtual absl::StatusOr<JobView> Get(const JobName& job) = 0;
  // All pages, one after the other.
  virtual absl::StatusOr<std::vector<JobView>> List(const JobQuery& query) = 0;
  virtual absl::StatusOr<JobView> Cancel(const JobName& job, const std::string& reason) = 0;
  virtual absl::StatusOr<JobView> Delete(const JobName& job,
                                         bool force,
                                         bool checkpoints,
                                         const std::string& reason) = 0;
  virtual absl::Status ForgetNode(const std::string& node) = 0;
  // `tensor`: parallelism.tensor from then on; 0: as it is.
  virtual absl::StatusOr<JobView> Retry(const JobName& job,
                                        bool allow_numerics_change,
                                        int64_t tensor) = 0;
  // `deadline_ms`: when the coordinator gives up; 0: its default.
  virtual absl::StatusOr<OperationView> CheckpointNow(const JobName& job, int64_t deadline_ms) = 0;
  virtual absl::StatusOr<CheckpointsView> Checkpoints(const JobName& job) = 0;
  virtual absl::StatusOr<JobView> Rollback(const JobName& job,
                                           int64_t step,
                                           const std::string& reason) = 0;
  virtual absl::Status MarkCheckpoint(const JobName& job,
                                      int64_t step,
                                      CheckpointMark mark,
                                      const std::string& reason) = 0;
  virtual absl::StatusOr<std::vector<NodeView>> Nodes() = 0;
  // Drains or quarantines a node, or lifts that.
  virtual absl::StatusOr<NodeView> HoldNode(const std::string& node,
                                            NodeHold hold,
                                            bool lift,
                                            const std::string& reason) = 0;
  virtual absl::StatusOr<ServerView> Server() = 0;

  // Streams end with OK when the server ends them or the receiver has enough, Cancelled on Ctrl-C,
  // DeadlineExceeded after timeout_ms (0: none).
  virtual absl::Status Watch(const JobName& job,
                             int64_t timeout_ms,
                             const Receiver<JobView>& receiver) = 0;
  virtual absl::Status WatchOperation(const std::string& id,
                                      int64_t timeout_ms,
                                      const Receiver<OperationView>& receiver) = 0;
  virtual absl::Status Events(const JobName& job,
                              const EventFilter& filter,
                              const Receiver<EventView>& receiver) = 0;
  virtual absl::Status Logs(const JobName& job,
                            const LogFilter& filter,
                            const Receiver<LogView>& receiver) = 0;
  virtual absl::Status Metrics(const JobName& job,
                               const MetricsFilter& filter,
                               const Receiver<StepRecord>& receiver) = 0;
  // Ends every stream of this client that is open now, with Cancelled.
  virtual void CancelStreams() = 0;
};

// Returns true for the name of a state, such as RUNNING.
bool IsJobState(const std::string& name);
// The states that are not terminal.
std::vector<std::string> ActiveStates();

// The violations that came with a refusal; empty when there are none.
std::vector<JobViolation> ViolationsOf(const absl::Status& status);

// Number of further violations that the refusal does not carry.
int64_t MoreViolationsOf(const absl::Status& status);

}  // namespace ravel::ctl
