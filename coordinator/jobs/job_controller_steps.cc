// JobController: changes on their way to the disk. A job's steps are decided, written, applied and
// acted upon one after another; those of different jobs share commits. Nothing here waits.

#include <algorithm>
#include <utility>

#include <absl/strings/str_cat.h>

#include "common/logging.h"
#include "common/plain_text.h"
#include "coordinator/jobs/job_controller.h"

namespace ravel::coordinator {
namespace {

constexpr size_t kMaxEventText = 4096;

bool IsEmpty(const StoreChange& change) {
  return change.jobs.empty() && change.events.empty() && !change.request &&
         change.operations.empty() && change.epochs.empty() && change.saves.empty() &&
         change.nodes.empty() && change.deleted_nodes.empty() && change.deleted_jobs.empty();
}

}  // namespace

void JobController::Persist(const std::shared_ptr<StoreChange>& change, StatusAnswer done) {
  for (JobEventRecord& event : change->events) {
    event.seq = ++event_seq_;
    event.message = CutText(std::move(event.message), kMaxEventText);  // what trainers say is long
  }
  for (JobRecord& job : change->jobs) {
    job.resource_version = ++resource_version_;
  }
  if (!change->deleted_jobs.empty()) {
    change->last_event_seq = event_seq_;
    change->last_resource_version = ++resource_version_;  // of the list without them
  }
  parts_.writer->Add({.change = change, .done = [this, done](const absl::Status& status) {
                        if ((absl::IsAborted(status) || absl::IsDataLoss(status)) &&
                            parts_.on_fatal) {
                          parts_.on_fatal(status);
                        }
                        done(status);
                      }});
}

void JobController::Record(JobEventRecord event) {
  const auto change = std::make_shared<StoreChange>();
  change->events.push_back(std::move(event));
  Persist(change, [this, change](const absl::Status& status) {
    if (status.ok()) {
      feed_.Publish(change->events.front().job_uid, change->events.front());
    }
  });
}

void JobController::Do(Entry& entry, Step step) {
  const std::string uid = entry.record.uid;
  if (entry.refused && step.failed) {
    step.failed(absl::ResourceExhaustedError("the coordinator's database cannot be written"));
  } else {
    entry.waiting.push_back(std::move(step));
  }
  Pump(uid);
  Entry* still = FindEntry(uid);
  if (still != nullptr && !IsIdle(*still)) {
    SyncSchedule(*still);
  }
}

void JobController::Ask(Entry& entry,
                        Step step,
                        const std::string& request_id,
                        StatusAnswer answer) {
  const std::string uid = entry.record.uid;
  const std::string name = request_id.empty() ? "" : RequestName(request_id);
  if (!name.empty()) {
    being_written_[name];
  }
  const StatusAnswer tell = [this, uid, name, answer = std::move(answer)](absl::Status status) {
    entries_.at(uid).answers.push_back([this, name, answer, status = std::move(status)] {
      answer(status);
      EndWriting(name);
    });
  };
  step.failed = tell;
  step.after = [tell, after = std::move(step.after)] {
    if (after) {
      after();
    }
    tell(absl::OkStatus());
  };
  Do(entry, std::move(step));
  Entry* still = FindEntry(uid);
  if (still != nullptr && !still->answers.empty() && !IsTerminal(still->record.state)) {
    Reconcile(*still);
  }
  GiveAnswers(uid);
}

void JobController::GiveAnswers(const std::string& uid) {
  Entry* entry = FindEntry(uid);
  while (entry != nullptr && !entry->answers.empty()) {
    const std::function<void()> answer = std::move(entry->answers.front());
    entry->answers.erase(entry->answers.begin());
    answer();
    entry = FindEntry(uid);
  }
}

void JobController::Pump(const std::string& uid) {
  Entry* entry = FindEntry(uid);
  while (entry != nullptr && !entry->waiting.empty() && !entry->busy && !entry->refused) {
    Begin(*entry);
    entry = FindEntry(uid);
  }
}

void JobController::Begin(Entry& entry) {
  const std::string uid = entry.record.uid;
  Step& step = entry.waiting.front();
  entry.busy = true;
  const absl::Status allowed = step.check ? step.check(step) : absl::OkStatus();
  if (!allowed.ok()) {
    EndStep(entry, {}, allowed);
    return;
  }
  const Decided decided = Decide(entry, step);
  if (IsEmpty(*decided.change)) {
    EndStep(entry, decided, absl::OkStatus());
    return;
  }
  if (entry.goodput.devices() > 0 || entry.goodput.accounted_us() > 0) {
    NoteDeviceTime(entry);
    decided.change->goodput.push_back(entry.goodput.Row(uid, parts_.clock->WallMs()));
  }
  entry.calling = true;
  Persist(decided.change,
          [this, uid, decided](const absl::Status& status) { OnWritten(uid, decided, status); });
  if (Entry* still = FindEntry(uid)) {
    still->calling = false;
  }
}

JobController::Decided JobController::Decide(const Entry& entry, const Step& step) const {
  Decided decided;
  StoreChange& change = *decided.change;
  change = step.extra;
  if (std::optional<TransitionResult> result = Transition(entry.record, step.event)) {
    change.jobs.push_back(std::move(result->next));
    change.events.insert(change.events.end(), result->events.begin(), result->events.end());
    decided.actions = std::move(result->actions);
  }
  if (step.edit) {
    if (change.jobs.empty()) {
      change.jobs.push_back(entry.record);
    }
    step.edit(change.jobs.back());
  }
  return decided;
}

void JobController::OnWritten(const std::string& uid,
                              const Decided& decided,
                              const absl::Status& status) {
  Entry& entry = entries_.at(uid);
  const bool inside = entry.calling;
  EndStep(entry, decided, status);
  if (inside) {
    return;  // Pump goes on
  }
  Pump(uid);
  Entry* still = FindEntry(uid);
  if (still != nullptr && !IsTerminal(still->record.state)) {
    Reconcile(*still);
  }
  GiveAnswers(uid);
  Schedule();
}

void JobController::EndStep(Entry& entry, const Decided& decided, const absl::Status& status) {
  if (!status.ok() && !entry.waiting.front().failed) {
    RefuseStep(entry, status);
    return;
  }
  const std::string uid = entry.record.uid;
  const Step step = std::move(entry.waiting.front());
  entry.waiting.pop_front();
  if (status.ok()) {
    ApplyStep(entry, decided, step);
  } else {
    step.failed(status);
  }
  Entry* still = FindEntry(uid);
  if (still == nullptr) {
    return;
  }
  still->busy = false;
  SyncSchedule(*still);
  Wake(*still, parts_.clock->MonotonicMs());
}

void JobController::ApplyStep(Entry& entry, const Decided& decided, const Step& step) {
  const StoreChange& change = *decided.change;
  for (const JobEventRecord& event : change.events) {
    log::Info(absl::StrCat("job ",
                           entry.record.name,
                           ": ",
                           event.type,
                           " ",
                           event.reason,
                           " epoch ",
                           event.epoch,
                           event.message.empty() ? "" : ": ",
                           event.message));
    feed_.Publish(entry.record.uid, event);
    CountEvent(event);
  }
  if (!change.jobs.empty()) {
    entry.record = change.jobs.back();
    shown_version_ = std::max(shown_version_, entry.record.resource_version);
    Publish(entry);
    for (const JobActionKind action : decided.actions) {
      Act(entry, action);
    }
  }
  shown_version_ = std::max(shown_version_, change.last_resource_version);
  if (step.after) {
    step.after();
  }
}

void JobController::RefuseStep(Entry& entry, const absl::Status& status) {
  log::Error(absl::StrCat("job ",
                          entry.record.name,
                          ": ",
                          std::string(EventKindName(entry.waiting.front().event.kind)),
                          " waits for the database: ",
                          status.ToString()));
  entry.refused = true;
  std::vector<StatusAnswer> failed;
  std::erase_if(entry.waiting, [&failed](Step& step) {
    if (step.failed) {
      failed.push_back(std::move(step.failed));
      return true;
    }
    return false;
  });
  for (const StatusAnswer& tell : failed) {
    tell(status);
  }
  entry.busy = false;
  SyncSchedule(entry);
  Wake(entry, parts_.clock->MonotonicMs());
}

// -- requests

bool JobController::WaitsFor(const std::string& what, std::function<void()> again) {
  const auto found = being_written_.find(what);
  if (found == being_written_.end()) {
    return false;
  }
  found->second.push_back(std::move(again));
  return true;
}

void JobController::EndWriting(const std::string& what) {
  const auto found = being_written_.find(what);
  if (found == being_written_.end()) {
    return;
  }
  const std::vector<std::function<void()>> waiting = std::move(found->second);
  being_written_.erase(found);
  for (const std::function<void()>& again : waiting) {
    again();
  }
}

absl::StatusOr<std::optional<std::string>> JobController::KnownAnswer(const std::string& request_id,
                                                                      const std::string& hash) {
  ASSIGN_OR_RETURN(const std::optional<RequestRecord> known, parts_.store->FindRequest(request_id));
  if (!known) {
    return std::nullopt;
  }
  if (known->hash != hash) {
    return absl::AlreadyExistsError(
        absl::StrCat("request id ", request_id, " was used for another request"));
  }
  return known->answer;
}

std::optional<RequestRecord> JobController::BeginRequest(const JobKey& key,
                                                         const RequestText& text,
                                                         std::function<void()> again,
                                                         const Answer<std::string>& over) {
  if (WaitsFor(RequestName(text.id), std::move(again))) {
    return std::nullopt;
  }
  const Entry* entry = FindEntry(key);
  if (entry == nullptr) {
    over(NoJob(key));
    return std::nullopt;
  }
  const std::string& uid = entry->record.uid;
  const std::string hash = absl::StrCat(text.verb, " ", uid, text.detail);
  const absl::StatusOr<std::optional<std::string>> known = KnownAnswer(text.id, hash);
  if (!known.ok() || *known) {
    over(known.ok() ? absl::StatusOr<std::string>(**known) : known.status());
    return std::nullopt;
  }
  return RequestRecord{text.id, hash, uid, parts_.clock->WallMs()};
}

Answer<std::string> JobController::WithKnownView(Answer<JobView> answer) {
  return [this, answer = std::move(answer)](const absl::StatusOr<std::string>& uid) {
    WithView(uid.ok() ? *uid : "", answer)(uid.status());
  };
}

StatusAnswer JobController::WithView(const std::string& uid, Answer<JobView> answer) {
  return [this, uid, answer = std::move(answer)](const absl::Status& status) {
    const Entry* entry = FindEntry(uid);
    if (!status.ok()) {
      answer(status);
    } else if (entry == nullptr) {
      answer(absl::NotFoundError("the job of this request is gone"));
    } else {
      answer(ViewOf(*entry));
    }
  };
}

}  // namespace ravel::coordinator
