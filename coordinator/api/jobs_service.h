#pragma once

// proto/jobs.proto: validates, posts to the strand, answers. Validation and planning run on the
// pool for planning, reading of files and events on the one for files. No decisions here.

#include <functional>
#include <memory>
#include <string>

#include "coordinator/api/job_file_proto.h"
#include "coordinator/api/job_looks_proto.h"
#include "coordinator/api/request_checks_service.h"
#include "coordinator/jobs/executor.h"
#include "coordinator/jobs/job_controller.h"
#include "coordinator/jobs/memory_fit.h"
#include "coordinator/jobs/planner.h"
#include "coordinator/jobs/strand_lag.h"
#include "coordinator/jobs/work_pools.h"
#include "coordinator/saves/checkpoint_keeper.h"
#include "coordinator/store/bell.h"
#include "coordinator/store/metrics_history.h"
#include "proto/jobs.grpc.pb.h"

namespace ravel::coordinator {

struct JobsServiceParts {
  Executor* strand = nullptr;
  WorkPools* pools = nullptr;
  Executor* files = nullptr;  // the thread that writes metrics and logs
  MetricsHistory* history = nullptr;
  Bell* growth = nullptr;  // rung when a job's metrics or logs have grown
  const LagMeter* lag = nullptr;
  JobController* controller = nullptr;
  Planner* planner = nullptr;
  CheckpointKeeper* keeper = nullptr;
  std::string version;
  bool insecure = false;
  const AccessRegistry* access = nullptr;  // null: plaintext, one local user
  JobLookLimits look_limits = {};
  const NamespaceRootsFile* roots = nullptr;  // null: jobs may name any path
};

// Thread-safe.
class JobsService : public v1::Jobs::CallbackService {
 public:
  explicit JobsService(JobsServiceParts parts)
      : parts_(std::move(parts)),
        looks_(parts_.strand, parts_.controller, parts_.look_limits, parts_.roots) {}

  template <typename Request>
  using Stream = grpc::ServerWriteReactor<Request>;
  using Unary = grpc::ServerUnaryReactor;
  using Context = grpc::CallbackServerContext;

  Unary* SubmitJob(Context* context,
                   const v1::SubmitJobRequest* request,
                   v1::SubmitJobResponse* response) override;
  Unary* ValidateJob(Context* context,
                     const v1::ValidateJobRequest* request,
                     v1::ValidateJobResponse* response) override;
  Unary* GetJob(Context* context, const v1::GetJobRequest* request, v1::Job* response) override;
  Unary* ListJobs(Context* context,
                  const v1::ListJobsRequest* request,
                  v1::ListJobsResponse* response) override;
  Unary* CancelJob(Context* context,
                   const v1::CancelJobRequest* request,
                   v1::Job* response) override;
  Unary* RetryJob(Context* context, const v1::RetryJobRequest* request, v1::Job* response) override;
  Unary* DeleteJob(Context* context,
                   const v1::DeleteJobRequest* request,
                   v1::DeleteJobResponse* response) override;
  Unary* CheckpointNow(Context* context,
                       const v1::CheckpointNowRequest* request,
                       v1::Operation* response) override;
  Unary* ListCheckpoints(Context* context,
                         const v1::ListCheckpointsRequest* request,
                         v1::ListCheckpointsResponse* response) override;
  Unary* RollbackJob(Context* context,
                     const v1::RollbackJobRequest* request,
                     v1::Job* response) override;
  Unary* MarkCheckpoint(Context* context,
                        const v1::MarkCheckpointRequest* request,
                        v1::MarkCheckpointResponse* response) override;
  Unary* ListNodes(Context* context,
                   const v1::ListNodesRequest* request,
                   v1::ListNodesResponse* response) override;
  Unary* HoldNode(Context* context,
                  const v1::HoldNodeRequest* request,
                  v1::Node* response) override;
  Unary* ForgetNode(Context* context,
                    const v1::ForgetNodeRequest* request,
                    v1::ForgetNodeResponse* response) override;
  Unary* ListEvents(Context* context,
                    const v1::ListEventsRequest* request,
                    v1::ListEventsResponse* response) override;
  Unary* ServerInfo(Context* context,
                    const v1::ServerInfoRequest* request,
                    v1::ServerInfoResponse* response) override;
  Stream<v1::Job>* WatchJob(Context* context, const v1::WatchJobRequest* request) override;
  Stream<v1::Operation>* WatchOperation(Context* context,
                                        const v1::WatchOperationRequest* request) override;
  Stream<v1::JobEvent>* StreamEvents(Context* context,
                                     const v1::StreamEventsRequest* request) override;
  Stream<v1::LogLine>* StreamLogs(Context* context, const v1::StreamLogsRequest* request) override;
  Stream<v1::StepRecord>* StreamMetrics(Context* context,
                                        const v1::StreamMetricsRequest* request) override;

 private:
  // Checks a change of a job: the request, and that its caller may change jobs of the namespace.
  template <typename Request>
  absl::Status CheckChangeBy(const Context* context, const Request& request) const {
    RETURN_IF_ERROR(CheckChange(request));
    return CheckCaller(parts_.access, *context, request.namespace_());
  }
  // `work` on the pool for planning, or the refusal.
  void Plan(Context* context, Unary* reactor, const char* what, std::function<void()> work);
  void Admit(Context* context,
             const v1::SubmitJobRequest* request,
             v1::SubmitJobResponse* response,
             Unary* reactor,
             const std::string& hash,
             const DeviceInventory& inventory);

  // A retry with another parallelism.tensor, once the planner and the memory of devices allow it.
  // `before`: the job that `draft` changes.
  void PlanRetry(Context* context,
                 const v1::RetryJobRequest* request,
                 v1::Job* response,
                 Unary* reactor,
                 const JobRecord& before,
                 RetryDraft draft);
  void EndRetry(const v1::RetryJobRequest* request,
                v1::Job* response,
                Unary* reactor,
                const RetryDraft& draft);

  // The job with its name and defaults and all that is wrong with it, with its paths or for nodes.
  absl::StatusOr<LookedJob> Look(Context* context, const v1::TrainingJob& job);
  // Plans each allowed size; an error says which size cannot be planned, and why.
  absl::Status PlanSizes(Context* context, const plan::JobSpec& spec);
  // As PlanSizes, and checks that a device that is here can hold one of the sizes.
  MemoryFit FitSizes(Context* context, const plan::JobSpec& spec, const DeviceInventory& inventory);
  // Checks that the job may use its checkpoint store, and pins its start checkpoint for a while.
  absl::Status AskStore(const CheckpointJob& job);

  // The step that an accepted job begins from is kept until it has one of its own.
  void PinStart(const std::string& uid, const CheckpointJob& checkpoints);

  const JobsServiceParts parts_;
  JobLooks looks_;
};

}  // namespace ravel::coordinator
