// JobController: how jobs and what belongs to them go away again: by a verb, by themselves some
// time after their end, and old rows of jobs that stay.

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include <absl/strings/str_cat.h>

#include "common/logging.h"
#include "coordinator/jobs/job_controller.h"

namespace ravel::coordinator {
namespace {

constexpr int kJobsPerTick = 20;
constexpr int kSweepsPerTick = 2;             // each is work for the writer
constexpr int64_t kSweepMs = 10 * 60 * 1000;  // a job's rows are looked at so often, at most
constexpr int64_t kRetryMs = 5 * 1000;        // of a deletion that the store refused
constexpr int64_t kDayMs = int64_t{24} * 3600 * 1000;

bool IsOver(const OperationRecord& operation) {
  return operation.state == OperationState::kCommitted ||
         operation.state == OperationState::kFailed;
}

}  // namespace

absl::Status JobController::CheckDelete(const JobRecord& job, bool force) {
  if (!IsTerminal(job.state) && !force) {
    return absl::FailedPreconditionError(
        absl::StrCat("job ",
                     job.name,
                     " is ",
                     std::string(StateName(job.state)),
                     "; cancel it first, or delete it with force"));
  }
  return absl::OkStatus();
}

void JobController::Delete(const JobKey& key, const DeleteDraft& draft, Answer<JobView> answer) {
  if (WaitsFor(RequestName(draft.request_id), [=, this] { Delete(key, draft, answer); })) {
    return;
  }
  const std::string hash = absl::StrCat("DeleteJob ", key.namespace_name, "/", key.name);
  const absl::StatusOr<std::optional<std::string>> known = KnownAnswer(draft.request_id, hash);
  if (!known.ok()) {
    answer(known.status());
    return;
  }
  Entry* entry = *known ? FindEntry(**known) : FindEntry(key);
  if (entry == nullptr) {
    answer(NoJob(key));
    return;
  }
  const absl::Status allowed = CheckDelete(entry->record, draft.force);
  if (!allowed.ok()) {
    answer(allowed);
    return;
  }
  const std::string uid = entry->record.uid;
  Step step = DeleteStep(uid, draft);
  if (!*known) {
    step.extra.request = RequestRecord{draft.request_id, hash, uid, parts_.clock->WallMs()};
  }
  Ask(*entry, std::move(step), draft.request_id, [=, this](const absl::Status& status) {
    WithView(uid, answer)(status);
    if (Entry* found = FindEntry(uid)) {
      TryDelete(*found);
    }
  });
}

// Notes the wish, and cancels the job if it is not over.
JobController::Step JobController::DeleteStep(const std::string& uid, const DeleteDraft& draft) {
  Step step{MakeEvent(JobEventKind::kNoted), {}, {}};
  step.event.cause.message = draft.reason.empty() ? "deleted by user" : draft.reason;
  const DeleteWish wish =
      draft.with_checkpoints ? DeleteWish::kWithCheckpoints : DeleteWish::kKeepCheckpoints;
  step.check = [this, uid, wish, force = draft.force](Step& asked) -> absl::Status {
    const JobRecord& job = entries_.at(uid).record;
    RETURN_IF_ERROR(CheckDelete(job, force));
    if (!IsTerminal(job.state)) {
      asked.event.kind = JobEventKind::kCancelRequested;
    }
    if (job.delete_wish < wish) {
      asked.edit = [wish](JobRecord& record) { record.delete_wish = wish; };
      log::Info(absl::StrCat("job ", job.name, ": to be deleted"));
    } else {
      asked.extra.request.reset();
    }
    return absl::OkStatus();
  };
  return step;
}

void JobController::Retain(Entry& entry, bool save_after) {
  if (entry.record.rollback_step >= 0) {
    return;  // the steps above it are not the newest any more: the next launch moves them aside
  }
  if (!entry.retention.Begin(save_after)) {
    return;
  }
  const std::string uid = entry.record.uid;
  const CheckpointJob job = CheckpointsOf(entry.record);
  const bool restoring =
      entry.run.phase == RunPhase::kPreparing || entry.run.phase == RunPhase::kBootstrapping;
  const int64_t in_use = restoring ? entry.run.restore_step : -1;
  StorePool(job.spec, StoreWork::kUpkeep)->Post([this, uid, job, in_use] {
    absl::StatusOr<std::vector<int64_t>> deleted = parts_.keeper->Retain(job, in_use);
    parts_.strand->Post([this, uid, deleted] {
      if (Entry* found = FindEntry(uid)) {
        OnRetained(*found, deleted);
      }
    });
  });
}

void JobController::OnRetained(Entry& entry, const absl::StatusOr<std::vector<int64_t>>& deleted) {
  if (!deleted.ok()) {
    const int64_t now_ms = parts_.clock->MonotonicMs();
    const int64_t due_ms = entry.retention.EndFailed(now_ms);
    log::Warning(absl::StrCat("job ",
                              entry.record.name,
                              ": old steps stay for another ",
                              (due_ms - now_ms) / 1000,
                              " s: ",
                              std::string(deleted.status().message())));
    Wake(entry, due_ms);
    return;
  }
  const bool again = entry.retention.EndOk();
  const bool save_after = entry.retention.TakeSaveAfter() && !deleted->empty();
  const std::string uid = entry.record.uid;
  StoreChange change;
  for (SaveRecord& save : saves_[uid]) {
    const bool gone = std::find(deleted->begin(), deleted->end(), save.step) != deleted->end();
    if (gone && save.state == SaveState::kCommitted) {
      save.state = SaveState::kDeleted;
      change.saves.push_back(save);
    }
  }
  if (!change.saves.empty()) {
    // Behind the commits that still wait for the database: these would undo it.
    Do(entry, Step{MakeEvent(JobEventKind::kNoted), std::move(change), {}});
  }
  Entry* found = FindEntry(uid);
  if (save_after && found != nullptr && found->record.state == JobState::kRunning &&
      found->run.phase == RunPhase::kTraining) {
    RequestSave(*found, false);  // there is room now
  }
  found = FindEntry(uid);
  if (again && found != nullptr) {
    Retain(*found, false);
  }
}

bool JobController::IsQuiet(const Entry& entry) const {
  return IsTerminal(entry.record.state) && entry.run.AllExited() && entry.preparing == 0 &&
         entry.run.committing == 0 && !entry.settling && IsIdle(entry) &&
         !stale_.Of(entry.record.uid);
}

void JobController::TryDelete(Entry& entry) {
  const int64_t now_ms = parts_.clock->WallMs();
  if (entry.record.delete_wish == DeleteWish::kNone || entry.deleting || !IsQuiet(entry) ||
      now_ms < entry.delete_after_ms) {
    return;
  }
  const bool never_ran = entry.record.started_ms == 0;  // then it has no steps
  if (entry.record.delete_wish == DeleteWish::kKeepCheckpoints || never_ran) {
    if (entry.release.TakeLastTry()) {
      ReleaseCheckpoints(entry, StoreWork::kRestore);  // and comes back here
      return;
    }
    Forget(entry);
    return;
  }
  entry.deleting = true;
  StorePool(entry.record.spec, StoreWork::kUpkeep)
      ->Post([this, uid = entry.record.uid, job = CheckpointsOf(entry.record)] {
        const absl::Status removed = parts_.keeper->RemoveAll(job);
        parts_.strand->Post([this, uid, removed] {
          Entry* found = FindEntry(uid);
          if (found == nullptr) {
            return;
          }
          found->deleting = false;
          if (removed.ok() || absl::IsNotFound(removed)) {
            Forget(*found);
            return;
          }
          found->delete_after_ms = parts_.clock->WallMs() + kRetryMs;
          log::Warning(absl::StrCat("job ",
                                    found->record.name,
                                    ": its checkpoints could not be deleted: ",
                                    std::string(removed.message())));
        });
      });
}

// A step like any other: what is asked of the job behind it finds it gone.
void JobController::Forget(Entry& entry) {
  const std::string uid = entry.record.uid;
  Step step{MakeEvent(JobEventKind::kNoted), {}, {}};
  step.extra.deleted_jobs.push_back(uid);
  step.extra.deleted_ms = step.event.now_ms;
  step.after = [this, uid] { Remove(uid); };
  step.failed = [this, uid, now_ms = step.event.now_ms](const absl::Status& status) {
    Entry& job = entries_.at(uid);
    job.delete_after_ms = now_ms + kRetryMs;
    log::Warning(absl::StrCat(
        "job ", job.record.name, ": not deleted yet: ", std::string(status.message())));
  };
  Do(entry, std::move(step));
}

void JobController::Remove(const std::string& uid) {
  Entry* entry = FindEntry(uid);
  const std::string name = entry->record.name;
  for (Step& late : std::exchange(entry->waiting, {})) {
    if (late.failed) {
      late.failed(absl::NotFoundError(absl::StrCat("job ", name, " is deleted")));
    }
  }
  const std::vector<std::function<void()>> answers = std::move(entry->answers);
  const auto remove = [metrics = parts_.metrics, logs = parts_.logs, uid] {
    metrics->Remove(uid);
    logs->Remove(uid);
  };
  if (parts_.files == nullptr) {
    remove();
  } else {
    parts_.files->Post(remove);  // after what is being written
  }
  feed_.Publish(uid, FeedEnd());
  for (const auto& [id, node] : membership_.nodes()) {
    if (node.stream) {
      Send(*node.stream, ForgetJob{uid});
    }
  }
  by_age_.erase({entry->record.created_ms, uid});
  by_name_.erase({entry->record.namespace_name, name});
  WatchNodes(*entry, {});
  scheduler_.Unwant(uid);
  scheduler_.Hold(uid, {});
  std::erase_if(launches_, [&](const auto& sent) { return sent.second.job_uid == uid; });
  for (auto& [node_id, uids] : launching_) {
    uids.erase(uid);
  }
  const auto is_its = [&](const std::string& id) { return operations_.at(id).job_uid == uid; };
  std::erase_if(open_operations_, is_its);
  std::erase_if(unsaved_operations_, is_its);
  const auto of_it = [&](const auto& item) { return item.second.job_uid == uid; };
  std::erase_if(operations_, of_it);
  std::erase_if(shown_operations_, of_it);
  saves_.erase(uid);
  entries_.erase(uid);
  log::Info(absl::StrCat("job ", name, " (", uid, "): deleted"));
  for (const std::function<void()>& answer : answers) {
    answer();
  }
}

void JobController::SweepJobs() {
  const int64_t now_ms = parts_.clock->WallMs();
  std::vector<std::string> due;
  auto at = by_age_.upper_bound(swept_);
  for (int i = 0; i < kJobsPerTick && at != by_age_.end(); ++i, ++at) {
    due.push_back(at->uid);
    swept_ = *at;
  }
  if (at == by_age_.end()) {
    swept_ = JobCursor();
  }
  int sweeps = 0;
  for (const std::string& uid : due) {
    Entry& entry = entries_.at(uid);
    const JobRecord& record = entry.record;
    if (record.delete_wish == DeleteWish::kNone && IsTerminal(record.state) &&
        record.spec.ttl_ms > 0 && now_ms - record.finished_ms >= record.spec.ttl_ms) {
      entry.record.delete_wish = DeleteWish::kKeepCheckpoints;  // follows from what is durable
    }
    if (now_ms - entry.swept_ms >= kSweepMs && sweeps < kSweepsPerTick) {
      ++sweeps;
      entry.swept_ms = now_ms;
      SweepRows(entry, now_ms);
    }
    TryRelease(entry);
    TryDelete(entry);
  }
  if (now_ms - requests_swept_ms_ >= kSweepMs) {
    requests_swept_ms_ = now_ms;
    Sweep([policy = Retention(now_ms)](JobStore& store) {
      return store.SweepRequests(policy).status();
    });
    SweepNodes(now_ms);
  }
}

void JobController::SweepNodes(int64_t now_ms) {
  std::vector<std::string> old;
  for (const auto& [id, node] : membership_.nodes()) {
    if (node.IsGone() && node.hold == NodeHold::kNone &&
        now_ms - std::max(node.heard_wall_ms, node.remembered_wall_ms) >= options_.lost_node_ms) {
      old.push_back(id);
    }
  }
  for (const std::string& id : old) {
    ForgetNode(id, [](const absl::Status&) {});  // tried again by the next sweep
  }
}

void JobController::ForgetNode(const std::string& node_id, StatusAnswer answer) {
  const auto compose = [this, node_id]() -> absl::StatusOr<StoreChange> {
    const NodeRecord* node = membership_.Find(node_id);
    if (node == nullptr) {
      return absl::NotFoundError(absl::StrCat("no node named ", node_id));
    }
    if (!node->IsGone()) {
      return absl::FailedPreconditionError(absl::StrCat("node ",
                                                        node_id,
                                                        " is ",
                                                        std::string(NodeStateName(node->state)),
                                                        ", neither LOST nor LEFT"));
    }
    if (node->hold != NodeHold::kNone) {
      const bool drained = node->hold == NodeHold::kDrained;
      return absl::FailedPreconditionError(
          absl::StrCat("node ",
                       node_id,
                       drained ? " is drained" : " is quarantined",
                       node->hold_reason.empty() ? "" : ": ",
                       node->hold_reason,
                       "; a forgotten node is a new one, which takes work when it joins again. To "
                       "forget it, lift that first: `ravelctl nodes ",
                       drained ? "undrain " : "release ",
                       node_id,
                       "`"));
    }
    StoreChange change;
    change.deleted_nodes.push_back(node_id);
    return change;
  };
  WriteNode(node_id, {compose, [this, node_id, answer](const absl::Status& status) {
                        const NodeRecord* node = membership_.Find(node_id);
                        if (status.ok() && node != nullptr && node->IsGone()) {
                          membership_.Forget(node_id);
                          known_nodes_.erase(node_id);
                          penalties_.Clear(node_id);
                          log::Info(absl::StrCat("node ", node_id, " is forgotten"));
                        }  // else it is back, and its row is written next
                        answer(status);
                      }});
}

RowRetention JobController::Retention(int64_t now_ms) const {
  RowRetention policy = options_.retention;
  policy.now_ms = now_ms;
  return policy;
}

void JobController::Sweep(std::function<absl::Status(JobStore&)> work) {
  parts_.writer->Add({.work = std::move(work), .done = [](const absl::Status& status) {
                        if (!status.ok()) {
                          log::Warning(
                              absl::StrCat("old rows stay: ", std::string(status.message())));
                        }
                      }});
}

void JobController::SweepRows(Entry& entry, int64_t now_ms) {
  const RowRetention policy = Retention(now_ms);
  Sweep([uid = entry.record.uid, policy](JobStore& store) {
    return store.SweepJob(uid, policy).status();
  });
  const int64_t oldest_ms = now_ms - policy.operation_days * kDayMs;
  const auto is_old = [&](const auto& item) {
    return item.second.job_uid == entry.record.uid && IsOver(item.second) &&
           item.second.created_ms < oldest_ms && !unsaved_operations_.contains(item.first);
  };
  std::erase_if(operations_, is_old);
  std::erase_if(shown_operations_, is_old);
  const auto saves = saves_.find(entry.record.uid);
  if (saves != saves_.end()) {
    const int64_t oldest_save_ms = now_ms - policy.save_days * kDayMs;
    std::erase_if(saves->second, [&](const SaveRecord& save) {
      return IsGone(save) && save.created_ms < oldest_save_ms;
    });
    entry.save_counts = CountSaves(saves->second);
  }
}

}  // namespace ravel::coordinator
