// JobsService: the calls about a job's committed steps. The record knows which steps are committed,
// the store knows pins and leftovers; a list joins both, and a store that does not answer costs the
// list only those columns. Calls that change a mark run on the store's pool and return to the
// strand with the result.

#include <algorithm>
#include <utility>

#include <absl/strings/str_cat.h>

#include "coordinator/api/job_view_proto.h"
#include "coordinator/api/jobs_service.h"
#include "coordinator/api/request_checks_service.h"
#include "coordinator/jobs/job_controller.h"

namespace ravel::coordinator {
namespace {

template <typename Request>
absl::Status CheckStep(const Request& request) {
  if (request.step() < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("step: expected 0 or more, got ", request.step()));
  }
  return absl::OkStatus();
}

absl::StatusOr<MarkChange> ChangeOf(v1::MarkCheckpointRequest::Change change) {
  switch (change) {
    case v1::MarkCheckpointRequest::PIN:
      return MarkChange::kPin;
    case v1::MarkCheckpointRequest::UNPIN:
      return MarkChange::kUnpin;
    case v1::MarkCheckpointRequest::UNMARK_BAD:
      return MarkChange::kUnmarkBad;
    default:
      return absl::InvalidArgumentError("change: expected PIN, UNPIN or UNMARK_BAD");
  }
}

void AddFolder(const absl::StatusOr<FolderView>& folder, v1::ListCheckpointsResponse& response) {
  if (!folder.ok()) {
    response.set_store_problem(std::string(folder.status().message()));
    return;
  }
  for (v1::Checkpoint& checkpoint : *response.mutable_checkpoints()) {
    const std::vector<int64_t>& pinned = folder->pinned_steps;
    checkpoint.set_pinned(std::find(pinned.begin(), pinned.end(), checkpoint.step()) !=
                          pinned.end());
  }
  for (const LeftoverView& leftover : folder->leftovers) {
    v1::Leftover* message = response.add_leftovers();
    message->set_path(leftover.path);
    message->set_kind(leftover.kind);
    message->set_reason(leftover.reason);
    message->set_changed_ms(leftover.changed_ms);
  }
}

}  // namespace

grpc::ServerUnaryReactor* JobsService::ListCheckpoints(Context* context,
                                                       const v1::ListCheckpointsRequest* request,
                                                       v1::ListCheckpointsResponse* response) {
  Unary* reactor = context->DefaultReactor();
  parts_.strand->Post([this, request, response, reactor] {
    const absl::StatusOr<JobView> view =
        parts_.controller->Get(KeyOf(request->namespace_(), request->name()));
    if (!view.ok()) {
      reactor->Finish(ToGrpc(view.status()));
      return;
    }
    const CheckpointJob job = parts_.controller->CheckpointsOf(view->record);
    parts_.pools->Store(job.spec.checkpoint.store, StoreWork::kUpkeep)
        .Post([this, response, reactor, job, known = SaveIds(parts_.controller->Saves(job.uid))] {
          const absl::StatusOr<FolderView> folder = parts_.keeper->Look(job, known);
          parts_.strand->Post([this, response, reactor, job, folder] {
            if (folder.ok()) {
              parts_.controller->NoteFolder(job.uid, *folder);
            }
            for (const SaveRecord& save : parts_.controller->Saves(job.uid)) {
              if (save.state != SaveState::kFailed) {
                *response->add_checkpoints() = ToProto(save);
              }
            }
            AddFolder(folder, *response);
            reactor->Finish(grpc::Status::OK);
          });
        });
  });
  return reactor;
}

grpc::ServerUnaryReactor* JobsService::RollbackJob(Context* context,
                                                   const v1::RollbackJobRequest* request,
                                                   v1::Job* response) {
  Unary* reactor = context->DefaultReactor();
  absl::Status valid = CheckChangeBy(context, *request);
  valid.Update(CheckStep(*request));
  if (!valid.ok()) {
    reactor->Finish(ToGrpc(valid));
    return reactor;
  }
  const auto roll_back = [this, request, response, reactor](const std::string& path) {
    parts_.controller->Rollback(KeyOf(request->namespace_(), request->name()),
                                request->request_id(),
                                request->step(),
                                path,
                                request->reason(),
                                [response, reactor](const absl::StatusOr<JobView>& view) {
                                  if (view.ok()) {
                                    *response = ToProto(*view);
                                  }
                                  reactor->Finish(ToGrpc(view.status()));
                                });
  };
  parts_.strand->Post([this, request, reactor, roll_back] {
    const absl::StatusOr<JobView> view =
        parts_.controller->Get(KeyOf(request->namespace_(), request->name()));
    const auto known = parts_.controller->store().FindRequest(request->request_id());
    const bool decided = !view.ok() || IsTerminal(view->record.state) ||
                         request->step() > view->record.committed_step ||
                         (known.ok() && known->has_value());
    if (decided) {
      roll_back("");  // the controller says no, or answers as before
      return;
    }
    const CheckpointJob job = parts_.controller->CheckpointsOf(view->record);
    parts_.pools->Store(job.spec.checkpoint.store, StoreWork::kUpkeep)
        .Post([this, request, reactor, roll_back, job] {
          const absl::StatusOr<std::string> path =
              parts_.keeper->CheckRollback(job, request->step());
          if (!path.ok()) {
            reactor->Finish(ToGrpc(path.status()));
            return;
          }
          parts_.strand->Post([roll_back, path = *path] { roll_back(path); });
        });
  });
  return reactor;
}

grpc::ServerUnaryReactor* JobsService::MarkCheckpoint(Context* context,
                                                      const v1::MarkCheckpointRequest* request,
                                                      v1::MarkCheckpointResponse* /*response*/) {
  Unary* reactor = context->DefaultReactor();
  absl::Status valid = CheckChangeBy(context, *request);
  valid.Update(CheckStep(*request));
  const absl::StatusOr<MarkChange> change = ChangeOf(request->change());
  valid.Update(change.status());
  if (!valid.ok()) {
    reactor->Finish(ToGrpc(valid));
    return reactor;
  }
  parts_.strand->Post([this, request, reactor, change = *change] {
    const JobKey key = KeyOf(request->namespace_(), request->name());
    const absl::StatusOr<JobView> view = parts_.controller->Get(key);
    if (!view.ok()) {
      reactor->Finish(ToGrpc(view.status()));
      return;
    }
    const CheckpointJob job = parts_.controller->CheckpointsOf(view->record);
    parts_.pools->Store(job.spec.checkpoint.store, StoreWork::kUpkeep)
        .Post([this, request, reactor, change, key, job] {
          // Sets a wanted state, so that a repetition is harmless and no answer needs keeping.
          const absl::Status marked =
              parts_.keeper->Mark(job, request->step(), change, request->reason());
          if (!marked.ok()) {
            reactor->Finish(ToGrpc(marked));
            return;
          }
          parts_.strand->Post([this, request, reactor, change, key] {
            parts_.controller->NoteMark(
                key,
                request->step(),
                change,
                request->reason(),
                [reactor](const absl::Status& noted) { reactor->Finish(ToGrpc(noted)); });
          });
        });
  });
  return reactor;
}

}  // namespace ravel::coordinator
