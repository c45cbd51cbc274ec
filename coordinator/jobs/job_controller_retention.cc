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
constexpr int kSweepsPerTick = 2;             // each is a transaction
constexpr int64_t kSweepMs = 10 * 60 * 1000;  // a job's rows are looked at so often, at most
constexpr int64_t kRetryMs = 5 * 1000;        // of a deletion that the store refused
constexpr int64_t kDayMs = int64_t{24} * 3600 * 1000;

bool IsOver(const OperationRecord& operation) {
  return operation.state == OperationState::kCommitted ||
         operation.state == OperationState::kFailed;
}

}  // namespace

absl::StatusOr<JobView> JobController::Delete(const JobKey& key, const DeleteDraft& draft) {
  ASSIGN_OR_RETURN(const std::optional<RequestRecord> known,
                   parts_.store->FindRequest(draft.request_id));
  const std::string hash = absl::StrCat("DeleteJob ", key.namespace_name, "/", key.name);
  if (known && known->hash != hash) {
    return absl::AlreadyExistsError(
        absl::StrCat("request id ", draft.request_id, " was used for another request"));
  }
  Entry* entry = known ? FindEntry(known->answer) : FindEntry(key);
  if (entry == nullptr) {
    return absl::NotFoundError(
        absl::StrCat("no job named ", key.name, " in namespace ", key.namespace_name));
  }
  if (!IsTerminal(entry->record.state) && !draft.force) {
    return absl::FailedPreconditionError(
        absl::StrCat("job ",
                     key.name,
                     " is ",
                     std::string(StateName(entry->record.state)),
                     "; cancel it first, or delete it with force"));
  }
  if (!entry->waiting.empty()) {
    return absl::ResourceExhaustedError("the coordinator's database cannot be written");
  }
  const DeleteWish wish =
      draft.with_checkpoints ? DeleteWish::kWithCheckpoints : DeleteWish::kKeepCheckpoints;
  if (!known && entry->record.delete_wish < wish) {
    StoreChange change;
    change.jobs.push_back(entry->record);
    change.jobs.back().delete_wish = wish;
    change.request =
        RequestRecord{draft.request_id, hash, entry->record.uid, parts_.clock->WallMs()};
    RETURN_IF_ERROR(Persist(change));
    entry->record = change.jobs.back();
    log::Info(absl::StrCat("job ", key.name, ": to be deleted"));
  }
  if (!IsTerminal(entry->record.state)) {
    JobEvent event = MakeEvent(JobEventKind::kCancelRequested);
    event.cause.message = draft.reason.empty() ? "deleted by user" : draft.reason;
    Do(*entry, std::move(event));
    Reconcile(*entry);
  }
  const JobView last = ViewOf(*entry);
  TryDelete(*entry);
  return last;
}

bool JobController::IsQuiet(const Entry& entry) const {
  return IsTerminal(entry.record.state) && entry.run.AllExited() && entry.preparing == 0 &&
         entry.run.committing == 0 && !entry.settling && entry.waiting.empty() &&
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
    Forget(entry.record.uid);
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
            Forget(uid);
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

void JobController::Forget(const std::string& deleted) {
  const std::string uid = deleted;  // it may be the entry's own, which goes
  Entry* entry = FindEntry(uid);
  const std::string name = entry->record.name;
  StoreChange change;
  change.deleted_jobs.push_back(uid);
  change.deleted_ms = parts_.clock->WallMs();
  const absl::Status status = Persist(change);
  if (!status.ok()) {
    entry->delete_after_ms = change.deleted_ms + kRetryMs;
    log::Warning(absl::StrCat("job ", name, ": not deleted yet: ", std::string(status.message())));
    return;
  }
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
  std::erase_if(operations_, [&](const auto& item) { return item.second.job_uid == uid; });
  saves_.erase(uid);
  entries_.erase(uid);
  ++resource_version_;
  log::Info(absl::StrCat("job ", name, " (", uid, "): deleted"));
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
    TryDelete(entry);
  }
  if (now_ms - requests_swept_ms_ >= kSweepMs) {
    requests_swept_ms_ = now_ms;
    LogSweep(parts_.store->SweepRequests(Retention(now_ms)));
    SweepNodes(now_ms);
  }
}

void JobController::SweepNodes(int64_t now_ms) {
  std::vector<std::string> old;
  for (const auto& [id, node] : membership_.nodes()) {
    if (node.state == NodeState::kLost && node.hold == NodeHold::kNone &&
        now_ms - node.heard_wall_ms >= options_.lost_node_ms) {
      old.push_back(id);
    }
  }
  for (const std::string& id : old) {
    ForgetNode(id).IgnoreError();  // said by it; tried again by the next sweep
  }
}

absl::Status JobController::ForgetNode(const std::string& node_id) {
  const NodeRecord* node = membership_.Find(node_id);
  if (node == nullptr) {
    return absl::NotFoundError(absl::StrCat("no node named ", node_id));
  }
  if (node->state != NodeState::kLost) {
    return absl::FailedPreconditionError(absl::StrCat(
        "node ", node_id, " is ", std::string(NodeStateName(node->state)), ", not LOST"));
  }
  StoreChange change;
  change.deleted_nodes.push_back(node_id);
  RETURN_IF_ERROR(Persist(change));
  membership_.Forget(node_id);
  known_nodes_.erase(node_id);
  penalties_.Clear(node_id);
  log::Info(absl::StrCat("node ", node_id, " is forgotten"));
  return absl::OkStatus();
}

RowRetention JobController::Retention(int64_t now_ms) const {
  RowRetention policy = options_.retention;
  policy.now_ms = now_ms;
  return policy;
}

void JobController::LogSweep(const absl::StatusOr<int64_t>& rows) {
  if (!rows.ok()) {
    log::Warning(absl::StrCat("old rows stay: ", std::string(rows.status().message())));
  }
}

void JobController::SweepRows(Entry& entry, int64_t now_ms) {
  const RowRetention policy = Retention(now_ms);
  LogSweep(parts_.store->SweepJob(entry.record.uid, policy));
  const int64_t oldest_ms = now_ms - policy.operation_days * kDayMs;
  std::erase_if(operations_, [&](const auto& item) {
    return item.second.job_uid == entry.record.uid && IsOver(item.second) &&
           item.second.created_ms < oldest_ms;
  });
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
