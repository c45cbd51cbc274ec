#pragma once

#include <memory>
#include <string>
#include <vector>

#include <grpcpp/grpcpp.h>

#include "common/mutex.h"
#include "proto/jobs.grpc.pb.h"

namespace ravel::testing {

// A coordinator that answers from what the test puts into it, on a port of its own.
class FakeJobsService final : public v1::Jobs::Service {
 public:
  FakeJobsService();
  ~FakeJobsService() override;
  const std::string& address() const { return address_; }

  // What WatchJob sends one after another, and GetJob, CancelJob answer with (the last).
  std::vector<v1::Job> states;
  std::vector<v1::JobEvent> events;
  std::vector<v1::LogLine> logs;
  std::vector<v1::StepRecord> metrics;
  std::vector<v1::Node> nodes;
  std::vector<v1::Operation> operations;
  std::vector<v1::Checkpoint> checkpoints;
  std::vector<v1::Leftover> leftovers;
  // When not OK, every unary call ends with it (and `detail`); `unavailable_calls` calls before
  // that answer UNAVAILABLE.
  grpc::Status failure;
  v1::ErrorDetail detail;
  int unavailable_calls = 0;
  std::vector<v1::Violation> violations;  // what ValidateJob finds
  int page_size = 1000;                   // of lists, whatever the client asks for
  bool hang_watch = false;                // WatchJob stays open after its last state

  // Of the jobs submitted so far.
  std::vector<std::string> request_ids() {
    const MutexLock lock(mutex_);
    return request_ids_;
  }

  grpc::Status SubmitJob(grpc::ServerContext* context,
                         const v1::SubmitJobRequest* request,
                         v1::SubmitJobResponse* response) override;
  grpc::Status ValidateJob(grpc::ServerContext* context,
                           const v1::ValidateJobRequest* request,
                           v1::ValidateJobResponse* response) override;
  grpc::Status GetJob(grpc::ServerContext* context,
                      const v1::GetJobRequest* request,
                      v1::Job* response) override;
  grpc::Status ListJobs(grpc::ServerContext* context,
                        const v1::ListJobsRequest* request,
                        v1::ListJobsResponse* response) override;
  grpc::Status CancelJob(grpc::ServerContext* context,
                         const v1::CancelJobRequest* request,
                         v1::Job* response) override;
  grpc::Status CheckpointNow(grpc::ServerContext* context,
                             const v1::CheckpointNowRequest* request,
                             v1::Operation* response) override;
  grpc::Status WatchJob(grpc::ServerContext* context,
                        const v1::WatchJobRequest* request,
                        grpc::ServerWriter<v1::Job>* writer) override;
  grpc::Status WatchOperation(grpc::ServerContext* context,
                              const v1::WatchOperationRequest* request,
                              grpc::ServerWriter<v1::Operation>* writer) override;
  grpc::Status StreamEvents(grpc::ServerContext* context,
                            const v1::StreamEventsRequest* request,
                            grpc::ServerWriter<v1::JobEvent>* writer) override;
  grpc::Status StreamLogs(grpc::ServerContext* context,
                          const v1::StreamLogsRequest* request,
                          grpc::ServerWriter<v1::LogLine>* writer) override;
  grpc::Status StreamMetrics(grpc::ServerContext* context,
                             const v1::StreamMetricsRequest* request,
                             grpc::ServerWriter<v1::StepRecord>* writer) override;
  grpc::Status ListNodes(grpc::ServerContext* context,
                         const v1::ListNodesRequest* request,
                         v1::ListNodesResponse* response) override;
  grpc::Status ListCheckpoints(grpc::ServerContext* context,
                               const v1::ListCheckpointsRequest* request,
                               v1::ListCheckpointsResponse* response) override;

 private:
  // The failure that the test asked for.
  grpc::Status Refusal(grpc::ServerContext* context);

  Mutex mutex_;
  int calls_ ABSL_GUARDED_BY(mutex_) = 0;
  std::vector<std::string> request_ids_ ABSL_GUARDED_BY(mutex_);
  std::string address_;
  std::unique_ptr<grpc::Server> server_;
};

}  // namespace ravel::testing
