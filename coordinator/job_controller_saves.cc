// JobController: saves, from the request to retention.

#include <utility>

#include <absl/strings/str_cat.h>

#include "common/crypto.h"
#include "common/logging.h"
#include "coordinator/job_controller.h"

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

JobEventRecord FailedSave(const JobRecord& job, const SaveRecord& save, int64_t now_ms) {
  JobEventRecord event;
  event.time_ms = now_ms;
  event.job_uid = job.uid;
  event.epoch = save.epoch;
  event.attempt = job.attempt;
  event.step = save.step;
  event.type = "CheckpointFailed";
  event.message = save.reason;
  return event;
}

}  // namespace

void JobController::RequestSave(Entry& entry, bool then_stop) {
  entry.run.sequence += 1;
  entry.run.then_stop = entry.run.then_stop || then_stop;
  entry.run.save_ms = parts_.clock->MonotonicMs();
  SendToNodes(entry,
              {entry.record.uid, entry.run.epoch, -1, SaveTrainer{entry.run.sequence, then_stop}});
}

void JobController::CheckSaves(Entry& entry) {
  JobRun& run = entry.run;
  const int64_t now_ms = parts_.clock->MonotonicMs();
  const int64_t every_ms = entry.record.spec.checkpoint.every_ms;
  if (entry.record.state == JobState::kRunning && run.phase == RunPhase::kTraining &&
      every_ms > 0 && now_ms - run.save_ms >= every_ms && run.saves.empty()) {
    RequestSave(entry, false);
  }
  for (auto save = run.saves.begin(); save != run.saves.end();) {
    if (save->second.committing || now_ms - save->second.since_ms < options_.save_timeout_ms) {
      ++save;
      continue;
    }
    const std::string reason = absl::StrCat("only ",
                                            save->second.seals.size(),
                                            " of ",
                                            run.slots.size(),
                                            " ranks sealed step ",
                                            save->first.first,
                                            " in time");
    log::Warning(absl::StrCat("job ", entry.record.name, ": ", reason));
    FinishOperations(entry.record.uid,
                     save->second.sequence,
                     OperationState::kFailed,
                     reason,
                     save->first.first,
                     "");
    SendToNodes(entry,
                {entry.record.uid, run.epoch, -1, CommitResult{save->first.first, false, reason}});
    save = run.saves.erase(save);
  }
}

absl::StatusOr<OperationRecord> JobController::CheckpointNow(const JobKey& key,
                                                             const std::string& request_id) {
  Entry* entry = FindEntry(key);
  if (entry == nullptr) {
    return absl::NotFoundError(
        absl::StrCat("no job named ", key.name, " in namespace ", key.namespace_name));
  }
  const std::string hash = absl::StrCat("CheckpointNow ", entry->record.uid);
  ASSIGN_OR_RETURN(const std::optional<RequestRecord> known, parts_.store->FindRequest(request_id));
  if (known) {
    return known->hash == hash
               ? GetOperation(known->answer)
               : absl::StatusOr<OperationRecord>(absl::AlreadyExistsError(
                     absl::StrCat("request id ", request_id, " was used for another request")));
  }
  OperationRecord operation;
  operation.id = RandomUuid();
  operation.job_uid = entry->record.uid;
  operation.created_ms = parts_.clock->WallMs();
  const JobState state = entry->record.state;
  const bool training = state == JobState::kRunning && entry->run.phase == RunPhase::kTraining;
  if (training) {
    operation.sequence = entry->run.sequence + 1;
  } else if (HoldsDevices(state) && state != JobState::kStopping &&
             entry->record.committed_step >= 0) {
    // Nothing was trained since that commit: it is the answer.
    operation.state = OperationState::kCommitted;
    operation.step = entry->record.committed_step;
  } else {
    return absl::FailedPreconditionError(
        absl::StrCat("job ", key.name, " is not training: ", std::string(StateName(state))));
  }
  StoreChange change;
  change.operations.push_back(operation);
  change.request = RequestRecord{request_id, hash, operation.id, operation.created_ms};
  RETURN_IF_ERROR(Persist(change));
  operations_[operation.id] = operation;
  if (training) {
    RequestSave(*entry, false);
  }
  return operation;
}

void JobController::SaveOperation(const OperationRecord& operation) {
  operations_[operation.id] = operation;
  StoreChange change;
  change.operations.push_back(operation);
  const absl::Status status = Persist(change);
  if (!status.ok()) {
    log::Warning(absl::StrCat(
        "operation ", operation.id, " could not be stored: ", std::string(status.message())));
  }
  feed_.Publish(operation.job_uid, operation);
}

void JobController::FinishOperations(const std::string& uid,
                                     int64_t up_to_sequence,
                                     OperationState state,
                                     const std::string& reason,
                                     int64_t step,
                                     const std::string& save_id) {
  std::vector<OperationRecord> changed;
  for (const auto& [id, operation] : operations_) {
    const bool open =
        operation.state != OperationState::kCommitted && operation.state != OperationState::kFailed;
    if (operation.job_uid == uid && open && operation.sequence <= up_to_sequence) {
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
  std::vector<OperationRecord> changed;
  for (const auto& [id, operation] : operations_) {
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
  const std::pair<int64_t, int64_t> key{seal.step, seal.attempt};
  PendingSave& save = entry.run.saves[key];
  if (save.seals.empty()) {
    save.since_ms = parts_.clock->MonotonicMs();
  }
  save.sequence = std::max(save.sequence, seal.sequence);
  if (save.committing || !save.seals.emplace(rank, seal).second) {
    return;  // sent again after a broken stream
  }
  entry.run.progress_ms = parts_.clock->MonotonicMs();
  if (save.seals.size() == entry.run.slots.size()) {
    StartCommit(entry, key);
  }
}

void JobController::StartCommit(Entry& entry, std::pair<int64_t, int64_t> key) {
  PendingSave& pending = entry.run.saves[key];
  pending.committing = true;
  SaveRecord save;
  save.job_uid = entry.record.uid;
  save.step = key.first;
  save.epoch = entry.run.epoch;
  save.attempt = key.second;
  save.world_size = static_cast<int64_t>(entry.run.slots.size());
  save.created_ms = parts_.clock->WallMs();
  StoreChange change;
  change.saves.push_back(save);
  const absl::Status intended = Persist(change);
  if (!intended.ok()) {
    // Without the intent nothing is done: the trainers go on, and this save did not happen.
    OnCommitted(save.job_uid, save, intended, pending.sequence);
    return;
  }
  saves_[save.job_uid].push_back(save);
  entry.run.committing += 1;
  SaveRequest request{
      save.job_uid, save.step, save.epoch, save.attempt, save.created_ms, entry.run.world, {}};
  for (auto& [rank, seal] : pending.seals) {
    request.seals.push_back(std::move(seal));
  }
  for (const auto& [id, operation] : std::map(operations_)) {
    if (operation.job_uid == save.job_uid && operation.sequence <= pending.sequence &&
        (operation.state == OperationState::kAccepted ||
         operation.state == OperationState::kWriting)) {
      OperationRecord sealed = operation;
      sealed.state = OperationState::kSealed;
      sealed.step = save.step;
      SaveOperation(sealed);
    }
  }
  const CheckpointJob job = CheckpointsOf(entry.record);
  const int64_t sequence = pending.sequence;
  StorePool(job.spec, StoreWork::kCommit)
      ->Post([this, job, save, sequence, request = std::move(request)] {
        absl::StatusOr<CommittedSave> result = parts_.keeper->Commit(job, request);
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
  // The count falls at the end of this call: a quiesced job waits for the record of its commit.
  const bool counted =
      std::any_of(saves_[uid].begin(), saves_[uid].end(), [&save](const SaveRecord& known) {
        return known.step == save.step && known.epoch == save.epoch &&
               known.attempt == save.attempt;
      });
  save.state = result.ok() ? SaveState::kCommitted : SaveState::kFailed;
  save.reason = result.ok() ? "" : std::string(result.status().message());
  if (result.ok()) {
    save.path = result->path;
    save.bytes = result->bytes;
    save.files = result->files;
    save.save_id = result->save_id;
  }
  for (SaveRecord& known : saves_[uid]) {
    if (known.step == save.step && known.epoch == save.epoch && known.attempt == save.attempt) {
      known = save;
    }
  }
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
    step.extra.events.push_back(FailedSave(entry.record, save, step.event.now_ms));
    log::Warning(absl::StrCat(
        "job ", entry.record.name, ": the save of step ", save.step, " failed: ", save.reason));
  }
  step.after = [this, uid, save, sequence] {
    Entry& job = entries_.at(uid);
    job.run.save_ms = parts_.clock->MonotonicMs();
    job.run.saves.erase({save.step, save.attempt});
    const bool committed = save.state == SaveState::kCommitted;
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
      Retain(job);
    }
  };
  Do(entry, std::move(step));
  if (counted) {
    entry.run.committing -= 1;
  }
}

void JobController::Retain(Entry& entry) {
  const std::string uid = entry.record.uid;
  const CheckpointJob job = CheckpointsOf(entry.record);
  const bool restoring =
      entry.run.phase == RunPhase::kPreparing || entry.run.phase == RunPhase::kBootstrapping;
  const int64_t in_use = restoring ? entry.run.restore_step : -1;
  StorePool(job.spec, StoreWork::kUpkeep)->Post([this, uid, job, in_use] {
    absl::StatusOr<std::vector<int64_t>> deleted = parts_.keeper->Retain(job, in_use);
    parts_.strand->Post([this, uid, deleted] {
      if (!deleted.ok()) {
        log::Warning(absl::StrCat("retention: ", std::string(deleted.status().message())));
        return;
      }
      StoreChange change;
      for (SaveRecord& save : saves_[uid]) {
        const bool gone = std::find(deleted->begin(), deleted->end(), save.step) != deleted->end();
        if (gone && save.state == SaveState::kCommitted) {
          save.state = SaveState::kDeleted;
          change.saves.push_back(save);
        }
      }
      if (!change.saves.empty() && !Persist(change).ok()) {
        log::Warning("deleted checkpoints could not be noted in the database");
      }
    });
  });
}

}  // namespace ravel::coordinator
