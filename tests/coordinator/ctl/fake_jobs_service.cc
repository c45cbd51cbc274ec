#include "tests/coordinator/ctl/fake_jobs_service.h"

#include <algorithm>

#include "common/check.h"
#include "tests/testing/eventually.h"

namespace ravel::testing {

FakeJobsService::FakeJobsService() {
  grpc::ServerBuilder builder;
  int port = 0;
  builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
  builder.RegisterService(this);
  server_ = builder.BuildAndStart();
  CHECK(server_ != nullptr && port > 0);
  address_ = "127.0.0.1:" + std::to_string(port);
}

FakeJobsService::~FakeJobsService() {
  server_->Shutdown(std::chrono::system_clock::now());
  server_->Wait();
}

grpc::Status FakeJobsService::Refusal(grpc::ServerContext* context) {
  MutexLock lock(mutex_);
  if (calls_++ < unavailable_calls) {
    return {grpc::StatusCode::UNAVAILABLE, "starting"};
  }
  if (!failure.ok() && detail.violations_size() > 0) {
    context->AddTrailingMetadata("ravel-error-detail-bin", detail.SerializeAsString());
  }
  return failure;
}

grpc::Status FakeJobsService::SubmitJob(grpc::ServerContext* context,
                                        const v1::SubmitJobRequest* request,
                                        v1::SubmitJobResponse* response) {
  {
    MutexLock lock(mutex_);
    request_ids_.push_back(request->request_id());
  }
  const grpc::Status refusal = Refusal(context);
  if (refusal.ok()) {
    *response->mutable_job()->mutable_metadata() = request->job().metadata();
    response->mutable_job()->mutable_metadata()->set_namespace_("default");
    response->mutable_job()->set_state(v1::QUEUED);
    response->mutable_job()->set_uid("uid-1");
  }
  return refusal;
}

grpc::Status FakeJobsService::GetJob(grpc::ServerContext* context,
                                     const v1::GetJobRequest*,
                                     v1::Job* response) {
  const grpc::Status refusal = Refusal(context);
  if (refusal.ok()) {
    *response = states.back();
  }
  return refusal;
}

grpc::Status FakeJobsService::ListJobs(grpc::ServerContext* context,
                                       const v1::ListJobsRequest* request,
                                       v1::ListJobsResponse* response) {
  const size_t first = request->page_token().empty() ? 0 : std::stoul(request->page_token());
  for (size_t i = first; i < states.size(); ++i) {
    if (response->jobs_size() == page_size) {
      response->set_next_page_token(std::to_string(i));
      break;
    }
    const bool wanted =
        request->states().empty() ||
        std::find(request->states().begin(), request->states().end(), states[i].state()) !=
            request->states().end();
    if (wanted) {
      *response->add_jobs() = states[i];
    }
  }
  return Refusal(context);
}

grpc::Status FakeJobsService::CancelJob(grpc::ServerContext* context,
                                        const v1::CancelJobRequest*,
                                        v1::Job* response) {
  const grpc::Status refusal = Refusal(context);
  if (refusal.ok()) {
    *response = states.back();
  }
  return refusal;
}

grpc::Status FakeJobsService::CheckpointNow(grpc::ServerContext* context,
                                            const v1::CheckpointNowRequest*,
                                            v1::Operation* response) {
  const grpc::Status refusal = Refusal(context);
  if (refusal.ok()) {
    *response = operations.front();
  }
  return refusal;
}

grpc::Status FakeJobsService::WatchJob(grpc::ServerContext* context,
                                       const v1::WatchJobRequest*,
                                       grpc::ServerWriter<v1::Job>* writer) {
  if (!failure.ok()) {
    return Refusal(context);
  }
  for (const v1::Job& job : states) {
    writer->Write(job);
  }
  if (hang_watch) {
    Eventually(std::chrono::seconds(30), [&] { return context->IsCancelled(); });
  }
  return grpc::Status::OK;
}

grpc::Status FakeJobsService::WatchOperation(grpc::ServerContext*,
                                             const v1::WatchOperationRequest*,
                                             grpc::ServerWriter<v1::Operation>* writer) {
  for (const v1::Operation& operation : operations) {
    writer->Write(operation);
  }
  return grpc::Status::OK;
}

grpc::Status FakeJobsService::ValidateJob(grpc::ServerContext*,
                                          const v1::ValidateJobRequest*,
                                          v1::ValidateJobResponse* response) {
  for (const v1::Violation& violation : violations) {
    *response->add_violations() = violation;
  }
  return grpc::Status::OK;
}

grpc::Status FakeJobsService::StreamEvents(grpc::ServerContext*,
                                           const v1::StreamEventsRequest* request,
                                           grpc::ServerWriter<v1::JobEvent>* writer) {
  for (const v1::JobEvent& event : events) {
    if (event.seq() > request->after_seq()) {
      writer->Write(event);
    }
  }
  return grpc::Status::OK;
}

grpc::Status FakeJobsService::StreamLogs(grpc::ServerContext*,
                                         const v1::StreamLogsRequest* request,
                                         grpc::ServerWriter<v1::LogLine>* writer) {
  for (const v1::LogLine& line : logs) {
    if (request->rank() < 0 || request->rank() == line.rank()) {
      writer->Write(line);
    }
  }
  return grpc::Status::OK;
}

grpc::Status FakeJobsService::StreamMetrics(grpc::ServerContext*,
                                            const v1::StreamMetricsRequest*,
                                            grpc::ServerWriter<v1::StepRecord>* writer) {
  for (const v1::StepRecord& record : metrics) {
    writer->Write(record);
  }
  return grpc::Status::OK;
}

grpc::Status FakeJobsService::ListNodes(grpc::ServerContext* context,
                                        const v1::ListNodesRequest*,
                                        v1::ListNodesResponse* response) {
  for (const v1::Node& node : nodes) {
    *response->add_nodes() = node;
  }
  return Refusal(context);
}

grpc::Status FakeJobsService::ListCheckpoints(grpc::ServerContext* context,
                                              const v1::ListCheckpointsRequest*,
                                              v1::ListCheckpointsResponse* response) {
  for (const v1::Checkpoint& checkpoint : checkpoints) {
    *response->add_checkpoints() = checkpoint;
  }
  for (const v1::Leftover& leftover : leftovers) {
    *response->add_leftovers() = leftover;
  }
  return Refusal(context);
}

}  // namespace ravel::testing
