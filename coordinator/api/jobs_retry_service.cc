// JobsService: RetryJob. A retry without another parallelism.tensor goes straight to the
// controller. One with it passes the stages of a submission: the rules of the job file judge it on
// the strand, all sizes are planned and held against the devices that are here on the planning
// pool, and the strand records it. A job that changed meanwhile was judged for nothing, so the
// client asks again.

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <absl/strings/str_cat.h>

#include "coordinator/api/job_retry_proto.h"
#include "coordinator/api/job_roots_proto.h"
#include "coordinator/api/job_view_proto.h"
#include "coordinator/api/jobs_service.h"
#include "coordinator/api/request_checks_service.h"
#include "coordinator/jobs/job_controller.h"

namespace ravel::coordinator {
namespace {

// Only what tells this request from others of its id.
RetryDraft PlainDraft(const v1::RetryJobRequest& request) {
  RetryDraft draft = {.request_id = request.request_id(),
                      .allow_numerics_change = request.allow_numerics_change()};
  if (request.tensor() != 0) {
    draft.sharing.emplace().tensor = request.tensor();
  }
  return draft;
}

// The changes of `job`, or which rules of job files they break.
absl::StatusOr<RetryDraft> ChangingDraft(grpc::CallbackServerContext* context,
                                         const v1::RetryJobRequest& request,
                                         const JobRecord& job) {
  v1::TrainingJob canonical;
  if (!canonical.ParseFromString(job.canonical)) {
    return absl::InternalError("the job's spec does not parse");
  }
  const RetriedJob retried = ApplyRetry(request, std::move(canonical));
  if (!retried.violations.empty()) {
    return ViolationStatus(context, request.name(), retried.violations);
  }
  RetryDraft draft = PlainDraft(request);
  draft.canonical = retried.job.SerializeAsString();
  if (draft.sharing) {
    draft.sharing = {.tensor = retried.spec.tensor,
                     .sequence_parallel = retried.spec.sequence_parallel,
                     .tensor_chunks = retried.spec.tensor_chunks,
                     .device_count = retried.spec.device_count,
                     .sizes = retried.spec.elastic.sizes};
  }
  return draft;
}

// A verdict on the job begins with the field that was asked for; a planner that gave up, or a
// client that is gone, says nothing about the job.
absl::Status OnTensor(int64_t tensor, const absl::Status& refused) {
  const bool verdict = absl::IsInvalidArgument(refused) || absl::IsFailedPrecondition(refused);
  return verdict ? Annotate(refused, absl::StrCat("spec.parallelism.tensor: with ", tensor))
                 : refused;
}

bool IsAnswered(JobController& controller, const std::string& request_id) {
  const absl::StatusOr<std::optional<RequestRecord>> known =
      controller.store().FindRequest(request_id);
  return known.ok() && known->has_value();
}

}  // namespace

grpc::ServerUnaryReactor* JobsService::RetryJob(Context* context,
                                                const v1::RetryJobRequest* request,
                                                v1::Job* response) {
  Unary* reactor = context->DefaultReactor();
  if (const absl::Status valid = CheckChangeBy(context, *request); !valid.ok()) {
    reactor->Finish(ToGrpc(valid));
    return reactor;
  }
  parts_.strand->PostNamed("RetryJob", [this, context, request, response, reactor] {
    const bool changes = request->allow_numerics_change() || request->tensor() != 0;
    // A request that was answered before is not judged again: the world has moved on since.
    const JobKey key = KeyOf(request->namespace_(), request->name());
    const absl::StatusOr<JobView> view = parts_.controller->Get(key);
    const bool answered = IsAnswered(*parts_.controller, request->request_id());
    if (view.ok() && !answered && parts_.roots != nullptr) {  // they may be others by now
      const std::vector<JobViolation> outside =
          RootViolations(*parts_.roots->Get(), view->record.spec);
      if (!outside.empty()) {
        reactor->Finish(ToGrpc(ViolationStatus(context, request->name(), outside)));
        return;
      }
    }
    if (!changes || answered) {
      EndRetry(request, response, reactor, PlainDraft(*request));
      return;
    }
    absl::StatusOr<RetryDraft> draft = view.ok() ? ChangingDraft(context, *request, view->record)
                                                 : absl::StatusOr<RetryDraft>(view.status());
    if (draft.ok() && request->tensor() == 0) {
      EndRetry(request, response, reactor, *draft);
      return;
    }
    const absl::Status allowed = draft.ok() ? parts_.controller->CheckRetry(key) : draft.status();
    if (!allowed.ok()) {
      reactor->Finish(ToGrpc(allowed));
      return;
    }
    PlanRetry(context, request, response, reactor, view->record, *std::move(draft));
  });
  return reactor;
}

void JobsService::PlanRetry(Context* context,
                            const v1::RetryJobRequest* request,
                            v1::Job* response,
                            Unary* reactor,
                            const JobRecord& before,
                            RetryDraft draft) {
  const auto plan = [=, this, inventory = parts_.controller->Inventory()]() mutable {
    MemoryFit memory = FitSizes(context, ChangedBy(draft, before.spec), inventory);
    if (!memory.status.ok()) {
      const absl::Status refused = OnTensor(request->tensor(), memory.status);
      AddFieldDetail(context, before.name, refused);
      reactor->Finish(ToGrpc(refused));
      return;
    }
    draft.peak_bytes = std::move(memory.peak_bytes);
    parts_.strand->PostNamed("Retry", [=, this] {
      const absl::StatusOr<JobView> view =
          parts_.controller->Get(KeyOf(request->namespace_(), request->name()));
      const bool changed = view.ok() && (view->record.uid != before.uid ||
                                         view->record.canonical != before.canonical);
      if (changed && !IsAnswered(*parts_.controller, request->request_id())) {
        reactor->Finish(ToGrpc(absl::UnavailableError(absl::StrCat(
            "job ", before.name, " has changed while its retry was planned; try again"))));
        return;
      }
      EndRetry(request, response, reactor, draft);
    });
  };
  Plan(context, reactor, "a retry", plan);
}

void JobsService::EndRetry(const v1::RetryJobRequest* request,
                           v1::Job* response,
                           Unary* reactor,
                           const RetryDraft& draft) {
  parts_.controller->Retry(KeyOf(request->namespace_(), request->name()),
                           draft,
                           [response, reactor](const absl::StatusOr<JobView>& view) {
                             if (view.ok()) {
                               *response = ToProto(*view);
                             }
                             reactor->Finish(ToGrpc(view.status()));
                           });
}

}  // namespace ravel::coordinator
