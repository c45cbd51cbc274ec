#include "coordinator/jobs/job_controller.h"

#include <algorithm>
#include <utility>

#include <absl/strings/str_cat.h>

#include "common/check.h"
#include "common/crypto.h"
#include "common/fault_point.h"
#include "common/logging.h"
#include "common/plain_text.h"

namespace ravel::coordinator {
namespace {

// The longest that a daemon waits before it tries to reach its coordinator again.
constexpr int64_t kReturnMs = 5000;
// Jobs that one tick looks at; the others follow in the next.
constexpr size_t kMostLooks = 500;
constexpr size_t kMaxEventText = 4096;

double EtaSeconds(const JobRecord& record, const JobProgress& progress) {
  return record.state == JobState::kRunning && progress.step_seconds > 0
             ? progress.step_seconds * static_cast<double>(record.spec.steps - progress.step)
             : -1;
}

}  // namespace

JobController::JobController(ControllerOptions options, ControllerParts parts)
    : options_(options), parts_(std::move(parts)), membership_(options.detection_ms) {}

absl::Status JobController::Start() {
  ASSIGN_OR_RETURN(LoadedState state, parts_.store->Open());
  cluster_id_ = state.cluster_id;
  term_ = state.term;
  looks_.SetTerm(term_);
  event_seq_ = state.last_event_seq;
  resource_version_ = state.last_resource_version;
  for (OperationRecord& operation : state.operations) {
    NoteOperation(operation);
  }
  for (const SaveRecord& save : state.saves) {
    saves_[save.job_uid].push_back(save);
  }
  for (const NodeRow& node : state.nodes) {
    const NodeHold hold = static_cast<NodeHold>(node.hold);
    if (hold != NodeHold::kNone) {
      membership_.Remember(node.id, hold, node.hold_reason);
    }
    if (!node.incarnation.empty()) {
      expected_nodes_.insert(node.id);
      known_nodes_[node.id] = node;
    }
  }
  const int64_t now_ms = parts_.clock->MonotonicMs();
  bool was_active = false;
  std::map<std::string, EpochRecord> launched;
  for (EpochRecord& epoch : state.epochs) {
    launched[epoch.job_uid] = std::move(epoch);
  }
  for (JobRecord& job : state.jobs) {
    absl::StatusOr<plan::JobSpec> spec = parts_.planner->DecodeSpec(job.planned);
    RETURN_IF_ERROR(Annotate(spec.status(), absl::StrCat("job ", job.name, " in the database")));
    job.spec = *std::move(spec);
    was_active = was_active || HoldsDevices(job.state);
    Entry& entry = entries_[job.uid];
    if (const auto found = launched.find(job.uid); found != launched.end()) {
      entry.launched = std::move(found->second);
    }
    LoadJob(std::move(job));
  }
  // 2T and the longest back-off of a daemon that tries to return.
  return_until_ms_ = now_ms + 2 * membership_.times().detection_ms + kReturnMs;
  if (was_active) {
    registration_until_ms_ = return_until_ms_;
  } else {
    expected_nodes_.clear();
  }
  log::Info(absl::StrCat(
      "coordinator of cluster ", cluster_id_, ", term ", term_, ", ", entries_.size(), " jobs"));
  return absl::OkStatus();
}

void JobController::LoadJob(JobRecord record) {
  const std::string uid = record.uid;
  Entry& entry = AddEntry(std::move(record));
  const absl::StatusOr<std::optional<MetricsEnds>> ends = parts_.metrics->Ends(uid);
  if (ends.ok() && ends->has_value()) {
    entry.progress.first_loss = (*ends)->first.loss;
    entry.progress.step = (*ends)->last.step;
    entry.progress.loss = (*ends)->last.loss;
    entry.progress.any = true;
    if ((*ends)->last.epoch == entry.record.epoch) {
      entry.run.reported_step = (*ends)->last.step;
    }
  }
  entry.save_counts = CountSaves(saves_[uid]);
  for (const SaveRecord& save : saves_[uid]) {
    if (save.state == SaveState::kIntended) {
      Settle(entry, save);
    }
  }
  LookAtFolder(entry);
  if (BeginAdoption(entry)) {
    SyncSchedule(entry);
    return;  // its trainers went on; a commit that is settled beside it is a commit like any other
  }
  FinishOperations(uid, INT64_MAX, OperationState::kFailed, "CoordinatorRestart", -1, "");
  if (entry.settling > 0) {
    return;  // the transition follows: a commit that is found may already end the job
  }
  Do(entry, MakeEvent(JobEventKind::kCoordinatorRestarted));
}

// A commit was intended when the last coordinator went away: the store tells whether it happened,
// or it is done now.
void JobController::Settle(Entry& entry, const SaveRecord& save) {
  entry.settling += 1;
  entry.run.committing += 1;
  const std::string uid = entry.record.uid;
  const plan::JobSpec spec = entry.record.spec;
  const CheckpointJob job = CheckpointsOf(entry.record);
  StorePool(spec, StoreWork::kCommit)->Post([this, uid, spec, job, save] {
    SaveRequest request{uid, save.step, save.epoch, save.attempt, save.created_ms, nullptr, {}};
    absl::StatusOr<CommittedSave> result =
        absl::AbortedError("not finished when the coordinator stopped");
    auto world = parts_.planner->Plan(spec, save.world_size, true);
    if (world.ok()) {
      request.world = *world;
      absl::StatusOr<std::optional<CommittedSave>> settled = parts_.keeper->Settle(job, request);
      if (settled.ok() && settled->has_value()) {
        result = **settled;
      } else if (!settled.ok()) {
        result = settled.status();
      }
    } else {
      result = world.status();
    }
    parts_.strand->Post([this, uid, save, result] {
      OnCommitted(uid, save, result, -1);
      Entry* found = FindEntry(uid);
      // Others than these may be under way: seals that an adopted run's nodes still had.
      if (found != nullptr && --found->settling == 0) {
        if (found->run.phase == RunPhase::kIdle) {
          Do(*found, MakeEvent(JobEventKind::kCoordinatorRestarted));
        }
        Reconcile(*found);
      }
    });
  });
}

void JobController::Tick() {
  const int64_t now_ms = parts_.clock->MonotonicMs();
  // Time that this process did not run is nobody's silence. Being busy is no excuse: messages are
  // judged by their arrival.
  const int64_t paused_ms = parts_.take_pause_ms ? parts_.take_pause_ms() : 0;
  if (paused_ms > 0) {
    log::Warning(absl::StrCat("this process did not run for ", paused_ms, " ms"));
    membership_.Forgive(paused_ms, now_ms);
  }
  const auto arrival = [this](StreamId stream) { return parts_.fleet->ArrivalMs(stream); };
  for (const LostNode& lost : membership_.Evaluate(now_ms, arrival)) {
    if (lost.job_uid.empty()) {
      LoseNode(lost.node_id, lost.reason);
    } else if (Entry* entry = FindEntry(lost.job_uid)) {
      LoseNodeFor(*entry, lost.node_id, lost.reason);
    }
  }
  for (const std::string& uid : agenda_.Take(now_ms, kMostLooks)) {
    Entry* entry = FindEntry(uid);
    if (entry != nullptr) {
      LookAt(*entry, now_ms);
    }
  }
  SendLooks();
  SaveOperationsAgain();
  ExpireOperations();
  Schedule();
  SweepJobs();
}

void JobController::LookAt(Entry& entry, int64_t now_ms) {
  while (!entry.waiting.empty()) {
    Step step = std::move(entry.waiting.front());
    if (!TryStep(entry, step).ok()) {
      entry.waiting.front() = std::move(step);
      break;
    }
    entry.waiting.pop_front();
  }
  if (!IsTerminal(entry.record.state)) {
    Reconcile(entry);
  }
  SyncSchedule(entry);
  const int64_t next_ms = NextLookMs(entry, now_ms);
  if (next_ms >= 0) {
    Wake(entry, next_ms);
  }
}

JobController::Entry& JobController::AddEntry(JobRecord record) {
  Entry& entry = entries_[record.uid];
  by_name_[{record.namespace_name, record.name}] = record.uid;
  by_age_.insert({record.created_ms, record.uid});
  entry.record = std::move(record);
  entry.order = ++last_order_;
  entry.swept_ms =
      parts_.clock->WallMs();  // nothing of it is old yet, or a start looks at all jobs
  Wake(entry, parts_.clock->MonotonicMs());
  return entry;
}

JobController::Entry* JobController::FindEntry(const std::string& uid) {
  const auto found = entries_.find(uid);
  return found == entries_.end() ? nullptr : &found->second;
}

const JobController::Entry* JobController::FindEntry(const JobKey& key) const {
  const auto found = by_name_.find(key);
  return found == by_name_.end() ? nullptr : &entries_.at(found->second);
}

JobView JobController::ViewOf(const Entry& entry) const {
  JobView view{.record = entry.record, .progress = entry.progress, .conditions = entry.conditions};
  view.failed_saves = entry.save_counts.failed;
  view.skipped_saves = entry.saves.skipped();
  view.eta_seconds = EtaSeconds(entry.record, entry.progress);
  const std::string why = WhyQueued(entry);
  if (!why.empty()) {
    view.record.message = why;
  }
  return view;
}

JobGlimpse JobController::GlimpseOf(const Entry& entry) const {
  return {.record = entry.record,
          .progress = entry.progress,
          .conditions = entry.conditions,
          .eta_seconds = EtaSeconds(entry.record, entry.progress),
          .failed_saves = entry.save_counts.failed,
          .skipped_saves = entry.saves.skipped()};
}

void JobController::Publish(const Entry& entry) {
  if (feed_.IsWatched(entry.record.uid)) {
    feed_.Publish(entry.record.uid, ViewOf(entry));
  }
}

JobEvent JobController::MakeEvent(JobEventKind kind) const {
  JobEvent event;
  event.kind = kind;
  event.now_ms = parts_.clock->WallMs();
  return event;
}

std::string JobController::NewId() const {
  return parts_.new_id ? parts_.new_id() : RandomUuid();
}

absl::Status JobController::Persist(StoreChange& change) {
  for (JobEventRecord& event : change.events) {
    event.seq = ++event_seq_;
    event.message = CutText(std::move(event.message), kMaxEventText);  // what trainers say is long
  }
  for (JobRecord& job : change.jobs) {
    job.resource_version = ++resource_version_;
  }
  RETURN_IF_ERROR(FaultPoint("coordinator.before_persist"));
  const absl::Status status = parts_.store->Apply(change);
  if ((absl::IsAborted(status) || absl::IsDataLoss(status)) && parts_.on_fatal) {
    parts_.on_fatal(status);
  }
  RETURN_IF_ERROR(status);
  FaultPoint("coordinator.after_persist")
      .IgnoreError();  // done is done: only a crash means anything here
  return absl::OkStatus();
}

absl::Status JobController::TryStep(Entry& entry, Step& step) {
  std::optional<TransitionResult> result = Transition(entry.record, step.event);
  StoreChange change = step.extra;
  if (result) {
    change.jobs.push_back(result->next);
    change.events.insert(change.events.end(), result->events.begin(), result->events.end());
  }
  const bool empty = change.jobs.empty() && change.events.empty() && change.saves.empty() &&
                     change.operations.empty() && change.epochs.empty() && !change.request;
  if (!empty) {
    RETURN_IF_ERROR(Persist(change));
  }
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
  }
  if (result) {
    entry.record = change.jobs.back();
    Publish(entry);
    for (const JobActionKind action : result->actions) {
      Act(entry, action);
    }
  }
  if (step.after) {
    step.after();
  }
  SyncSchedule(entry);
  Wake(entry, parts_.clock->MonotonicMs());
  return absl::OkStatus();
}

void JobController::Do(Entry& entry, Step step) {
  if (!entry.waiting.empty()) {
    entry.waiting.push_back(std::move(step));
    return;
  }
  const absl::Status status = TryStep(entry, step);
  if (!status.ok()) {
    log::Error(absl::StrCat("job ",
                            entry.record.name,
                            ": ",
                            std::string(EventKindName(step.event.kind)),
                            " waits for the database: ",
                            status.ToString()));
    entry.waiting.push_back(std::move(step));
    SyncSchedule(entry);
    Wake(entry, parts_.clock->MonotonicMs());
  }
}

void JobController::Act(Entry& entry, JobActionKind action) {
  switch (action) {
    case JobActionKind::kLaunch:
      Prepare(entry);
      break;
    case JobActionKind::kRun:
      entry.run.phase = RunPhase::kTraining;
      parts_.keeper->EndRestore(entry.record.uid);
      entry.run.trained_since_ms = parts_.clock->WallMs();
      entry.run.progress_ms = entry.run.save_ms = parts_.clock->MonotonicMs();
      entry.run.board.Forget();
      RenewHorizon(entry);
      break;
    case JobActionKind::kStopTrainers:
      StopRun(entry);
      break;
    case JobActionKind::kSaveThenStop:
      RequestSave(entry, true);
      break;
    case JobActionKind::kFinished:
      FinishOperations(entry.record.uid,
                       INT64_MAX,
                       entry.record.state == JobState::kSucceeded ? OperationState::kCommitted
                                                                  : OperationState::kFailed,
                       entry.record.reason,
                       entry.record.committed_step,
                       "");
      if (entry.run.AllExited()) {
        ReleaseCheckpoints(entry);  // nothing half done stays behind
      }
      WriteFiles([metrics = parts_.metrics, logs = parts_.logs, uid = entry.record.uid] {
        metrics->Close(uid);
        logs->Close(uid);
      });
      feed_.Publish(entry.record.uid, FeedEnd());
      break;
  }
}

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

absl::StatusOr<JobView> JobController::Submit(SubmitDraft draft) {
  std::vector<SubmitDraft> drafts;
  drafts.push_back(std::move(draft));
  return SubmitAll(std::move(drafts)).front();
}

std::vector<absl::StatusOr<JobView>> JobController::SubmitAll(std::vector<SubmitDraft> drafts) {
  std::vector<absl::StatusOr<Drafted>> written;
  std::set<std::string> ids;
  std::set<std::pair<std::string, std::string>> names;
  std::vector<size_t> repeated;  // judged when those before them are on disk
  absl::Status status = parts_.store->BeginGroup();
  for (size_t i = 0; i < drafts.size(); ++i) {
    const JobRecord& job = drafts[i].record;
    const bool new_id = ids.insert(drafts[i].request_id).second;
    if (!names.insert({job.namespace_name, job.name}).second || !new_id) {
      repeated.push_back(i);
      written.emplace_back(absl::UnavailableError("answered below"));
    } else {
      written.push_back(status.ok() ? WriteDraft(drafts[i]) : status);
    }
  }
  if (status.ok()) {
    status = parts_.store->CommitGroup();
  }
  if ((absl::IsAborted(status) || absl::IsDataLoss(status)) && parts_.on_fatal) {
    parts_.on_fatal(status);
  }
  std::vector<absl::StatusOr<JobView>> answers;
  for (absl::StatusOr<Drafted>& draft : written) {
    if (!draft.ok()) {
      answers.emplace_back(draft.status());
    } else if (draft->known) {
      answers.emplace_back(*draft->known);
    } else if (!status.ok()) {
      answers.emplace_back(status);
    } else {
      answers.emplace_back(AcceptDraft(std::move(draft->record)));
    }
  }
  for (const size_t i : repeated) {
    answers[i] = Submit(std::move(drafts[i]));
  }
  return answers;
}

absl::StatusOr<JobController::Drafted> JobController::WriteDraft(SubmitDraft draft) {
  ASSIGN_OR_RETURN(const std::optional<RequestRecord> known,
                   parts_.store->FindRequest(draft.request_id));
  if (known) {
    if (known->hash != draft.hash) {
      return absl::AlreadyExistsError(
          absl::StrCat("request id ", draft.request_id, " was used for another request"));
    }
    const Entry* entry = FindEntry(known->answer);
    if (entry == nullptr) {
      return absl::NotFoundError("the job of this request is gone");
    }
    return Drafted{{}, ViewOf(*entry)};
  }
  if (parts_.disk != nullptr) {
    RETURN_IF_ERROR(parts_.disk->CheckRoom());
  }
  RETURN_IF_ERROR(CheckNameIsFree({draft.record.namespace_name, draft.record.name}));
  JobRecord& job = draft.record;
  job.uid = job.uid.empty() ? NewId() : job.uid;
  job.state = JobState::kQueued;
  job.reason = "WaitingForDevices";
  job.created_ms = parts_.clock->WallMs();
  JobEventRecord event;
  event.time_ms = job.created_ms;
  event.job_uid = job.uid;
  event.type = "Submitted";
  StoreChange change;
  change.jobs.push_back(job);
  change.events.push_back(event);
  change.request = RequestRecord{draft.request_id, draft.hash, job.uid, job.created_ms};
  RETURN_IF_ERROR(Persist(change));
  return Drafted{change.jobs.back(), {}};
}

JobView JobController::AcceptDraft(JobRecord record) {
  Entry& entry = AddEntry(std::move(record));
  SyncSchedule(entry);
  log::Info(absl::StrCat("job ", entry.record.name, ": submitted as ", entry.record.uid));
  return ViewOf(entry);
}

absl::StatusOr<JobView> JobController::Cancel(const JobKey& key, const std::string& reason) {
  Entry* entry = FindEntry(key);
  if (entry == nullptr) {
    return absl::NotFoundError(
        absl::StrCat("no job named ", key.name, " in namespace ", key.namespace_name));
  }
  if (IsTerminal(entry->record.state) && entry->record.state != JobState::kCancelled) {
    return absl::FailedPreconditionError(
        absl::StrCat("job ", key.name, " is over: ", std::string(StateName(entry->record.state))));
  }
  JobEvent event = MakeEvent(JobEventKind::kCancelRequested);
  event.cause.message = reason;
  Step step{std::move(event), {}, {}};
  if (!entry->waiting.empty()) {
    return absl::ResourceExhaustedError("the coordinator's database cannot be written");
  }
  RETURN_IF_ERROR(TryStep(*entry, step));
  Reconcile(*entry);
  return ViewOf(*entry);
}

absl::StatusOr<JobView> JobController::Retry(const JobKey& key, const std::string& request_id) {
  Entry* entry = FindEntry(key);
  if (entry == nullptr) {
    return absl::NotFoundError(
        absl::StrCat("no job named ", key.name, " in namespace ", key.namespace_name));
  }
  const std::string hash = absl::StrCat("retry ", entry->record.uid);
  ASSIGN_OR_RETURN(const std::optional<RequestRecord> known, parts_.store->FindRequest(request_id));
  if (known && known->hash != hash) {
    return absl::AlreadyExistsError(
        absl::StrCat("request id ", request_id, " was used for another request"));
  }
  if (known) {
    return ViewOf(*entry);
  }
  if (entry->record.delete_wish != DeleteWish::kNone) {
    return absl::FailedPreconditionError(absl::StrCat("job ", key.name, " is being deleted"));
  }
  const JobState state = entry->record.state;
  if (state != JobState::kFailed && state != JobState::kCancelled) {
    return absl::FailedPreconditionError(absl::StrCat("job ",
                                                      key.name,
                                                      " is ",
                                                      std::string(StateName(state)),
                                                      "; only a job that has failed or was "
                                                      "cancelled can be tried again"));
  }
  if (!entry->waiting.empty() || !entry->run.AllExited() || entry->run.committing > 0) {
    return absl::UnavailableError(
        absl::StrCat("job ", key.name, " is still being wound up; try again"));
  }
  Step step{MakeEvent(JobEventKind::kRetryRequested), {}, {}};
  step.extra.request = RequestRecord{request_id, hash, entry->record.uid, parts_.clock->WallMs()};
  RETURN_IF_ERROR(TryStep(*entry, step));
  entry->run = JobRun();
  entry->avoided = AvoidSet();
  entry->lacking.clear();
  entry->held = {-1, 0, 0};
  SyncSchedule(*entry);
  Schedule();
  return ViewOf(*entry);
}

absl::StatusOr<JobView> JobController::Get(const JobKey& key) const {
  const Entry* entry = FindEntry(key);
  if (entry == nullptr) {
    return absl::NotFoundError(
        absl::StrCat("no job named ", key.name, " in namespace ", key.namespace_name));
  }
  return ViewOf(*entry);
}

std::vector<JobView> JobController::List() const {
  std::vector<JobView> views;
  for (const JobCursor& cursor : by_age_) {
    views.push_back(ViewOf(entries_.at(cursor.uid)));
  }
  return views;
}

void JobController::VisitJobs(const JobCursor& after,
                              const std::function<bool(const JobGlimpse&)>& visit) const {
  for (auto at = by_age_.upper_bound(after); at != by_age_.end(); ++at) {
    const Entry& entry = entries_.at(at->uid);
    if (!visit(GlimpseOf(entry))) {
      return;
    }
  }
}

absl::StatusOr<OperationRecord> JobController::GetOperation(const std::string& id) const {
  const auto found = operations_.find(id);
  if (found == operations_.end()) {
    return absl::NotFoundError(absl::StrCat("no operation ", id));
  }
  return found->second;
}

const std::vector<SaveRecord>& JobController::Saves(const std::string& job_uid) const {
  static const std::vector<SaveRecord> kNone;
  const auto found = saves_.find(job_uid);
  return found == saves_.end() ? kNone : found->second;
}

}  // namespace ravel::coordinator
