#include "coordinator/ctl/jobs_client.h"

#include <chrono>
#include <cstdio>
#include <random>
#include <set>
#include <thread>

#include <absl/strings/match.h>
#include <absl/strings/numbers.h>
#include <absl/strings/str_cat.h>
#include <google/protobuf/util/json_util.h>
#include <grpcpp/grpcpp.h>

#include "common/check.h"
#include "common/mutex.h"
#include "coordinator/ctl/interrupt.h"
#include "proto/jobs.grpc.pb.h"

namespace ravel::ctl {
namespace {

constexpr char kDetailUrl[] = "ravel.v1.ErrorDetail";
constexpr char kDetailKey[] = "ravel-error-detail-bin";
constexpr auto kCallTimeout = std::chrono::seconds(30);
constexpr int kTries = 4;
constexpr auto kTryPause = std::chrono::milliseconds(250);

json::Value ToJson(const google::protobuf::Message& message) {
  google::protobuf::util::JsonPrintOptions options;
  options.always_print_primitive_fields = true;
  std::string text;
  CHECK(google::protobuf::util::MessageToJsonString(message, &text, options).ok());
  absl::StatusOr<json::Value> value = json::Parse(text);
  CHECK(value.ok());
  return *std::move(value);
}

JobView ToView(const v1::Job& job) {
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
  view.step = job.step();
  view.total_steps = job.total_steps();
  view.loss = job.loss();
  view.first_loss = job.first_loss();
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
  view.document = ToJson(job);
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
          ToJson(event)};
}

LogView ToView(const v1::LogLine& line) {
  return {line.time_ms(), line.attempt(), line.rank(), line.node(), line.text(), ToJson(line)};
}

MetricView ToView(const v1::StepRecord& record) {
  return {record.step(),
          record.loss(),
          record.grad_norm(),
          record.lr(),
          record.tokens(),
          record.tokens_per_second(),
          record.step_seconds(),
          record.world_size(),
          record.epoch(),
          record.attempt(),
          record.skipped(),
          record.has_validation_loss(),
          record.validation_loss()};
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
          ToJson(node)};
}

CheckpointView ToView(const v1::Checkpoint& checkpoint) {
  return {checkpoint.step(),
          checkpoint.path(),
          checkpoint.state(),
          checkpoint.bytes(),
          checkpoint.files(),
          checkpoint.epoch(),
          checkpoint.world_size(),
          checkpoint.created_ms(),
          checkpoint.pinned(),
          ToJson(checkpoint)};
}

LeftoverView ToView(const v1::Leftover& leftover) {
  return {
      leftover.path(), leftover.kind(), leftover.reason(), leftover.changed_ms(), ToJson(leftover)};
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
          ToJson(operation)};
}

template <typename View, typename Messages>
std::vector<View> ToViews(const Messages& messages) {
  std::vector<View> views;
  for (const auto& message : messages) {
    views.push_back(ToView(message));
  }
  return views;
}

// The host of host:port or [host]:port.
std::string HostOf(const std::string& address) {
  const std::string host = address.substr(0, address.rfind(':'));
  return host.size() > 2 && host.front() == '[' ? host.substr(1, host.size() - 2) : host;
}

class GrpcJobsClient : public JobsClient {
 public:
  explicit GrpcJobsClient(std::string address) : address_(std::move(address)) {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
    arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
    arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS,
                     5000);  // in truth: how long one connect may take
    arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 1000);
    arguments.SetMaxReceiveMessageSize(64 << 20);
    stub_ = v1::Jobs::NewStub(
        grpc::CreateCustomChannel(address_, grpc::InsecureChannelCredentials(), arguments));
  }

  const std::string& address() const override { return address_; }

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
    result.canonical = ToJson(response.canonical());
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

  absl::StatusOr<std::vector<JobView>> List(const std::string& namespace_name,
                                            const std::string& selector) override {
    v1::ListJobsRequest request;
    request.set_namespace_(namespace_name);
    request.set_selector(selector);
    v1::ListJobsResponse response;
    RETURN_IF_ERROR(Call(&v1::Jobs::Stub::ListJobs, request, response));
    return ToViews<JobView>(response.jobs());
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

  absl::StatusOr<JobView> Retry(const JobName& job) override {
    v1::RetryJobRequest request;
    Fill(job, request);
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
    return CheckpointsView{ToViews<CheckpointView>(response.checkpoints()),
                           ToViews<LeftoverView>(response.leftovers()),
                           response.store_problem()};
  }

  absl::StatusOr<std::vector<NodeView>> Nodes() override {
    v1::ListNodesResponse response;
    RETURN_IF_ERROR(Call(&v1::Jobs::Stub::ListNodes, v1::ListNodesRequest(), response));
    return ToViews<NodeView>(response.nodes());
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
                       const Receiver<MetricView>& receiver) override {
    v1::StreamMetricsRequest request;
    Fill(job, request);
    request.set_all(filter.all);
    request.set_follow(filter.follow);
    request.set_from_step(filter.from_step);
    request.set_to_step(filter.to_step);
    request.set_every(filter.every);
    request.set_last(filter.last);
    return Stream<v1::StepRecord, MetricView>(&v1::Jobs::Stub::StreamMetrics, request, 0, receiver);
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
      return absl::UnavailableError(
          absl::StrCat("coordinator ", address_, " cannot be reached: ", status.error_message()));
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

  // One unary call; only Unavailable is tried again, with the same request (and so the same request
  // id).
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
            absl::StrCat("coordinator ", address_, " did not answer within 30s"));
      }
      if (!absl::IsUnavailable(status) || Interrupt::Get().requested()) {
        break;
      }
    }
    return status;
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

  const std::string address_;
  std::unique_ptr<v1::Jobs::Stub> stub_;
  Mutex mutex_;
  bool cancelled_ ABSL_GUARDED_BY(mutex_) = false;
  std::set<grpc::ClientContext*> open_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace

absl::StatusOr<std::unique_ptr<JobsClient>> JobsClient::Connect(const std::string& address) {
  const std::size_t colon = address.rfind(':');
  int port = 0;
  if (colon == std::string::npos || colon == 0 ||
      !absl::SimpleAtoi(address.substr(colon + 1), &port) || port < 1 || port > 65535) {
    return absl::InvalidArgumentError(
        absl::StrCat("--coordinator: expected HOST:PORT, got '", address, "'"));
  }
  const std::string host = HostOf(address);
  if (host != "localhost" && host != "::1" && !absl::StartsWith(host, "127.")) {
    return absl::InvalidArgumentError(
        absl::StrCat("--coordinator: expected a loopback address, because certificates are not "
                     "supported yet, got '",
                     address,
                     "'"));
  }
  return std::make_unique<GrpcJobsClient>(address);
}

bool IsJobState(const std::string& name) {
  v1::JobState state = v1::JOB_STATE_UNSPECIFIED;
  return v1::JobState_Parse(name, &state) && state != v1::JOB_STATE_UNSPECIFIED;
}

std::vector<JobViolation> ViolationsOf(const absl::Status& status) {
  std::vector<JobViolation> violations;
  const absl::optional<absl::Cord> payload = status.GetPayload(kDetailUrl);
  v1::ErrorDetail detail;
  if (payload.has_value() && detail.ParseFromString(std::string(*payload))) {
    for (const v1::Violation& violation : detail.violations()) {
      violations.push_back(FromProto(violation));
    }
  }
  return violations;
}

std::string MakeRequestId() {
  std::random_device random;
  uint32_t words[4] = {random(), random(), random(), random()};
  words[1] = (words[1] & 0xFFFF0FFFu) | 0x4000u;      // version 4
  words[2] = (words[2] & 0x3FFFFFFFu) | 0x80000000u;  // variant 1
  char text[40];
  std::snprintf(text,
                sizeof text,
                "%08x-%04x-%04x-%04x-%04x%08x",
                words[0],
                words[1] >> 16,
                words[1] & 0xFFFFu,
                words[2] >> 16,
                words[2] & 0xFFFFu,
                words[3]);
  return text;
}

}  // namespace ravel::ctl
