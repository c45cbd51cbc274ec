// The frame of the controller: start, tick, table of jobs, views. Start loads the durable state,
// raises the term (which fences every older coordinator) and settles commits that were intended
// when the last process went away; the store tells whether they happened. Tick looks at the jobs
// whose time has come, at most kMostLooks of them, so that thousands of jobs do not keep messages
// waiting. Act carries out what a transition asked for, and only after the transition is durable.

#include "coordinator/jobs/job_controller.h"

#include <algorithm>
#include <utility>

#include <absl/strings/str_cat.h>

#include "common/check.h"
#include "common/crypto.h"
#include "common/logging.h"
#include "coordinator/jobs/growth.h"
#include "coordinator/jobs/job_start.h"

namespace ravel::coordinator {
namespace {

// The longest that a daemon waits before it tries to reach its coordinator again.
constexpr int64_t kReturnMs = 5000;
// Jobs that one tick looks at; the others follow in the next.
constexpr size_t kMostLooks = 500;

double EtaSeconds(const JobRecord& record, const JobProgress& progress) {
  return record.state == JobState::kRunning && progress.step_seconds > 0
             ? progress.step_seconds * static_cast<double>(record.spec.steps - progress.step)
             : -1;
}

}  // namespace

JobController::JobController(ControllerOptions options, ControllerParts parts)
    : options_(options), parts_(std::move(parts)), membership_(options.detection_ms) {
  if (parts_.writer == nullptr) {
    inline_writer_ = std::make_unique<InlineStoreWriter>(parts_.store);
    parts_.writer = inline_writer_.get();
  }
}

absl::Status JobController::Start() {
  ASSIGN_OR_RETURN(LoadedState state, parts_.store->Open());
  cluster_id_ = state.cluster_id;
  term_ = state.term;
  looks_.SetTerm(term_);
  event_seq_ = state.last_event_seq;
  resource_version_ = shown_version_ = state.last_resource_version;
  for (OperationRecord& operation : state.operations) {
    NoteOperation(operation);
    ShowOperation(operation);
  }
  for (const SaveRecord& save : state.saves) {
    saves_[save.job_uid].push_back(save);
  }
  for (const NodeRow& node : state.nodes) {
    const NodeHold hold = static_cast<NodeHold>(node.hold);
    if (node.incarnation.empty()) {
      membership_.Remember(node.id,
                           {.has_left = node.has_left != 0,
                            .message = node.gone_reason,
                            .heard_wall_ms = node.seen_ms,
                            .wall_ms = parts_.clock->WallMs()});
    } else if (hold != NodeHold::kNone) {
      membership_.Remember(node.id, {.wall_ms = parts_.clock->WallMs()});
    }
    membership_.SetHold(node.id, hold, node.hold_reason);
    if (!node.incarnation.empty()) {
      expected_nodes_.insert(node.id);
      known_nodes_[node.id] = node;
    }
  }
  const int64_t now_ms = parts_.clock->MonotonicMs();
  bool was_active = false;
  std::map<std::string, GoodputRow> ledgers;
  for (GoodputRow& row : state.goodput) {
    ledgers[row.job_uid] = std::move(row);
  }
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
    const auto ledger = ledgers.find(job.uid);
    LoadJob(std::move(job), ledger == ledgers.end() ? GoodputRow() : ledger->second);
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

void JobController::LoadJob(JobRecord record, const GoodputRow& ledger) {
  const std::string uid = record.uid;
  Entry& entry = AddEntry(std::move(record));
  if (IsTerminal(entry.record.state)) {
    entry.release.Want(parts_.clock->MonotonicMs());
  }
  if (!ledger.job_uid.empty()) {
    LoadGoodput(entry, ledger);
  }
  const absl::StatusOr<std::optional<MetricsEnds>> ends = parts_.metrics->Ends(uid);
  if (ends.ok() && ends->has_value()) {
    entry.progress.first_loss = (*ends)->first.loss;
    entry.progress.step = (*ends)->last.step;
    entry.progress.loss = (*ends)->last.loss;
    entry.progress.any = true;
    if ((*ends)->last.epoch == entry.record.epoch) {
      entry.run.reported_step = (*ends)->last.step;
      entry.goodput.Report(TrainedStepOf((*ends)->last));  // after the ledger was written
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
      LoseNode(lost);
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
  entry.refused = false;
  SaveGoodput(entry);
  Pump(entry.record.uid);
  if (entry.retention.Due(now_ms)) {
    Retain(entry, false);
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
  JobView view{.record = entry.record,
               .progress = entry.progress,
               .conditions = entry.conditions,
               .goodput = entry.goodput};
  view.failed_saves = entry.save_counts.failed;
  view.skipped_saves = entry.saves.skipped();
  view.eta_seconds = EtaSeconds(entry.record, entry.progress);
  const JobRecord& record = entry.record;
  if (record.state == JobState::kRunning && entry.run.phase == RunPhase::kTraining &&
      record.world_size < record.spec.device_count) {
    view.conditions.push_back(
        WantedSize({.spec = &record.spec,
                    .world_size = record.world_size,
                    .free = scheduler_.Free(ShapeOf(record.spec, ShunnedNodes(entry))),
                    .queued = scheduler_.queued(),
                    .since_ms = entry.run.grow_since_ms,
                    .rested_ms = entry.growth.due_ms(),
                    .saving = !entry.saves.idle() || entry.run.committing > 0,
                    .now_ms = parts_.clock->MonotonicMs()}));
    view.conditions.back().time_ms = entry.run.trained_since_ms;
  }
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
          .skipped_saves = entry.saves.skipped(),
          .goodput = &entry.goodput};
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

void JobController::Act(Entry& entry, JobActionKind action) {
  switch (action) {
    case JobActionKind::kLaunch:
      Prepare(entry);
      break;
    case JobActionKind::kRun:
      NoteDeviceTime(entry);
      entry.goodput.Ready(entry.run.restore_seconds, parts_.clock->WallMs());
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
      entry.release.Want(parts_.clock->MonotonicMs());
      if (entry.run.AllExited() && entry.run.committing == 0 && entry.preparing == 0) {
        ReleaseCheckpoints(entry, StoreWork::kRestore);  // nothing half done stays behind
      }
      WriteFiles([metrics = parts_.metrics, logs = parts_.logs, uid = entry.record.uid] {
        metrics->Close(uid);
        logs->Close(uid);
      });
      feed_.Publish(entry.record.uid, FeedEnd());
      break;
  }
}

absl::StatusOr<JobView> JobController::Get(const JobKey& key) const {
  const Entry* entry = FindEntry(key);
  if (entry == nullptr) {
    return NoJob(key);
  }
  JobView view = ViewOf(*entry);
  const JobState state = entry->record.state;
  if (state == JobState::kStarting || state == JobState::kRecovering ||
      state == JobState::kResizing) {
    view.start = WhatStarts(entry->run);
  }
  return view;
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
  const auto found = shown_operations_.find(id);
  if (found == shown_operations_.end()) {
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
