// Calls of the coordinator as plain values, with the whole message as a document beside them. A
// call is tried again with the same request, and so the same request id: a change happens once.
#include "coordinator/ctl/jobs_client.h"

#include <algorithm>
#include <chrono>
#include <set>
#include <thread>

#include <absl/strings/str_cat.h>
#include <grpcpp/grpcpp.h>

#include "common/check.h"
#include "common/mutex.h"
#include "coordinator/ctl/channel_client.h"
#include "coordinator/ctl/document_proto.h"
#include "coordinator/ctl/interrupt.h"
#include "coordinator/ctl/request_id.h"
#include "coordinator/ctl/step_view_proto.h"
#include "proto/jobs.grpc.pb.h"

namespace ravel::ctl {
namespace {

using ctl::ToView;  // beside those below

constexpr char kDetailUrl[] = "ravel.v1.ErrorDetail";
constexpr char kDetailKey[] = "ravel-error-detail-bin";
constexpr auto kCallTimeout = std::chrono::seconds(30);
constexpr int kTries = 4;
constexpr auto kTryPause = std::chrono::milliseconds(250);

// The axes that the planner makes of the job's devices: `replicate` and `tensor` where they are
// more than one, and `shard` always.
std::vector<MeshAxisView> MeshOf(const v1::Job& job) {
  const int64_t replicas = std::max<int64_t>(1, job.spec().parallelism().replicas());
  const int64_t tensor = std::max<int64_t>(1, job.spec().parallelism().tensor());
  if (!job.has_spec() || job.world_size() < 1 || job.world_size() % replicas != 0 ||
      job.world_size() / replicas % tensor != 0) {
    return {};
  }
  std::vector<MeshAxisView> axes = {
      {.name = "shard", .size = job.world_size() / replicas / tensor}};
  if (replicas > 1) {
    axes.insert(axes.begin(), {.name = "replicate", .size = replicas});
  }
  if (tensor > 1) {
    axes.push_back({.name = "tensor", .size = tensor});
  }
  return axes;
}

// Without the document, which costs more than all the rest.
JobView ToPlainView(const v1::Job& job) {
  JobView view;
  view.uid = job.uid();
  view.namespace_name = job.metadata().namespace_();
  view.name = job.metadata().name();
  view.state = v1::JobState_Name(job.state());
  view.reason = job.reason();
  view.message = job.message();
  view.epoch = job.epoch();
  view.attempt = job.attempt();
  view.world_size = job.world_size();
  view.mesh = MeshOf(job);
  view.step = job.step();
  view.total_steps = job.total_steps();
  view.loss = job.loss();
  view.first_loss = job.first_loss();
  for (const v1::GemmPath& path : job.gemm_paths()) {
    view.gemm_paths.push_back({.gemms = path.gemms(), .path = path.path()});
  }
  view.tokens_per_second = job.tokens_per_second();
  view.eta_seconds = job.eta_seconds();
  view.committed_step = job.committed_step();
  view.committed_path = job.committed_path();
  view.restarts = job.restarts();
  view.created_ms = job.created_ms();
  view.started_ms = job.started_ms();
  view.finished_ms = job.finished_ms();
  view.failure_class = job.failure_class();
  view.failed_saves = job.failed_saves();
  view.skipped_saves = job.skipped_saves();
  for (const v1::JobCondition& condition : job.conditions()) {
    view.conditions.push_back({condition.type(),
                               condition.status(),
                               condition.reason(),
                               condition.message(),
                               condition.time_ms()});
  }
  return view;
}

JobView ToView(const v1::Job& job) {
  JobView view = ToPlainView(job);
  view.document = JobDocument(job);
  return view;
}

EventView ToView(const v1::JobEvent& event) {
  return {event.seq(),
          event.time_ms(),
          event.epoch(),
          event.attempt(),
          event.step(),
          event.type(),
          event.reason(),
          event.node(),
          event.rank(),
          event.message(),
          ToDocument(event)};
}

LogView ToView(const v1::LogLine& line) {
  return {line.time_ms(), line.attempt(), line.rank(), line.node(), line.text(), ToDocument(line)};
}

NodeView ToView(const v1::Node& node) {
  return {node.id(),
          node.state(),
          node.devices(),
          node.devices_free(),
          node.device_kind(),
          node.device_model(),
          node.address(),
          node.last_beat_ms(),
          node.message(),
          node.version(),
          node.penalties(),
          {node.networks().begin(), node.networks().end()},
          ToDocument(node)};
}

CheckpointView ToView(const v1::Checkpoint& checkpoint) {
  return {checkpoint.step(),
          checkpoint.path(),
          checkpoint.state(),
          checkpoint.bytes(),
          checkpoint.files(),
          checkpoint.epoch(),
          checkpoint.mesh(),
          checkpoint.created_ms(),
          checkpoint.pinned(),
          checkpoint.world_size(),
          checkpoint.save_id(),
          ToDocument(checkpoint)};
}

LeftoverView ToView(const v1::Leftover& leftover) {
  return {leftover.path(),
          leftover.kind(),
          leftover.reason(),
          leftover.changed_ms(),
          ToDocument(leftover)};
}

v1::MarkCheckpointRequest::Change ToProto(CheckpointMark mark) {
  switch (mark) {
    case CheckpointMark::kPin:
      return v1::MarkCheckpointRequest::PIN;
    case CheckpointMark::kUnpin:
      return v1::MarkCheckpointRequest::UNPIN;
    case CheckpointMark::kUnmarkBad:
      return v1::MarkCheckpointRequest::UNMARK_BAD;
  }
  return v1::MarkCheckpointRequest::CHANGE_UNSPECIFIED;
}

OperationView ToView(const v1::Operation& operation) {
  return {operation.id(),
          v1::Operation::State_Name(operation.state()),
          operation.reason(),
          operation.step(),
          ToDocument(operation)};
}

template <typename Messages, typename View>
void AddViews(const Messages& messages, std::vector<View>& views) {
  for (const auto& message : messages) {
    views.push_back(ToView(message));
  }
}

v1::ErrorDetail DetailOf(const absl::Status& status) {
  v1::ErrorDetail detail;
  const absl::optional<absl::Cord> payload = status.GetPayload(kDetailUrl);
  if (payload.has_value()) {
    detail.ParseFromString(std::string(*payload));
  }
  return detail;
}

class GrpcJobsClient : public JobsClient {
 public:
  GrpcJobsClient(Endpoint endpoint, const std::shared_ptr<grpc::Channel>& channel)
      : endpoint_(std::move(endpoint)), stub_(v1::Jobs::NewStub(channel)) {}

  const Endpoint& endpoint() const override { return endpoint_; }

  absl::StatusOr<SubmitResult> Submit(const v1::TrainingJob& job,
                                      const std::string& request_id,
                                      bool dry_run) override {
    v1::SubmitJobRequest request;
    request.set_request_id(request_id);
    *request.mutable_job() = job;
    request.set_dry_run(dry_run);
    v1::SubmitJobResponse response;
    RETURN_IF_ERROR(Call(&v1::Jobs::Stub::SubmitJob, request, response));
    return SubmitResult{ToView(response.job()),
                        {response.warnings().begin(), response.warnings().end()}};
  }

  absl::StatusOr<ValidateResult> Validate(const v1::TrainingJob& job) override {
    v1::ValidateJobRequest request;
    *request.mutable_job() = job;
    v1::ValidateJobResponse response;
    RETURN_IF_ERROR(Call(&v1::Jobs::Stub::ValidateJob, request, response));
    ValidateResult result;
    result.canonical = ToDocument(response.canonical());
    for (const v1::Violation& violation : response.violations()) {
      result.violations.push_back(FromProto(violation));
    }
    result.warnings.assign(response.warnings().begin(), response.warnings().end());
    return result;
  }

  absl::StatusOr<JobView> Get(const JobName& job) override {
    v1::GetJobRequest request;
    Fill(job, request);
    v1::Job response;
    RETURN_IF_ERROR(Call(&v1::Jobs::Stub::GetJob, request, response));
    return ToView(response);
  }

  absl::StatusOr<std::vector<JobView>> List(const JobQuery& query) override {
    v1::ListJobsRequest request;
    request.set_namespace_(query.namespace_name);
    request.set_selector(query.selector);
    request.set_with_spec(query.documents);
    for (const std::string& name : query.states) {
      v1::JobState state = v1::JOB_STATE_UNSPECIFIED;
      v1::JobState_Parse(name, &state);
      request.add_states(state);
    }
    std::vector<JobView> views;
    RETURN_IF_ERROR(Pages<v1::ListJobsResponse>(
        &v1::Jobs::Stub::ListJobs, request, [&](const v1::ListJobsResponse& page) {
          for (const v1::Job& job : page.jobs()) {
            views.push_back(query.documents ? ToView(job) : ToPlainView(job));
          }
        }));
    return views;
  }

  absl::StatusOr<JobView> Cancel(const JobName& job, const std::string& reason) override {
    v1::CancelJobRequest request;
    Fill(job, request);
    request.set_request_id(MakeRequestId());
    request.set_reason(reason);
    v1::Job response;
    RETURN_IF_ERROR(Call(&v1::Jobs::Stub::CancelJob, request, response));
    return ToView(response);
  }

  absl::StatusOr<JobView> Delete(const JobName& job,
                                 bool force,
                                 bool checkpoints,
                                 const std::string& reason) override {
    v1::DeleteJobRequest request;
    Fill(job, request);
    request.set_request_id(MakeRequestId());
    request.set_force(force);
    request.set_checkpoints(checkpoints);
    request.set_reason(reason);
    v1::DeleteJobResponse response;
    RETURN_IF_ERROR(Call(&v1::Jobs::Stub::DeleteJob, request, response));
    return ToView(response.job());
  }

  absl::StatusOr<JobView> Retry(const JobName& job,
                                bool allow_numerics_change,
                                int64_t tensor) override {
    v1::RetryJobRequest request;
    Fill(job, request);
    request.set_allow_numerics_change(allow_numerics_change);
    request.set_tensor(tensor);
    request.set_request_id(MakeRequestId());
    v1::Job response;
    RETURN_IF_ERROR(Call(&v1::Jobs::Stub::RetryJob, request, response));
    return ToView(response);
  }

  absl::StatusOr<OperationView> CheckpointNow(const JobName& job, int64_t deadline_ms) override {
    v1::CheckpointNowRequest request;
    Fill(job, request);
    request.set_deadline_ms(deadline_ms);
    request.set_request_id(MakeRequestId());
    v1::Operation response;
    RETURN_IF_ERROR(Call(&v1::Jobs::Stub::CheckpointNow, request, response));
    return ToView(response);
  }

  absl::StatusOr<JobView> Rollback(const JobName& job,
                                   int64_t step,
                                   const std::string& reason) override {
    v1::RollbackJobRequest request;
    Fill(job, request);
    request.set_request_id(MakeRequestId());
    request.set_step(step);
    request.set_reason(reason);
    v1::Job response;
    RETURN_IF_ERROR(Call(&v1::Jobs::Stub::RollbackJob, request, response));
    return ToView(response);
  }

  absl::Status MarkCheckpoint(const JobName& job,
                              int64_t step,
                              CheckpointMark mark,
                              const std::string& reason) override {
    v1::MarkCheckpointRequest request;
    Fill(job, request);
    request.set_request_id(MakeRequestId());
    request.set_step(step);
    request.set_change(ToProto(mark));
    request.set_reason(reason);
    v1::MarkCheckpointResponse response;
    return Call(&v1::Jobs::Stub::MarkCheckpoint, request, response);
  }

  absl::StatusOr<CheckpointsView> Checkpoints(const JobName& job) override {
    v1::ListCheckpointsRequest request;
    Fill(job, request);
    v1::ListCheckpointsResponse response;
    RETURN_IF_ERROR(Call(&v1::Jobs::Stub::ListCheckpoints, request, response));
    CheckpointsView views;
    AddViews(response.checkpoints(), views.checkpoints);
    AddViews(response.leftovers(), views.leftovers);
    views.store_problem = response.store_problem();
    return views;
  }

  absl::StatusOr<std::vector<NodeView>> Nodes() override {
    v1::ListNodesRequest request;
    std::vector<NodeView> views;
    RETURN_IF_ERROR(Pages<v1::ListNodesResponse>(
        &v1::Jobs::Stub::ListNodes, request, [&](const v1::ListNodesResponse& page) {
          AddViews(page.nodes(), views);
        }));
    return views;
  }

  absl::Status ForgetNode(const std::string& node) override {
    v1::ForgetNodeRequest request;
    request.set_node(node);
    v1::ForgetNodeResponse response;
    return Call(&v1::Jobs::Stub::ForgetNode, request, response);
  }

  absl::StatusOr<NodeView> HoldNode(const std::string& node,
                                    NodeHold hold,
                                    bool lift,
                                    const std::string& reason) override {
    v1::HoldNodeRequest request;
    request.set_request_id(MakeRequestId());
    request.set_node(node);
    request.set_hold(hold == NodeHold::kDrained ? v1::HoldNodeRequest::DRAINED
                                                : v1::HoldNodeRequest::QUARANTINED);
    request.set_lift(lift);
    request.set_reason(reason);
    v1::Node response;
    RETURN_IF_ERROR(Call(&v1::Jobs::Stub::HoldNode, request, response));
    return ToView(response);
  }

  absl::StatusOr<ServerView> Server() override {
    v1::ServerInfoResponse response;
    RETURN_IF_ERROR(Call(&v1::Jobs::Stub::ServerInfo, v1::ServerInfoRequest(), response));
    const v1::StrandLag& lag = response.lag_recent();
    return ServerView{
        response.version(),
        response.cluster_id(),
        response.term(),
        response.insecure(),
        {lag.p50_ms(), lag.p99_ms(), lag.max_ms(), lag.longest_turn_ms(), lag.longest_turn()},
        response.lag_alarms()};
  }

  absl::Status Watch(const JobName& job,
                     int64_t timeout_ms,
                     const Receiver<JobView>& receiver) override {
    v1::WatchJobRequest request;
    Fill(job, request);
    return Stream<v1::Job, JobView>(&v1::Jobs::Stub::WatchJob, request, timeout_ms, receiver);
  }

  absl::Status WatchOperation(const std::string& id,
                              int64_t timeout_ms,
                              const Receiver<OperationView>& receiver) override {
    v1::WatchOperationRequest request;
    request.set_id(id);
    return Stream<v1::Operation, OperationView>(
        &v1::Jobs::Stub::WatchOperation, request, timeout_ms, receiver);
  }

  absl::Status Events(const JobName& job,
                      const EventFilter& filter,
                      const Receiver<EventView>& receiver) override {
    v1::StreamEventsRequest request;
    Fill(job, request);
    request.set_after_seq(filter.after_seq);
    request.set_follow(filter.follow);
    request.set_since_ms(filter.since_ms);
    return Stream<v1::JobEvent, EventView>(&v1::Jobs::Stub::StreamEvents, request, 0, receiver);
  }

  absl::Status Logs(const JobName& job,
                    const LogFilter& filter,
                    const Receiver<LogView>& receiver) override {
    v1::StreamLogsRequest request;
    Fill(job, request);
    request.set_rank(filter.rank);
    request.set_attempt(filter.attempt);
    request.set_follow(filter.follow);
    request.set_tail(filter.tail);
    request.set_since_ms(filter.since_ms);
    return Stream<v1::LogLine, LogView>(&v1::Jobs::Stub::StreamLogs, request, 0, receiver);
  }

  absl::Status Metrics(const JobName& job,
                       const MetricsFilter& filter,
                       const Receiver<StepRecord>& receiver) override {
    v1::StreamMetricsRequest request;
    Fill(job, request);
    request.set_all(filter.all);
    request.set_follow(filter.follow);
    request.set_from_step(filter.from_step);
    request.set_to_step(filter.to_step);
    request.set_every(filter.every);
    request.set_last(filter.last);
    return Stream<v1::StepRecord, StepRecord>(&v1::Jobs::Stub::StreamMetrics, request, 0, receiver);
  }

  void CancelStreams() override {
    MutexLock lock(mutex_);
    cancelled_ = true;
    for (grpc::ClientContext* const context : open_) {
      context->TryCancel();
    }
  }

 private:
  template <typename Request>
  static void Fill(const JobName& job, Request& request) {
    request.set_namespace_(job.namespace_name);
    request.set_name(job.name);
  }

  absl::Status FromGrpc(const grpc::Status& status, const grpc::ClientContext& context) const {
    if (status.ok()) {
      return absl::OkStatus();
    }
    if (status.error_code() == grpc::StatusCode::UNAVAILABLE) {
      return ExplainTransport(endpoint_, status.error_message());
    }
    if (status.error_code() == grpc::StatusCode::UNIMPLEMENTED) {
      return ExplainUnknownCall(endpoint_);
    }
    absl::Status out(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
    const auto& trailing = context.GetServerTrailingMetadata();
    const auto found = trailing.find(kDetailKey);
    if (found != trailing.end()) {
      out.SetPayload(kDetailUrl,
                     absl::Cord(absl::string_view(found->second.data(), found->second.size())));
    }
    return out;
  }

  // One unary call; only Unavailable is tried again.
  template <typename Method, typename Request, typename Response>
  absl::Status Call(Method method, const Request& request, Response& response) {
    absl::Status status;
    for (int attempt = 0; attempt < kTries; ++attempt) {
      if (attempt > 0) {
        std::this_thread::sleep_for(kTryPause);
      }
      grpc::ClientContext context;
      context.set_deadline(std::chrono::system_clock::now() + kCallTimeout);
      const Interrupt::Scope on_interrupt([&context] { context.TryCancel(); });
      status = FromGrpc((stub_.get()->*method)(&context, request, &response), context);
      if (status.code() == absl::StatusCode::kDeadlineExceeded) {
        return absl::DeadlineExceededError(
            absl::StrCat("coordinator ", endpoint_.address, " did not answer within 30s"));
      }
      if (!absl::IsUnavailable(status) || Interrupt::Get().requested()) {
        break;
      }
    }
    return status;
  }

  template <typename Response, typename Method, typename Request, typename Add>
  absl::Status Pages(Method method, Request& request, const Add& add) {
    Response page;
    do {
      page.Clear();
      RETURN_IF_ERROR(Call(method, request, page));
      add(page);
      request.set_page_token(page.next_page_token());
    } while (!page.next_page_token().empty());
    return absl::OkStatus();
  }

  template <typename Message, typename View, typename Method, typename Request>
  absl::Status Stream(Method method,
                      const Request& request,
                      int64_t timeout_ms,
                      const Receiver<View>& receiver) {
    grpc::ClientContext context;
    if (timeout_ms > 0) {
      context.set_deadline(std::chrono::system_clock::now() +
                           std::chrono::milliseconds(timeout_ms));
    }
    {
      MutexLock lock(mutex_);
      if (cancelled_) {
        return absl::CancelledError("interrupted");
      }
      open_.insert(&context);
    }
    absl::Status status;
    {
      const Interrupt::Scope on_interrupt([&context] { context.TryCancel(); });
      const auto reader = (stub_.get()->*method)(&context, request);
      Message message;
      bool enough = false;
      while (!enough && reader->Read(&message)) {
        enough = !receiver(ToView(message));
      }
      if (enough) {
        context.TryCancel();
      }
      const grpc::Status finished = reader->Finish();
      status = enough ? absl::OkStatus() : FromGrpc(finished, context);
    }
    MutexLock lock(mutex_);
    open_.erase(&context);
    return status;
  }

  const Endpoint endpoint_;
  const std::unique_ptr<v1::Jobs::Stub> stub_;
  Mutex mutex_;
  bool cancelled_ ABSL_GUARDED_BY(mutex_) = false;
  std::set<grpc::ClientContext*> open_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace

absl::StatusOr<std::unique_ptr<JobsClient>> JobsClient::Connect(const Endpoint& endpoint) {
  ASSIGN_OR_RETURN(const std::shared_ptr<grpc::Channel> channel, OpenChannel(endpoint));
  return std::make_unique<GrpcJobsClient>(endpoint, channel);
}

bool IsJobState(const std::string& name) {
  v1::JobState state = v1::JOB_STATE_UNSPECIFIED;
  return v1::JobState_Parse(name, &state) && state != v1::JOB_STATE_UNSPECIFIED;
}

std::vector<std::string> ActiveStates() {
  std::vector<std::string> names;
  for (int state = v1::JobState_MIN; state <= v1::JobState_MAX; ++state) {
    if (v1::JobState_IsValid(state) && state != v1::JOB_STATE_UNSPECIFIED &&
        state != v1::SUCCEEDED && state != v1::FAILED && state != v1::CANCELLED) {
      names.push_back(v1::JobState_Name(static_cast<v1::JobState>(state)));
    }
  }
  return names;
}

std::vector<JobViolation> ViolationsOf(const absl::Status& status) {
  const v1::ErrorDetail detail = DetailOf(status);
  std::vector<JobViolation> violations;
  for (const v1::Violation& violation : detail.violations()) {
    violations.push_back(FromProto(violation));
  }
  return violations;
}

int64_t MoreViolationsOf(const absl::Status& status) {
  return DetailOf(status).more();
}

}  // namespace ravel::ctl
