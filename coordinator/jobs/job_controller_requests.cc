// JobController: what people ask of jobs. A request is judged when it arrives and again when its
// turn has come, because the job may have changed while an earlier change was being written.
// Requests carry ids: one that is repeated gets the first answer, also while the first is still
// being written. Two submissions of one name are queued behind each other; the first that is
// durable wins.

#include <algorithm>
#include <memory>
#include <string>
#include <utility>

#include <absl/strings/str_cat.h>

#include "common/logging.h"
#include "coordinator/jobs/job_controller.h"

namespace ravel::coordinator {
namespace {

std::string NameOf(const JobRecord& job) {
  return absl::StrCat("name ", job.namespace_name, "/", job.name);
}

absl::Status CheckCancel(const JobRecord& job) {
  if (IsTerminal(job.state) && job.state != JobState::kCancelled) {
    return absl::FailedPreconditionError(
        absl::StrCat("job ", job.name, " is over: ", std::string(StateName(job.state))));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status JobController::CheckNameIsFree(const JobKey& key) const {
  if (FindEntry(key) == nullptr) {
    return absl::OkStatus();
  }
  return absl::AlreadyExistsError(absl::StrCat(
      "a job named ",
      key.name,
      FindEntry(key)->record.delete_wish == DeleteWish::kNone ? " exists in namespace "
                                                              : " is being deleted in namespace ",
      key.namespace_name,
      "; choose another metadata.name, or use generateName"));
}

absl::Status JobController::CheckDraft(const SubmitDraft& draft) const {
  if (parts_.disk != nullptr) {
    RETURN_IF_ERROR(parts_.disk->CheckRoom());
  }
  return CheckNameIsFree({draft.record.namespace_name, draft.record.name});
}

void JobController::Submit(SubmitDraft draft, Answer<JobView> answer) {
  const std::string request = RequestName(draft.request_id);
  const std::string name = NameOf(draft.record);
  for (const std::string& what : {request, name}) {
    // Judged when the one before it is on disk.
    if (WaitsFor(what, [this, draft, answer] { Submit(draft, answer); })) {
      return;
    }
  }
  const absl::StatusOr<std::optional<std::string>> known =
      KnownAnswer(draft.request_id, draft.hash);
  if (known.ok() && *known) {
    WithView(**known, answer)(absl::OkStatus());
    return;
  }
  const absl::Status allowed = known.ok() ? CheckDraft(draft) : known.status();
  if (!allowed.ok()) {
    answer(allowed);
    return;
  }
  JobRecord& job = draft.record;
  job.uid = job.uid.empty() ? NewId() : job.uid;
  job.state = JobState::kQueued;
  job.reason = "WaitingForDevices";
  job.created_ms = parts_.clock->WallMs();
  JobEventRecord event;
  event.time_ms = job.created_ms;
  event.job_uid = job.uid;
  event.type = "Submitted";
  const auto change = std::make_shared<StoreChange>();
  change->events.push_back(event);
  change->request = RequestRecord{draft.request_id, draft.hash, job.uid, job.created_ms};
  change->jobs.push_back(std::move(job));
  being_written_[request];
  being_written_[name];
  Persist(change, [=, this, unfit = draft.unfit](const absl::Status& status) {
    answer(status.ok() ? absl::StatusOr<JobView>(AcceptDraft(change->jobs.back(), unfit)) : status);
    EndWriting(request);
    EndWriting(name);
  });
}

JobView JobController::AcceptDraft(const JobRecord& record, const std::set<std::string>& unfit) {
  Entry& entry = AddEntry(record);
  entry.unfit = unfit;
  shown_version_ = std::max(shown_version_, record.resource_version);
  SyncSchedule(entry);
  log::Info(absl::StrCat("job ", entry.record.name, ": submitted as ", entry.record.uid));
  return ViewOf(entry);
}

void JobController::Cancel(const JobKey& key, const std::string& reason, Answer<JobView> answer) {
  Entry* entry = FindEntry(key);
  const absl::Status allowed = entry == nullptr ? NoJob(key) : CheckCancel(entry->record);
  if (!allowed.ok()) {
    answer(allowed);
    return;
  }
  const std::string uid = entry->record.uid;
  Step step{MakeEvent(JobEventKind::kCancelRequested), {}, {}};
  step.event.cause.message = reason;
  step.check = [this, uid](Step&) { return CheckCancel(entries_.at(uid).record); };
  Ask(*entry, std::move(step), "", WithView(uid, std::move(answer)));
}

absl::Status JobController::CheckRetry(const JobKey& key) const {
  const Entry* entry = FindEntry(key);
  if (entry == nullptr) {
    return NoJob(key);
  }
  const JobRecord& job = entry->record;
  if (job.delete_wish != DeleteWish::kNone) {
    return absl::FailedPreconditionError(absl::StrCat("job ", job.name, " is being deleted"));
  }
  if (job.state != JobState::kFailed && job.state != JobState::kCancelled) {
    return absl::FailedPreconditionError(absl::StrCat("job ",
                                                      job.name,
                                                      " is ",
                                                      std::string(StateName(job.state)),
                                                      "; only a job that has failed or was "
                                                      "cancelled can be tried again"));
  }
  if (!entry->run.AllExited() || entry->run.committing > 0) {
    return absl::UnavailableError(
        absl::StrCat("job ", job.name, " is still being wound up; try again"));
  }
  return absl::OkStatus();
}

void JobController::Retry(const JobKey& key, const RetryDraft& draft, Answer<JobView> answer) {
  const bool changes = !draft.canonical.empty();
  std::optional<RequestRecord> request = BeginRequest(
      key,
      {draft.request_id,
       "retry",
       absl::StrCat(draft.allow_numerics_change ? " allowing other numerics" : "",
                    draft.sharing ? absl::StrCat(" with tensor ", draft.sharing->tensor) : "")},
      [=, this] { Retry(key, draft, answer); },
      WithKnownView(answer));
  if (!request) {
    return;
  }
  const std::string uid = request->answer;
  Step step{MakeEvent(JobEventKind::kRetryRequested), {}, {}};
  if (changes) {
    const JobRecord& job = entries_.at(uid).record;
    plan::JobSpec spec = ChangedBy(draft, job.spec);
    std::string planned = parts_.planner->EncodeSpec(spec);
    step.event.changed_spec = {draft.canonical,
                               std::move(planned),
                               std::move(spec),
                               draft.sharing ? draft.peak_bytes : job.peak_bytes};
  }
  step.check = [this, key](Step&) { return CheckRetry(key); };
  step.extra.request = std::move(request);
  step.after = [this, uid] {
    Entry& job = entries_.at(uid);
    job.run = JobRun();
    job.avoided = AvoidSet();
    job.lacking.clear();
    job.unfit.clear();
    job.held = {-1, 0, 0};
  };
  Ask(entries_.at(uid), std::move(step), draft.request_id, [=, this](const absl::Status& status) {
    Schedule();
    WithView(uid, answer)(status);
  });
}

}  // namespace ravel::coordinator
