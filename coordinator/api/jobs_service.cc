// JobsService: the calls about jobs and nodes. A submission passes stages on different threads: the
// message is checked on gRPC's thread, paths are looked at by a node, sizes are planned on the
// planning pool, the store is asked on its own pool, and the strand decides. A client that hangs up
// ends its own work at the next stage. Answers are sent when the change is durable. Structured
// violations travel in trailing metadata, beside the text for people.

#include "coordinator/api/jobs_service.h"

#include <utility>
#include <vector>

#include <absl/strings/str_cat.h>

#include "common/clock.h"
#include "common/crypto.h"
#include "common/fault_point.h"
#include "common/logging.h"
#include "coordinator/api/job_file_proto.h"
#include "coordinator/api/job_limits_proto.h"
#include "coordinator/api/job_roots_proto.h"
#include "coordinator/api/job_view_proto.h"
#include "coordinator/api/request_checks_service.h"
#include "coordinator/api/stream_writer_service.h"
#include "coordinator/jobs/bounded_look.h"
#include "coordinator/jobs/job_controller.h"
#include "coordinator/jobs/recipe_fit.h"

namespace ravel::coordinator {
namespace {

// A job that was checked is accepted well within this.
constexpr int64_t kAdmissionPinSeconds = 3600;
constexpr int64_t kPlanningMs = 30'000;
constexpr int64_t kLongestDeadlineMs = int64_t{24} * 3600 * 1000;
constexpr int kMaxListed = 1000;

v1::TrainingJob Named(const v1::TrainingJob& job) {
  v1::TrainingJob named = job;
  if (named.metadata().name().empty() && !named.metadata().generate_name().empty()) {
    named.mutable_metadata()->set_name(
        absl::StrCat(named.metadata().generate_name(), RandomHex(3)));
  }
  return named;
}

// Between sizes: others have their turn, whoever asked is gone, or it takes too long.
std::function<absl::Status()> GiveUp(grpc::CallbackServerContext* context, Turn& turn) {
  return [context, &turn] {
    turn.MayPass();
    if (context->IsCancelled()) {
      return absl::CancelledError("the client is gone");
    }
    return turn.used_ms() < kPlanningMs ? absl::OkStatus()
                                        : absl::DeadlineExceededError(absl::StrCat(
                                              "planning every allowed size takes more than ",
                                              kPlanningMs / 1000,
                                              " s; spec.elastic: allow fewer sizes"));
  };
}

// Ends the call with what the controller says, once that is durable.
template <typename Value, typename Message>
Answer<Value> Answering(Message* response, grpc::ServerUnaryReactor* reactor) {
  return [response, reactor](const absl::StatusOr<Value>& value) {
    if (value.ok()) {
      *response = ToProto(*value);
    }
    reactor->Finish(ToGrpc(value.status()));
  };
}

v1::StrandLag ToProto(const LagSummary& lag) {
  v1::StrandLag message;
  message.set_turns(lag.turns);
  message.set_p50_ms(lag.p50_ms);
  message.set_p99_ms(lag.p99_ms);
  message.set_max_ms(lag.max_ms);
  message.set_longest_turn_ms(lag.longest_turn_ms);
  message.set_longest_turn(lag.longest_turn);
  return message;
}

}  // namespace

grpc::ServerUnaryReactor* JobsService::SubmitJob(Context* context,
                                                 const v1::SubmitJobRequest* request,
                                                 v1::SubmitJobResponse* response) {
  Unary* reactor = context->DefaultReactor();
  absl::Status valid =
      request->dry_run() ? absl::OkStatus() : CheckRequestId(request->request_id());
  const std::vector<JobViolation> over =
      valid.ok() ? CheckJobLimits(request->job()) : std::vector<JobViolation>();
  if (valid.ok()) {
    valid = CheckCaller(parts_.access, *context, request->job().metadata().namespace_());
  }
  if (valid.ok() && !over.empty()) {  // before it is hashed or copied
    valid = ViolationStatus(context, request->job().metadata().name(), over);
  }
  if (!valid.ok()) {
    reactor->Finish(ToGrpc(valid));
    return reactor;
  }
  const std::string hash = Hex(Sha256(CanonicalJson(request->job())));
  parts_.strand->PostNamed("SubmitJob", [this, context, request, response, reactor, hash] {
    // A request that was answered before is not judged again: the world has moved on since.
    const auto known = parts_.controller->store().FindRequest(request->request_id());
    if (!request->dry_run() && known.ok() && known->has_value()) {
      parts_.controller->Submit({request->request_id(), hash, JobRecord()},
                                Answering<JobView>(response->mutable_job(), reactor));
      return;
    }
    // Before the store is looked at: the folder of a job that has this name is not free either.
    const v1::Metadata& metadata = request->job().metadata();
    const absl::Status free =
        request->dry_run() || metadata.name().empty()
            ? absl::OkStatus()
            : parts_.controller->CheckNameIsFree(KeyOf(metadata.namespace_(), metadata.name()));
    if (!free.ok()) {
      reactor->Finish(ToGrpc(free));
      return;
    }
    Plan(context,
         reactor,
         "a submission",
         [this,
          context,
          request,
          response,
          reactor,
          hash,
          inventory = parts_.controller->Inventory()] {
           Admit(context, request, response, reactor, hash, inventory);
         });
  });
  return reactor;
}

void JobsService::Plan(Context* context,
                       Unary* reactor,
                       const char* what,
                       std::function<void()> work) {
  const absl::Status posted =
      parts_.pools->plan().Post({0, context->peer(), what, [context, reactor, work] {
                                   if (context->IsCancelled()) {  // nobody waits for it any more
                                     reactor->Finish(grpc::Status::CANCELLED);
                                     return;
                                   }
                                   work();
                                 }});
  if (!posted.ok()) {
    reactor->Finish(ToGrpc(posted));
  }
}

absl::Status JobsService::PlanSizes(Context* context, const plan::JobSpec& spec) {
  Turn turn(parts_.pools->plan_turns());
  return CheckAllSizes(*parts_.planner, spec, GiveUp(context, turn));
}

MemoryFit JobsService::FitSizes(Context* context,
                                const plan::JobSpec& spec,
                                const DeviceInventory& inventory) {
  const RecipeFit recipe = CheckRecipeHere(spec, inventory);
  if (!recipe.status.ok()) {
    return {.status = recipe.status, .warnings = {}, .peak_bytes = {}};
  }
  Turn turn(parts_.pools->plan_turns());
  MemoryFit fit = CheckMemory(*parts_.planner, spec, inventory, GiveUp(context, turn));
  fit.warnings.insert(fit.warnings.begin(), recipe.warnings.begin(), recipe.warnings.end());
  return fit;
}

absl::StatusOr<LookedJob> JobsService::Look(Context* context, const v1::TrainingJob& job) {
  return looks_.Look(Named(job), [context] { return context->IsCancelled(); });
}

absl::Status JobsService::AskStore(const CheckpointJob& job) {
  const auto answer = std::make_shared<absl::Status>();
  RETURN_IF_ERROR(BoundedLook(
      parts_.pools->look(),
      "spec.checkpoint.store",
      LookLimits(),
      [keeper = parts_.keeper, roots = parts_.roots, job, answer](LookProgress&) {
        FaultPoint("coordinator.ask_store").IgnoreError();
        *answer = roots == nullptr ? absl::OkStatus() : CheckStoreBeneath(*roots->Get(), job.spec);
        *answer = answer->ok() ? keeper->Check(job) : *answer;
        if (answer->ok()) {
          // Until the job is accepted, and so pins for itself: retention
          // of the source does not wait.
          *answer = keeper->PinStart(job, kAdmissionPinSeconds);
        }
      }));
  return *answer;
}

void JobsService::Admit(Context* context,
                        const v1::SubmitJobRequest* request,
                        v1::SubmitJobResponse* response,
                        Unary* reactor,
                        const std::string& hash,
                        const DeviceInventory& inventory) {
  absl::StatusOr<LookedJob> looked = Look(context, request->job());
  if (!looked.ok()) {
    reactor->Finish(ToGrpc(looked.status()));
    return;
  }
  CanonicalJob& job = looked->job;
  if (!job.ok()) {
    reactor->Finish(ToGrpc(ViolationStatus(context, job.job.metadata().name(), job.violations)));
    return;
  }
  SetOffloadMemory(inventory, job.spec);
  MemoryFit memory = FitSizes(context, job.spec, inventory);
  absl::Status fits = memory.status;
  job.warnings.insert(job.warnings.end(), memory.warnings.begin(), memory.warnings.end());
  CheckpointJob checkpoints = {parts_.controller->cluster_id(), RandomUuid(), job.spec};
  if (fits.ok() && !request->dry_run()) {
    fits = AskStore(checkpoints);
  }
  if (!fits.ok()) {
    AddFieldDetail(context, job.spec.name, fits);
    reactor->Finish(ToGrpc(fits));
    return;
  }
  for (const std::string& warning : job.warnings) {
    response->add_warnings(warning);
  }
  SubmitDraft draft{request->request_id(), hash, JobRecord(), std::move(looked->refusing)};
  draft.record.uid = checkpoints.uid;
  draft.record.namespace_name = job.spec.namespace_name;
  draft.record.name = job.spec.name;
  draft.record.canonical = job.job.SerializeAsString();
  draft.record.planned = parts_.planner->EncodeSpec(job.spec);
  draft.record.spec = std::move(job.spec);
  draft.record.peak_bytes = std::move(memory.peak_bytes);
  if (request->dry_run()) {
    *response->mutable_job() = ToProto(JobView{draft.record, {}, -1});
    reactor->Finish(grpc::Status::OK);
    return;
  }
  parts_.strand->PostNamed("Submit", [=, this, draft = std::move(draft)]() mutable {
    parts_.controller->Submit(
        std::move(draft),
        [this, response, reactor, checkpoints](const absl::StatusOr<JobView>& view) {
          if (view.ok()) {
            *response->mutable_job() = ToProto(*view);
            PinStart(view->record.uid, checkpoints);
          }
          reactor->Finish(ToGrpc(view.status()));
        });
  });
}

void JobsService::PinStart(const std::string& uid, const CheckpointJob& checkpoints) {
  if (uid != checkpoints.uid) {
    return;  // the answer of an earlier request
  }
  parts_.pools->Store(checkpoints.spec.checkpoint.store, StoreWork::kRestore)
      .Post([keeper = parts_.keeper, checkpoints] {
        const absl::Status pinned = keeper->PinStart(checkpoints, 0);
        if (!pinned.ok()) {
          log::Warning(
              absl::StrCat("job ", checkpoints.spec.name, ": ", std::string(pinned.message())));
        }
      });
}

grpc::ServerUnaryReactor* JobsService::ValidateJob(Context* context,
                                                   const v1::ValidateJobRequest* request,
                                                   v1::ValidateJobResponse* response) {
  Unary* reactor = context->DefaultReactor();
  // Nodes tell which secrets a namespace has, and what lies beneath its roots.
  if (const absl::Status caller =
          CheckCaller(parts_.access, *context, request->job().metadata().namespace_());
      !caller.ok()) {
    reactor->Finish(ToGrpc(caller));
    return reactor;
  }
  Plan(context, reactor, "a validation", [this, context, request, response, reactor] {
    absl::StatusOr<LookedJob> looked = Look(context, request->job());
    if (!looked.ok()) {
      reactor->Finish(ToGrpc(looked.status()));
      return;
    }
    CanonicalJob& job = looked->job;
    if (job.ok()) {
      const absl::Status fits = PlanSizes(context, job.spec);
      if (absl::IsCancelled(fits) || absl::IsDeadlineExceeded(fits)) {
        reactor->Finish(ToGrpc(fits));
        return;
      }
      if (!fits.ok()) {
        job.violations.push_back({"spec", 0, 0, std::string(fits.message()), ""});
      }
    }
    if (CheckJobLimits(job.job).empty()) {
      *response->mutable_canonical() = job.job;
    }
    // An answer is no metadata: everything has room, up to a size that nobody reads any more.
    for (const JobViolation& violation : job.violations) {
      if (response->violations_size() == kMaxListed) {
        break;
      }
      *response->add_violations() = ravel::ToProto(violation);
    }
    for (const std::string& warning : job.warnings) {
      response->add_warnings(warning);
    }
    reactor->Finish(grpc::Status::OK);
  });
  return reactor;
}

grpc::ServerUnaryReactor* JobsService::GetJob(Context* context,
                                              const v1::GetJobRequest* request,
                                              v1::Job* response) {
  Unary* reactor = context->DefaultReactor();
  if (const absl::Status valid = CheckName(*request); !valid.ok()) {
    reactor->Finish(ToGrpc(valid));
    return reactor;
  }
  parts_.strand->PostNamed("GetJob", [this, request, response, reactor] {
    absl::StatusOr<JobView> view =
        parts_.controller->Get(KeyOf(request->namespace_(), request->name()));
    if (view.ok()) {
      const std::string& message = view->record.message;
      const bool both = !message.empty() && !view->start.empty();
      *response = ToProto(*view);
      response->set_message(absl::StrCat(message, both ? "; " : "", view->start));
    }
    reactor->Finish(ToGrpc(view.status()));
  });
  return reactor;
}

grpc::ServerUnaryReactor* JobsService::CancelJob(Context* context,
                                                 const v1::CancelJobRequest* request,
                                                 v1::Job* response) {
  Unary* reactor = context->DefaultReactor();
  if (const absl::Status valid = CheckChangeBy(context, *request); !valid.ok()) {
    reactor->Finish(ToGrpc(valid));
    return reactor;
  }
  parts_.strand->PostNamed("CancelJob", [this, request, response, reactor] {
    // Sets the wanted state, so that a repetition is harmless and no answer needs keeping.
    parts_.controller->Cancel(KeyOf(request->namespace_(), request->name()),
                              request->reason(),
                              Answering<JobView>(response, reactor));
  });
  return reactor;
}

grpc::ServerUnaryReactor* JobsService::DeleteJob(Context* context,
                                                 const v1::DeleteJobRequest* request,
                                                 v1::DeleteJobResponse* response) {
  Unary* reactor = context->DefaultReactor();
  if (const absl::Status valid = CheckChangeBy(context, *request); !valid.ok()) {
    reactor->Finish(ToGrpc(valid));
    return reactor;
  }
  parts_.strand->PostNamed("DeleteJob", [this, request, response, reactor] {
    parts_.controller->Delete(KeyOf(request->namespace_(), request->name()),
                              {.request_id = request->request_id(),
                               .force = request->force(),
                               .with_checkpoints = request->checkpoints(),
                               .reason = request->reason()},
                              Answering<JobView>(response->mutable_job(), reactor));
  });
  return reactor;
}

grpc::ServerUnaryReactor* JobsService::HoldNode(Context* context,
                                                const v1::HoldNodeRequest* request,
                                                v1::Node* response) {
  Unary* reactor = context->DefaultReactor();
  absl::Status valid = CheckRequestId(request->request_id());
  const bool drained = request->hold() == v1::HoldNodeRequest::DRAINED;
  if (valid.ok() && !drained && request->hold() != v1::HoldNodeRequest::QUARANTINED) {
    valid = absl::InvalidArgumentError("hold: expected DRAINED or QUARANTINED");
  }
  valid = valid.ok() ? CheckPlainText("node", request->node(), kMaxNameBytes) : valid;
  valid = valid.ok() ? CheckPlainText("reason", request->reason(), kMaxReasonBytes) : valid;
  if (!valid.ok()) {
    reactor->Finish(ToGrpc(valid));
    return reactor;
  }
  // Sets the wanted state, so that a repetition is harmless and no answer needs keeping.
  parts_.strand->PostNamed("HoldNode", [this, request, response, reactor, drained] {
    parts_.controller->HoldNode(request->node(),
                                drained ? NodeHold::kDrained : NodeHold::kQuarantined,
                                request->lift(),
                                request->reason(),
                                Answering<NodeView>(response, reactor));
  });
  return reactor;
}

grpc::ServerUnaryReactor* JobsService::CheckpointNow(Context* context,
                                                     const v1::CheckpointNowRequest* request,
                                                     v1::Operation* response) {
  Unary* reactor = context->DefaultReactor();
  absl::Status valid = CheckChangeBy(context, *request);
  if (valid.ok() && (request->deadline_ms() < 0 || request->deadline_ms() > kLongestDeadlineMs)) {
    valid = absl::InvalidArgumentError("deadline_ms: expected 0 to 24 hours");
  }
  if (!valid.ok()) {
    reactor->Finish(ToGrpc(valid));
    return reactor;
  }
  parts_.strand->PostNamed("CheckpointNow", [this, request, response, reactor] {
    parts_.controller->CheckpointNow(KeyOf(request->namespace_(), request->name()),
                                     request->request_id(),
                                     request->deadline_ms(),
                                     Answering<OperationRecord>(response, reactor));
  });
  return reactor;
}

grpc::ServerUnaryReactor* JobsService::ServerInfo(Context* context,
                                                  const v1::ServerInfoRequest* /*request*/,
                                                  v1::ServerInfoResponse* response) {
  Unary* reactor = context->DefaultReactor();
  parts_.strand->PostNamed("ServerInfo", [this, response, reactor] {
    response->set_version(parts_.version);
    response->set_cluster_id(parts_.controller->cluster_id());
    response->set_term(parts_.controller->term());
    response->set_insecure(parts_.insecure);
    *response->mutable_lag_recent() = ToProto(parts_.lag->LastMinute());
    *response->mutable_lag_total() = ToProto(parts_.lag->Total());
    response->set_lag_alarms(parts_.lag->alarms());
    reactor->Finish(grpc::Status::OK);
  });
  return reactor;
}

grpc::ServerWriteReactor<v1::Job>* JobsService::WatchJob(Context* /*context*/,
                                                         const v1::WatchJobRequest* request) {
  auto writer =
      StreamWriter<v1::Job>::Create(parts_.strand, parts_.controller, StreamBacklog::kNewestOnly);
  const JobKey key = KeyOf(request->namespace_(), request->name());
  parts_.strand->PostNamed("WatchJob", [this, writer, key] {
    absl::StatusOr<JobView> view = parts_.controller->Get(key);
    if (!view.ok()) {
      writer->End(ToGrpc(view.status()));
      return;
    }
    writer->Push(ToProto(*view));
    if (IsTerminal(view->record.state)) {
      writer->End(grpc::Status::OK);
      return;
    }
    writer->Follow(view->record.uid, [writer](const FeedItem& item) {
      if (const auto* changed = std::get_if<JobView>(&item)) {
        writer->Push(ToProto(*changed));
      } else if (std::holds_alternative<FeedEnd>(item)) {
        writer->End(grpc::Status::OK);
      }
    });
  });
  return writer.get();
}

grpc::ServerWriteReactor<v1::Operation>* JobsService::WatchOperation(
    Context* /*context*/, const v1::WatchOperationRequest* request) {
  auto writer = StreamWriter<v1::Operation>::Create(
      parts_.strand, parts_.controller, StreamBacklog::kKeepAll);
  const std::string id = request->id();
  parts_.strand->PostNamed("WatchOperation", [this, writer, id] {
    const auto over = [](const OperationRecord& operation) {
      return operation.state == OperationState::kCommitted ||
             operation.state == OperationState::kFailed;
    };
    absl::StatusOr<OperationRecord> operation = parts_.controller->GetOperation(id);
    if (!operation.ok()) {
      writer->End(ToGrpc(operation.status()));
      return;
    }
    writer->Push(ToProto(*operation));
    if (over(*operation)) {
      writer->End(grpc::Status::OK);
      return;
    }
    writer->Follow(operation->job_uid, [writer, id, over](const FeedItem& item) {
      const auto* changed = std::get_if<OperationRecord>(&item);
      if (changed != nullptr && changed->id == id) {
        writer->Push(ToProto(*changed));
        if (over(*changed)) {
          writer->End(grpc::Status::OK);
        }
      }
    });
  });
  return writer.get();
}

}  // namespace ravel::coordinator
