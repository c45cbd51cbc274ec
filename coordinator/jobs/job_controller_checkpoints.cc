// JobController: what the checkpoint store says about a job's history, and what people change of
// it. The job's record follows the store: up when a settled save turns out to be committed, down
// only after damage was proven by a second reader, since a file that is missing or short may be a
// mount that lags. Work on the store runs on its pool; answers come back to the strand and are
// dropped if the epoch has changed meanwhile.

#include <algorithm>
#include <utility>

#include <absl/strings/str_cat.h>

#include "common/logging.h"
#include "coordinator/jobs/job_controller.h"

namespace ravel::coordinator {
namespace {

constexpr int kReleasesPerStore = 4;  // that are tried again, or after a restart

// An event that changes no record.
JobEventRecord Remark(const JobRecord& job, int64_t step, int64_t now_ms) {
  JobEventRecord event;
  event.time_ms = now_ms;
  event.job_uid = job.uid;
  event.epoch = job.epoch;
  event.attempt = job.attempt;
  event.step = step;
  return event;
}

SaveRecord RecordOf(const JobRecord& job, const SettledSave& settled, int64_t created_ms) {
  SaveRecord save;
  save.job_uid = job.uid;
  save.step = settled.save.step;
  save.epoch = settled.epoch;
  save.attempt = settled.attempt;
  save.state = SaveState::kCommitted;
  save.world_size = settled.world_size;
  save.bytes = settled.save.bytes;
  save.files = settled.save.files;
  save.path = settled.save.path;
  save.save_id = settled.save.save_id;
  save.mesh = settled.save.mesh;
  save.created_ms = created_ms;
  return save;
}

// Records of found steps that the job lacks: its database is a backup from before these commits.
// The look may be older than the record: a save that is known in whatever state stays as it is, and
// so does a step that is being committed.
std::vector<SaveRecord> MissingRecords(const JobRecord& job,
                                       const std::vector<SaveRecord>& saves,
                                       const std::vector<FoundSave>& found) {
  std::vector<SaveRecord> missing;
  for (const FoundSave& step : found) {
    SaveRecord record = RecordOf(job, step.saved, step.created_ms);
    record.state = step.bad ? SaveState::kBad : SaveState::kCommitted;
    const bool known = std::any_of(saves.begin(), saves.end(), [&record](const SaveRecord& save) {
      const bool there = save.state == SaveState::kIntended ||
                         save.state == SaveState::kCommitted || save.state == SaveState::kBad;
      return save.save_id == record.save_id || KeyOf(save) == KeyOf(record) ||
             (there && save.step == record.step);
    });
    const bool set_aside = job.rollback_step >= 0 && record.step > job.rollback_step;
    if (!known && !set_aside) {
      missing.push_back(std::move(record));
    }
  }
  return missing;
}

}  // namespace

CheckpointJob JobController::CheckpointsOf(const JobRecord& record) const {
  return {cluster_id_, record.uid, record.spec};
}

RestoreQuery JobController::QueryOf(const Entry& entry) const {
  const JobRecord& record = entry.record;
  RestoreQuery query;
  query.committed_step = record.committed_step;
  query.has_commit = record.highest_commit >= 0;
  query.has_run = record.started_ms > 0;
  query.rollback_step = record.rollback_step;
  query.rollback_epoch = record.epoch;
  if (const auto saves = saves_.find(record.uid); saves != saves_.end()) {
    query.known_saves = SaveIds(saves->second);
  }
  query.plan = [planner = parts_.planner, spec = record.spec](int64_t ranks) {
    return planner->Plan(spec, ranks, true);
  };
  return query;
}

// All ranks may have sealed a save whose steps rank 0's node could not report before it was lost.
void JobController::TellMissingReports(Entry& entry, const RestorePoint& restore) {
  const int64_t began = entry.launched ? entry.launched->first_step : 0;
  const int64_t newest = std::max(entry.progress.step, began);
  if (!restore.own || restore.step <= newest) {
    return;
  }
  JobEventRecord event = Remark(entry.record, restore.step, parts_.clock->WallMs());
  event.type = "StepReportsMissing";
  event.reason = "NodeLost";
  event.message = absl::StrCat("steps ",
                               newest + 1,
                               " to ",
                               restore.step,
                               " are trained and saved; metrics lack them, because their reports "
                               "were lost with the node of rank 0");
  Step told{MakeEvent(JobEventKind::kNoted), {}, {}};  // tried again until it is durable
  told.extra.events.push_back(std::move(event));
  Do(entry, std::move(told));
}

// The job allows it, or it would not be launched.
void JobController::TellNumericsChange(Entry& entry, const RestorePoint& restore) {
  if (restore.numerics_change.empty()) {
    return;
  }
  JobEventRecord event = Remark(entry.record, restore.step, parts_.clock->WallMs());
  event.type = "Warning";
  event.reason = "NumericsChanged";
  event.message = absl::StrCat("bits differ from those before ",
                               restore.path,
                               ", as checkpoint.allowNumericsChange allows: ",
                               restore.numerics_change);
  Step told{MakeEvent(JobEventKind::kNoted), {}, {}};  // tried again until it is durable
  told.extra.events.push_back(std::move(event));
  Do(entry, std::move(told));
}

// The record follows what the store holds: up by a save that was settled or whose record was lost,
// down only by damage that was proven.
void JobController::NoteRestore(Entry& entry, const Prepared& prepared) {
  const RestorePoint& restore = prepared.restore;
  TellMissingReports(entry, restore);
  if (prepared.rollback_step >= 0) {
    NoteRollback(entry, prepared.rollback_step);
  }
  if (!restore.own || restore.step < 0 || restore.step == entry.record.committed_step) {
    return;
  }
  const bool newer = restore.step > entry.record.committed_step;
  JobEvent event = MakeEvent(newer ? JobEventKind::kCommitted : JobEventKind::kCommitLost);
  if (!newer) {
    event.cause.reason = "CheckpointCorrupt";
    event.cause.message =
        absl::StrCat("goes on from step ", restore.step, ", because of ", restore.fallback_reason);
  }
  event.step = restore.step;
  event.path = restore.path;
  Step step{std::move(event), {}, {}};
  step.extra.saves = MissingRecords(entry.record, saves_[entry.record.uid], restore.found);
  for (const SaveRecord& save : step.extra.saves) {
    AddRecord(save);
  }
  Do(entry, std::move(step));
}

void JobController::NoteSettled(Entry& entry, const SettledSave& settled) {
  SaveRecord save = RecordOf(entry.record, settled, parts_.clock->WallMs());
  AddRecord(save);
  Step step;
  step.event = MakeEvent(JobEventKind::kCommitted);
  step.event.step = save.step;
  step.event.path = save.path;
  step.extra.saves.push_back(std::move(save));
  step.after = [this, uid = entry.record.uid] { Retain(entries_.at(uid), false); };
  Do(entry, std::move(step));
}

void JobController::NoteRollback(Entry& entry, int64_t step) {
  Step done;
  done.event = MakeEvent(JobEventKind::kRolledBack);
  done.event.step = step;
  for (SaveRecord& save : saves_[entry.record.uid]) {
    if (save.step > step &&
        (save.state == SaveState::kCommitted || save.state == SaveState::kBad)) {
      save.state = SaveState::kRolledBack;
      done.extra.saves.push_back(save);
    }
  }
  Do(entry, std::move(done));
}

void JobController::TryRelease(Entry& entry) {
  const auto busy = releasing_.find(entry.record.spec.checkpoint.store);
  const bool room = busy == releasing_.end() || busy->second < kReleasesPerStore;
  // Not beside a deletion, either: its record could be gone when the answer comes.
  if (room && entry.release.Due(parts_.clock->MonotonicMs()) && IsQuiet(entry) && !entry.deleting) {
    ReleaseCheckpoints(entry, StoreWork::kUpkeep);
  }
}

// A deletion and the next launch wait for it: it may commit a save that all ranks have sealed.
void JobController::ReleaseCheckpoints(Entry& entry, StoreWork work) {
  const std::string uid = entry.record.uid;
  const CheckpointJob job = CheckpointsOf(entry.record);
  const RestoreQuery query = QueryOf(entry);
  entry.preparing += 1;
  releasing_[job.spec.checkpoint.store] += 1;
  StorePool(job.spec, work)->Post([this, uid, job, query] {
    const absl::StatusOr<std::optional<SettledSave>> settled = parts_.keeper->Release(job, query);
    parts_.strand->Post([this, uid, settled, store = job.spec.checkpoint.store] {
      releasing_[store] -= 1;
      Entry& found = entries_.at(uid);
      found.preparing -= 1;
      NoteReleased(found, settled);
      if (Entry* still = FindEntry(uid)) {
        SyncSchedule(*still);  // it may have been tried again, and wait for this only
        TryDelete(*still);
      }
      Schedule();
    });
  });
}

void JobController::NoteReleased(Entry& entry,
                                 const absl::StatusOr<std::optional<SettledSave>>& settled) {
  const int64_t now_ms = parts_.clock->MonotonicMs();
  // FailedPrecondition: the folder belongs to another job by now.
  if (settled.ok() || absl::IsFailedPrecondition(settled.status())) {
    entry.release.EndOk();
  }
  if (settled.ok() && *settled) {
    entry.release.Want(now_ms);  // it tells of the save alone, not of a pin that has stayed
    NoteSettled(entry, **settled);
  } else if (!settled.ok()) {
    const bool again = !absl::IsFailedPrecondition(settled.status());
    const int64_t wait_s = again ? (entry.release.EndFailed(now_ms) - now_ms) / 1000 : 0;
    log::Warning(absl::StrCat("job ",
                              entry.record.name,
                              ": unfinished saves and pins stay",
                              again ? absl::StrCat(" for another ", wait_s, " s: ") : ": ",
                              std::string(settled.status().message())));
  }
}

void JobController::LookAtFolder(const Entry& entry) {
  const std::vector<SaveRecord>& saves = saves_[entry.record.uid];
  const bool any = std::any_of(saves.begin(), saves.end(), [](const SaveRecord& save) {
    return save.state == SaveState::kCommitted;
  });
  if (!any || IsTerminal(entry.record.state)) {
    return;  // looked at when somebody asks
  }
  const std::string uid = entry.record.uid;
  StorePool(entry.record.spec, StoreWork::kUpkeep)
      ->Post([this, uid, job = CheckpointsOf(entry.record), known = SaveIds(saves)] {
        const absl::StatusOr<FolderView> folder = parts_.keeper->Look(job, known);
        if (folder.ok()) {
          parts_.strand->Post([this, uid, view = *folder] { NoteFolder(uid, view); });
        }
      });
}

void JobController::NoteFolder(const std::string& uid, const FolderView& folder) {
  Entry* entry = FindEntry(uid);
  const auto there = [&folder](int64_t step) {
    return std::find(folder.steps.begin(), folder.steps.end(), step) != folder.steps.end();
  };
  if (entry == nullptr ||
      (entry->record.committed_step >= 0 && !there(entry->record.committed_step))) {
    return;  // the newest commit is away: this tells of the store, not of the steps
  }
  StoreChange change;
  for (SaveRecord& save : saves_[uid]) {
    // A later commit may have come since the folder was listed.
    const bool listed = save.step <= entry->record.committed_step &&
                        (folder.steps.empty() ||
                         save.step <= *std::max_element(folder.steps.begin(), folder.steps.end()));
    if (save.state == SaveState::kCommitted && listed && !there(save.step)) {
      save.state = SaveState::kDeleted;
      change.saves.push_back(save);
    }
  }
  for (SaveRecord& save : MissingRecords(entry->record, saves_[uid], folder.found)) {
    AddRecord(save);
    change.saves.push_back(std::move(save));
  }
  if (!change.saves.empty()) {
    Do(*entry, Step{MakeEvent(JobEventKind::kNoted), std::move(change), {}});
  }
}

// The trainers could not use what they were told to restore from. A second reader decides whether
// it is damaged: only then it is marked, and the next launch may take the one before.
void JobController::OnCorruptCheckpoint(Entry& entry, const FailureCause& cause) {
  const int64_t step = entry.run.restore_step;
  if (step < 0) {
    return;
  }
  entry.run.restore_step = -1;  // once, however many ranks say it
  entry.run.committing += 1;    // the next launch waits
  const std::string uid = entry.record.uid;
  const std::string why = cause.message;
  StorePool(entry.record.spec, StoreWork::kRestore)
      ->Post([this, uid, job = CheckpointsOf(entry.record), step, why] {
        const absl::StatusOr<StepVerdict> verdict = parts_.keeper->Condemn(job, step, why);
        parts_.strand->Post([this, uid, step, verdict] { OnCondemned(uid, step, verdict); });
      });
}

void JobController::OnCondemned(const std::string& uid,
                                int64_t step,
                                const absl::StatusOr<StepVerdict>& verdict) {
  Entry& job = entries_.at(uid);
  job.run.committing -= 1;
  const bool damaged = verdict.ok() && *verdict == StepVerdict::kDamaged;
  const bool unreadable = !verdict.ok() || *verdict == StepVerdict::kUnreadable;
  if (unreadable && job.run.failure && job.run.failure->reason == "CheckpointCorrupt") {
    // Missing, short or away: that may pass, and costs the job nothing.
    job.run.failure->reason = "StoreUnavailable";
  }
  log::Warning(absl::StrCat("job ",
                            job.record.name,
                            ": step ",
                            step,
                            damaged      ? " is BAD"
                            : unreadable ? " cannot be read now"
                                         : " is good: the trainer's reading was not"));
  StoreChange change;
  for (SaveRecord& save : saves_[uid]) {
    if (damaged && save.step == step && save.state == SaveState::kCommitted) {
      save.state = SaveState::kBad;
      change.saves.push_back(save);
    }
  }
  if (!change.saves.empty()) {
    Do(job, Step{MakeEvent(JobEventKind::kNoted), std::move(change), {}});
  }
  Reconcile(job);
}

absl::Status JobController::CheckRollback(const JobRecord& job, int64_t step) {
  if (IsTerminal(job.state)) {
    return absl::FailedPreconditionError(absl::StrCat("job ",
                                                      job.name,
                                                      " is over: ",
                                                      std::string(StateName(job.state)),
                                                      "; ravelctl retry starts it again"));
  }
  if (job.state == JobState::kStopping || step > job.committed_step) {
    return absl::FailedPreconditionError(absl::StrCat("job ",
                                                      job.name,
                                                      " is ",
                                                      std::string(StateName(job.state)),
                                                      " and its newest commit is step ",
                                                      job.committed_step));
  }
  return absl::OkStatus();
}

void JobController::Rollback(const JobKey& key,
                             const std::string& request_id,
                             int64_t step,
                             const std::string& path,
                             const std::string& reason,
                             Answer<JobView> answer) {
  std::optional<RequestRecord> request = BeginRequest(
      key,
      {request_id, "Rollback", absl::StrCat(" ", step)},
      [=, this] { Rollback(key, request_id, step, path, reason, answer); },
      WithKnownView(answer));
  if (!request) {
    return;
  }
  const std::string uid = request->answer;
  Step change{MakeEvent(JobEventKind::kRollbackRequested), {}, {}};
  change.event.step = step;
  change.event.path = path;
  change.event.cause.message = reason.empty() ? "asked for by a user" : reason;
  change.extra.request = std::move(request);
  change.check = [this, uid, step](Step& asked) {
    asked.event.epoch_floor = entries_.at(uid).epoch_floor;
    return CheckRollback(entries_.at(uid).record, step);
  };
  change.after = [this, uid, step] { entries_.at(uid).progress.step = step; };
  Ask(entries_.at(uid), std::move(change), request_id, WithView(uid, std::move(answer)));
}

void JobController::NoteMark(const JobKey& key,
                             int64_t step,
                             MarkChange change,
                             const std::string& reason,
                             StatusAnswer answer) {
  Entry* entry = FindEntry(key);
  if (entry == nullptr) {
    answer(NoJob(key));
    return;
  }
  Step note{MakeEvent(JobEventKind::kNoted), {}, {}};
  JobEventRecord event = Remark(entry->record, step, parts_.clock->WallMs());
  event.type = change == MarkChange::kPin     ? "CheckpointPinned"
               : change == MarkChange::kUnpin ? "CheckpointUnpinned"
                                              : "CheckpointUnmarked";
  event.reason = "UserRequest";
  event.message = reason;
  note.extra.events.push_back(std::move(event));
  const auto unmarked = [this, uid = entry->record.uid, step, change] {
    std::vector<SaveRecord> saves = saves_[uid];
    std::erase_if(saves, [&](const SaveRecord& save) {
      return change != MarkChange::kUnmarkBad || save.step != step || save.state != SaveState::kBad;
    });
    for (SaveRecord& save : saves) {
      save.state = SaveState::kCommitted;
    }
    return saves;
  };
  note.check = [unmarked](Step& asked) {
    asked.extra.saves = unmarked();
    return absl::OkStatus();
  };
  note.after = [this, unmarked] {
    for (const SaveRecord& save : unmarked()) {
      AddRecord(save);
    }
  };
  Ask(*entry, std::move(note), "", std::move(answer));
}

}  // namespace ravel::coordinator
