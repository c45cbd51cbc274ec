// JobController: saves, from the request to retention. A commit has three durable points: the
// record says "intended", the store publishes COMMIT, the record says "committed". After a crash
// between them Settle asks the store, so the two cannot disagree for long. Commits of a job happen
// one at a time, in the order of steps. A save that fails ends with an event and training goes on;
// only freshness limits of the job file turn missing commits into a failure.

#include <algorithm>
#include <utility>

#include <absl/strings/str_cat.h>

#include "common/crypto.h"
#include "common/logging.h"
#include "coordinator/jobs/job_controller.h"

namespace ravel::coordinator {
namespace {

// An earlier commit of the same step was found to be bad: only then a step is saved again.
void NoteReplaced(std::vector<SaveRecord>& saves, const SaveRecord& save, StoreChange& change) {
  for (SaveRecord& known : saves) {
    if (known.step == save.step && known.epoch != save.epoch &&
        known.state == SaveState::kCommitted) {
      known.state = SaveState::kBad;
      change.saves.push_back(known);
    }
  }
}

JobEventRecord SaveEvent(const JobRecord& job,
                         const SaveKey& key,
                         const std::string& type,
                         int64_t now_ms) {
  JobEventRecord event;
  event.time_ms = now_ms;
  event.job_uid = job.uid;
  event.epoch = key.epoch;
  event.attempt = job.attempt;
  event.step = key.step;
  event.type = type;
  return event;
}

bool IsOpen(const OperationRecord& operation) {
  return operation.state != OperationState::kCommitted &&
         operation.state != OperationState::kFailed;
}

// Deadline of an operation whose request does not say one.
constexpr int64_t kDeadlineMs = 10 * 60 * 1000;

// At most one SaveSkipped event in an interval between saves, or in a minute.
constexpr int64_t kLeastSkipIntervalMs = 60 * 1000;

}  // namespace

void JobController::RequestSave(Entry& entry, bool then_stop) {
  entry.run.sequence += 1;
  entry.run.then_stop = entry.run.then_stop || then_stop;
  entry.run.save_ms = parts_.clock->MonotonicMs();
  SendToNodes(entry,
              {entry.record.uid, entry.run.epoch, -1, SaveTrainer{entry.run.sequence, then_stop}});
}

SaveCoordinator& JobController::SavesOf(Entry& entry) {
  entry.saves.Enter(entry.run.epoch, static_cast<int64_t>(entry.run.slots.size()));
  return entry.saves;
}

void JobController::CheckSaves(Entry& entry) {
  JobRun& run = entry.run;
  const int64_t now_ms = parts_.clock->MonotonicMs();
  const int64_t every_ms = entry.record.spec.checkpoint.every_ms;
  SaveCoordinator& saves = SavesOf(entry);
  if (entry.record.state == JobState::kRunning && run.phase == RunPhase::kTraining &&
      every_ms > 0 && now_ms - run.save_ms >= every_ms && saves.idle()) {
    RequestSave(entry, false);
  }
  for (const EndedSave& ended : saves.Expire(now_ms, options_.save_timeout_ms)) {
    EndSave(entry, ended);
  }
  CommitNext(entry);
  CheckFreshness(entry);
}

void JobController::CheckpointNow(const JobKey& key,
                                  const std::string& request_id,
                                  int64_t deadline_ms,
                                  Answer<OperationRecord> answer) {
  std::optional<RequestRecord> request = BeginRequest(
      key,
      {request_id, "CheckpointNow"},
      [=, this] { CheckpointNow(key, request_id, deadline_ms, answer); },
      [this, answer](const absl::StatusOr<std::string>& known) {
        answer(known.ok() ? GetOperation(*known) : known.status());
      });
  if (!request) {
    return;
  }
  const std::string uid = request->answer;
  const auto operation = std::make_shared<OperationRecord>();
  Step step{MakeEvent(JobEventKind::kNoted), {}, {}};
  step.extra.request = std::move(request);
  step.check = [this, uid, deadline_ms, operation](Step& asked) -> absl::Status {
    ASSIGN_OR_RETURN(*operation, BeginOperation(entries_.at(uid)));
    operation->deadline_ms = operation->created_ms + (deadline_ms > 0 ? deadline_ms : kDeadlineMs);
    asked.extra.operations.push_back(*operation);
    asked.extra.request->answer = operation->id;
    return absl::OkStatus();
  };
  // No other step of the job came in between: what it was promised still holds.
  step.after = [this, uid, operation] {
    NoteOperation(*operation);
    ShowOperation(*operation);
    Entry& job = entries_.at(uid);
    if (operation->sequence > job.run.sequence) {
      RequestSave(job, false);
    }
  };
  Ask(entries_.at(uid), std::move(step), request_id, [=](const absl::Status& status) {
    answer(status.ok() ? absl::StatusOr<OperationRecord>(*operation) : status);
  });
}

absl::StatusOr<OperationRecord> JobController::BeginOperation(Entry& entry) {
  OperationRecord operation;
  operation.id = NewId();
  operation.job_uid = entry.record.uid;
  operation.created_ms = parts_.clock->WallMs();
  const JobState state = entry.record.state;
  const int64_t committed_step = entry.record.committed_step;
  const bool training = entry.run.phase == RunPhase::kTraining;
  if (training && state == JobState::kRunning) {
    operation.sequence = entry.run.sequence + 1;
    return operation;
  }
  // The last save of this run is on its way: steps were trained since the newest commit.
  const bool resizing = training && state == JobState::kResizing &&
                        SavesOf(entry).committed_sequence() < entry.run.sequence;
  const bool finishing =
      training && state == JobState::kFinishing && committed_step < entry.record.spec.steps;
  if (resizing || finishing) {
    operation.sequence = entry.run.sequence;
    return operation;
  }
  if (HoldsDevices(state) && state != JobState::kStopping && committed_step >= 0) {
    // Nothing was trained since that commit: it is the answer.
    operation.state = OperationState::kCommitted;
    operation.step = committed_step;
    return operation;
  }
  return absl::FailedPreconditionError(
      absl::StrCat("job ", entry.record.name, " is not training: ", std::string(StateName(state))));
}

void JobController::NoteOperation(const OperationRecord& operation) {
  operations_[operation.id] = operation;
  if (IsOpen(operation)) {
    open_operations_.insert(operation.id);
  } else {
    open_operations_.erase(operation.id);
  }
}

void JobController::ShowOperation(const OperationRecord& operation) {
  shown_operations_[operation.id] = operation;
}

void JobController::ExpireOperations() {
  const int64_t now_ms = parts_.clock->WallMs();
  for (const std::string& id : std::set(open_operations_)) {
    OperationRecord operation = operations_.at(id);
    const auto found = entries_.find(operation.job_uid);
    if (operation.deadline_ms == 0) {
      operation.deadline_ms = operation.created_ms + kDeadlineMs;
    }
    if (now_ms < operation.deadline_ms || found == entries_.end()) {
      continue;
    }
    const Entry& entry = found->second;
    const std::string phase =
        entry.saves.WaitsFor(operation, entry.run.phase == RunPhase::kTraining);
    operation.state = OperationState::kFailed;
    operation.reason = absl::StrCat("DeadlineExceeded: after ",
                                    (operation.deadline_ms - operation.created_ms + 500) / 1000,
                                    " s it is ",
                                    phase);
    SaveOperation(operation);
  }
}

void JobController::SaveOperation(const OperationRecord& operation) {
  NoteOperation(operation);
  const auto change = std::make_shared<StoreChange>();
  change->operations.push_back(operation);
  Persist(change, [this, operation](const absl::Status& status) {
    if (!operations_.contains(operation.id)) {
      return;  // its job is gone
    }
    if (!status.ok()) {
      log::Warning(absl::StrCat(
          "operation ", operation.id, " is stored later: ", std::string(status.message())));
      unsaved_operations_.insert(operation.id);
      return;
    }
    ShowOperation(operation);
    feed_.Publish(operation.job_uid, operation);
  });
}

void JobController::SaveOperationsAgain() {
  for (const std::string& id : std::exchange(unsaved_operations_, {})) {
    const OperationRecord operation = operations_.at(id);
    SaveOperation(operation);
  }
}

void JobController::FinishOperations(const std::string& uid,
                                     int64_t up_to_sequence,
                                     OperationState state,
                                     const std::string& reason,
                                     int64_t step,
                                     const std::string& save_id) {
  std::vector<OperationRecord> changed;
  for (const std::string& id : open_operations_) {
    const OperationRecord& operation = operations_.at(id);
    if (operation.job_uid == uid && operation.sequence <= up_to_sequence) {
      changed.push_back(operation);
    }
  }
  for (OperationRecord& operation : changed) {
    operation.state = state;
    operation.reason = state == OperationState::kFailed ? reason : "";
    operation.step = step >= 0 ? step : operation.step;
    operation.save_id = save_id.empty() ? operation.save_id : save_id;
    SaveOperation(operation);
  }
}

void JobController::OnSaveStarted(Entry& entry, const SaveStarted& started) {
  SavesOf(entry).OnStarted(started, parts_.clock->MonotonicMs(), saves_[entry.record.uid]);
  entry.goodput.NoteSave(started.step);
  std::vector<OperationRecord> changed;
  for (const std::string& id : open_operations_) {
    const OperationRecord& operation = operations_.at(id);
    if (operation.job_uid == entry.record.uid && operation.state == OperationState::kAccepted &&
        operation.sequence <= started.sequence) {
      changed.push_back(operation);
    }
  }
  for (OperationRecord& operation : changed) {
    operation.state = OperationState::kWriting;
    operation.step = started.step;
    SaveOperation(operation);
  }
}

void JobController::AnswerSeal(Entry& entry, int64_t rank, CommitResult answer) {
  SendToNode(entry.run.slots[static_cast<size_t>(rank)].place.node_id,
             TrainerCommand{entry.record.uid, entry.run.epoch, rank, std::move(answer)});
}

void JobController::OnSeal(Entry& entry, int64_t rank, const ckpt::Seal& seal) {
  if (seal.epoch != entry.run.epoch || seal.writer != rank || seal.step < 0) {
    ++stale_refused_;
    log::Warning(absl::StrCat("job ",
                              entry.record.name,
                              ": a seal of rank ",
                              rank,
                              " for step ",
                              seal.step,
                              ", epoch ",
                              seal.epoch,
                              ", writer ",
                              seal.writer,
                              " was refused"));
    return;
  }
  const int64_t now_ms = parts_.clock->MonotonicMs();
  const SealAnswer answer = SavesOf(entry).OnSeal(
      rank, seal, entry.record.committed_step, now_ms, saves_[entry.record.uid]);
  if (answer.kind == SealAnswer::Kind::kKept) {
    entry.run.progress_ms = now_ms;
  } else {
    const bool committed = answer.kind == SealAnswer::Kind::kCommitted;
    AnswerSeal(entry, rank, {seal.step, committed, answer.reason});
  }
  if (answer.all_ended) {
    RemoveAttempt(entry, {seal.step, seal.epoch, seal.attempt}, false);
  }
  CommitNext(entry);
}

void JobController::OnSaveFailed(Entry& entry, int64_t rank, const SaveFailed& failed) {
  const SaveKey key{failed.step, entry.run.epoch, failed.attempt};
  const SaveFailureAnswer answer = SavesOf(entry).OnFailed(rank, failed, saves_[entry.record.uid]);
  if (answer.skipped) {
    const int64_t now_ms = parts_.clock->WallMs();
    const int64_t interval_ms =
        std::max(kLeastSkipIntervalMs, entry.record.spec.checkpoint.every_ms);
    Publish(entry);
    if (entry.skip_told_ms == 0 || now_ms - entry.skip_told_ms >= interval_ms) {
      entry.skip_told_ms = now_ms;
      Step step{MakeEvent(JobEventKind::kPlaced), {}, {}};  // of no size: no transition
      JobEventRecord event = SaveEvent(entry.record, key, "SaveSkipped", now_ms);
      event.reason = failed.reason;
      event.rank = rank;
      event.node = entry.run.slots[static_cast<size_t>(rank)].place.node_id;
      event.message = failed.message;
      step.extra.events.push_back(std::move(event));
      Do(entry, std::move(step));
    }
    return;
  }
  if (answer.ended) {
    EndSave(entry, *answer.ended);
  } else if (answer.all_ended) {
    RemoveAttempt(entry, key, false);
  }
}

void JobController::AddRecord(const SaveRecord& record) {
  std::vector<SaveRecord>& records = saves_[record.job_uid];
  const auto known = std::find_if(records.begin(), records.end(), [&](const SaveRecord& other) {
    return KeyOf(other) == KeyOf(record);
  });
  if (known == records.end()) {
    records.push_back(record);
  } else {
    *known = record;
  }
  entries_.at(record.job_uid).save_counts = CountSaves(records);
}

void JobController::EndSave(Entry& entry, const EndedSave& ended) {
  const int64_t now_ms = parts_.clock->WallMs();
  SaveRecord record;
  record.job_uid = entry.record.uid;
  record.step = ended.key.step;
  record.epoch = ended.key.epoch;
  record.attempt = ended.key.attempt;
  record.state = SaveState::kFailed;
  record.world_size = static_cast<int64_t>(entry.run.slots.size());
  record.created_ms = now_ms;
  record.reason = absl::StrCat(ended.reason, ": ", ended.message);
  AddRecord(record);
  // Training goes on: no transition, but an event.
  Step step{MakeEvent(JobEventKind::kPlaced), {}, {}};
  JobEventRecord event = SaveEvent(entry.record, ended.key, "CheckpointFailed", now_ms);
  event.reason = ended.reason;
  event.message = ended.message;
  if (ended.rank >= 0) {
    event.rank = ended.rank;
    event.node = entry.run.slots[static_cast<size_t>(ended.rank)].place.node_id;
    event.message = absl::StrCat("rank ", ended.rank, " on ", event.node, ": ", ended.message);
  }
  const std::string reason = absl::StrCat(ended.reason, ": ", event.message);
  log::Warning(absl::StrCat(
      "job ", entry.record.name, ": the save of step ", ended.key.step, " failed: ", reason));
  step.extra.saves.push_back(std::move(record));
  step.extra.events.push_back(std::move(event));
  Do(entry, std::move(step));
  SendToNodes(entry,
              {entry.record.uid, entry.run.epoch, -1, CommitResult{ended.key.step, false, reason}});
  FinishOperations(
      entry.record.uid, ended.sequence, OperationState::kFailed, reason, ended.key.step, "");
  entry.run.save_ms = parts_.clock->MonotonicMs();
  RemoveAttempt(entry, ended.key, ended.reason == "StoreFull");
  CheckFreshness(entry);
}

void JobController::RemoveAttempt(Entry& entry, const SaveKey& key, bool make_room) {
  const std::string uid = entry.record.uid;
  const CheckpointJob job = CheckpointsOf(entry.record);
  StorePool(job.spec, StoreWork::kUpkeep)->Post([this, uid, job, key, make_room] {
    const absl::Status removed =
        parts_.keeper->RemoveAttempt(job, {key.step, key.epoch, key.attempt, {}});
    parts_.strand->Post([this, uid, key, removed, make_room] {
      if (!removed.ok() && !absl::IsNotFound(removed)) {
        log::Warning(absl::StrCat("the failed save of step ",
                                  key.step,
                                  " is removed later: ",
                                  std::string(removed.message())));
      }
      Entry* found = FindEntry(uid);
      if (make_room && found != nullptr) {
        Retain(*found, true);
      }
    });
  });
}

void JobController::CommitNext(Entry& entry) {
  if (entry.run.world == nullptr) {
    return;  // an adopted run: seals wait until its plan is known
  }
  if (const std::optional<SaveKey> key = SavesOf(entry).NextCommit()) {
    StartCommit(entry, *key);
  }
}

void JobController::StartCommit(Entry& entry, const SaveKey& key) {
  const int64_t sequence = entry.saves.pending().at(key).sequence;
  SaveRecord save;
  save.job_uid = entry.record.uid;
  save.step = key.step;
  save.epoch = key.epoch;
  save.attempt = key.attempt;
  save.world_size = static_cast<int64_t>(entry.run.slots.size());
  save.created_ms = parts_.clock->WallMs();
  // Until the result is there: the next epoch waits for it, also while the intent is on its way.
  entry.run.committing += 1;
  const auto request = std::make_shared<SaveRequest>(SaveRequest{
      save.job_uid, save.step, save.epoch, save.attempt, save.created_ms, entry.run.world, {}});
  request->seals = entry.saves.TakeSeals(key);
  Step step{MakeEvent(JobEventKind::kNoted), {}, {}};
  step.extra.saves.push_back(save);
  step.after = [this, save, sequence, request] {
    AddRecord(save);
    NoteSealed(save, sequence);
    Commit(save, sequence, request);
  };
  // Without the intent nothing is done: the trainers go on, and this save did not happen.
  step.failed = [this, save, sequence](const absl::Status& status) {
    OnCommitted(save.job_uid, save, status, sequence);
  };
  Do(entry, std::move(step));
}

void JobController::NoteSealed(const SaveRecord& save, int64_t sequence) {
  for (const std::string& id : std::set(open_operations_)) {
    const OperationRecord& operation = operations_.at(id);
    if (operation.job_uid == save.job_uid && operation.sequence <= sequence &&
        (operation.state == OperationState::kAccepted ||
         operation.state == OperationState::kWriting)) {
      OperationRecord sealed = operation;
      sealed.state = OperationState::kSealed;
      sealed.step = save.step;
      SaveOperation(sealed);
    }
  }
}

void JobController::Commit(const SaveRecord& save,
                           int64_t sequence,
                           const std::shared_ptr<SaveRequest>& request) {
  const CheckpointJob job = CheckpointsOf(entries_.at(save.job_uid).record);
  StorePool(job.spec, StoreWork::kCommit)->Post([this, job, save, sequence, request] {
    absl::StatusOr<CommittedSave> result = parts_.keeper->Commit(job, *request);
    parts_.strand->Post([this, save, sequence, result] {
      Entry* found = FindEntry(save.job_uid);
      OnCommitted(save.job_uid, save, result, sequence);
      Reconcile(*found);
      Schedule();
    });
  });
}

void JobController::OnCommitted(const std::string& uid,
                                SaveRecord save,
                                absl::StatusOr<CommittedSave> result,
                                int64_t sequence) {
  Entry& entry = entries_.at(uid);
  save.state = result.ok() ? SaveState::kCommitted : SaveState::kFailed;
  save.reason = result.ok() ? "" : std::string(result.status().message());
  // After an outage seals come of saves that are gone, in front of those that are there.
  const bool replaced = absl::IsNotFound(result.status()) && entry.saves.HasNewerWhole(KeyOf(save));
  if (replaced) {
    save.reason = kReplacedInOutage;
  }
  if (result.ok()) {
    save.path = result->path;
    save.bytes = result->bytes;
    save.files = result->files;
    save.save_id = result->save_id;
    save.mesh = result->mesh;
  }
  AddRecord(save);
  Step step;
  step.extra.saves.push_back(save);
  if (result.ok()) {
    NoteReplaced(saves_[uid], save, step.extra);
    step.event = MakeEvent(JobEventKind::kCommitted);
    step.event.step = save.step;
    step.event.path = save.path;
  } else {
    // No transition: training goes on, and says so.
    step.event = MakeEvent(JobEventKind::kPlaced);
    step.event.world_size = 0;
    if (!replaced) {
      step.extra.events.push_back(
          SaveEvent(entry.record, KeyOf(save), "CheckpointFailed", step.event.now_ms));
      step.extra.events.back().reason = "CommitFailed";
      step.extra.events.back().message = save.reason;
    }
    log::Warning(absl::StrCat(
        "job ", entry.record.name, ": the save of step ", save.step, " failed: ", save.reason));
  }
  step.after = [this, uid, save, sequence] {
    Entry& job = entries_.at(uid);
    job.run.save_ms = parts_.clock->MonotonicMs();
    const bool committed = save.state == SaveState::kCommitted;
    for (const EndedSave& older : job.saves.OnResult(KeyOf(save), committed)) {
      RemoveAttempt(job, older.key, false);
    }
    FinishOperations(uid,
                     sequence,
                     committed ? OperationState::kCommitted : OperationState::kFailed,
                     save.reason,
                     save.step,
                     save.save_id);
    if (job.run.epoch == save.epoch) {
      SendToNodes(job, {uid, save.epoch, -1, CommitResult{save.step, committed, save.reason}});
    }
    if (committed) {
      Retain(job, false);
    } else if (sequence >= 0) {  // else of another coordinator's time: the next launch decides
      RemoveAttempt(job, KeyOf(save), false);
    }
    CheckFreshness(job);
    CommitNext(job);
  };
  // A quiesced job waits for the record of its commit: that step is queued before the count falls.
  Do(entry, std::move(step));
  entry.run.committing -= 1;
}

void JobController::CheckFreshness(Entry& entry) {
  FreshnessInput input;
  input.spec = &entry.record.spec.checkpoint;
  input.counts = entry.save_counts;
  input.step = entry.record.committed_step;
  input.now_ms = parts_.clock->WallMs();
  input.trained_since_ms = entry.run.trained_since_ms;
  JobCondition now = CheckpointFresh(input);
  now.time_ms = input.now_ms;
  if (SetCondition(entry.conditions, std::move(now))) {
    Publish(entry);
  }
  // Also at the last save: without it the job would train its last steps again and again.
  const JobState state = entry.record.state;
  const bool training = (state == JobState::kRunning || state == JobState::kFinishing) &&
                        entry.run.phase == RunPhase::kTraining;
  const std::optional<SaveLimit> passed = training ? PassedLimit(input) : std::nullopt;
  if (passed && !entry.run.failure) {
    entry.run.Blame({passed->reason, passed->message, "", -1, entry.progress.step});
  }
}

}  // namespace ravel::coordinator
