// The JobStore of tests. It keeps the semantics of the SQLite one: a second store that opens the
// disk raises the term, and writes of the first are Aborted; specs are not returned parsed; rows
// are swept by the same ages. `fault` makes any single Apply fail, which is how tests crash between
// two writes.

#include "coordinator/store/memory_job_store.h"

#include <algorithm>

namespace ravel::coordinator {

absl::StatusOr<LoadedState> MemoryJobStore::Open() {
  term_ = ++disk_->term;
  LoadedState state;
  state.cluster_id = disk_->cluster_id;
  state.term = term_;
  for (const auto& [uid, job] : disk_->jobs) {
    state.jobs.push_back(job);
    state.jobs.back().spec = plan::JobSpec();  // as from a disk
    state.last_resource_version = std::max(state.last_resource_version, job.resource_version);
  }
  for (const auto& [id, operation] : disk_->operations) {
    state.operations.push_back(operation);
  }
  std::map<std::string, EpochRecord> newest;
  for (const EpochRecord& epoch : disk_->epochs) {
    EpochRecord& known = newest[epoch.job_uid];
    known = epoch.epoch >= known.epoch ? epoch : known;
  }
  for (const auto& [uid, epoch] : newest) {
    state.epochs.push_back(epoch);
  }
  for (const auto& [key, save] : disk_->saves) {
    state.saves.push_back(save);
  }
  for (const auto& [id, node] : disk_->nodes) {
    state.nodes.push_back(node);
  }
  for (const auto& [uid, row] : disk_->goodput) {
    state.goodput.push_back(row);
  }
  state.last_event_seq =
      std::max(disk_->last_event_seq, disk_->events.empty() ? 0 : disk_->events.back().seq);
  state.last_resource_version = std::max(state.last_resource_version, disk_->last_resource_version);
  return state;
}

absl::Status MemoryJobStore::Apply(const StoreChange& change) {
  if (disk_->term != term_) {
    return absl::AbortedError("another coordinator has opened this database");
  }
  const int64_t number = disk_->applied++;
  if (disk_->fault) {
    RETURN_IF_ERROR(disk_->fault(number));
  }
  for (const JobRecord& job : change.jobs) {
    disk_->jobs[job.uid] = job;
  }
  disk_->events.insert(disk_->events.end(), change.events.begin(), change.events.end());
  if (change.request) {
    disk_->requests[change.request->id] = *change.request;
  }
  for (const OperationRecord& operation : change.operations) {
    disk_->operations[operation.id] = operation;
  }
  disk_->epochs.insert(disk_->epochs.end(), change.epochs.begin(), change.epochs.end());
  for (const SaveRecord& save : change.saves) {
    disk_->saves[{save.job_uid, save.step, save.epoch, save.attempt}] = save;
  }
  for (const NodeRow& node : change.nodes) {
    disk_->nodes[node.id] = node;
  }
  for (const GoodputRow& row : change.goodput) {
    disk_->goodput[row.job_uid] = row;
  }
  for (const std::string& id : change.deleted_nodes) {
    disk_->nodes.erase(id);
  }
  for (const std::string& uid : change.deleted_jobs) {
    DeleteJob(uid, change.deleted_ms);
  }
  disk_->last_event_seq = std::max(disk_->last_event_seq, change.last_event_seq);
  disk_->last_resource_version =
      std::max(disk_->last_resource_version, change.last_resource_version);
  return absl::OkStatus();
}

void MemoryJobStore::DeleteJob(const std::string& uid, int64_t now_ms) {
  for (auto& [id, request] : disk_->requests) {
    const auto operation = disk_->operations.find(request.answer);
    if (request.answer == uid ||
        (operation != disk_->operations.end() && operation->second.job_uid == uid)) {
      request.time_ms = now_ms;
    }
  }
  disk_->jobs.erase(uid);
  disk_->goodput.erase(uid);
  std::erase_if(disk_->events, [&](const auto& event) { return event.job_uid == uid; });
  std::erase_if(disk_->operations, [&](const auto& item) { return item.second.job_uid == uid; });
  std::erase_if(disk_->epochs, [&](const auto& epoch) { return epoch.job_uid == uid; });
  std::erase_if(disk_->saves, [&](const auto& item) { return item.second.job_uid == uid; });
}

absl::StatusOr<int64_t> MemoryJobStore::SweepJob(const std::string& job_uid,
                                                 const RowRetention& policy) {
  constexpr int64_t kDayMs = int64_t{24} * 3600 * 1000;
  const auto age_ms = [&](int64_t days) { return policy.now_ms - days * kDayMs; };
  int64_t removed = 0;
  removed += static_cast<int64_t>(std::erase_if(disk_->operations, [&](const auto& item) {
    const OperationRecord& operation = item.second;
    return operation.job_uid == job_uid && operation.state >= OperationState::kCommitted &&
           operation.created_ms < age_ms(policy.operation_days);
  }));
  removed += static_cast<int64_t>(std::erase_if(disk_->saves, [&](const auto& item) {
    return item.second.job_uid == job_uid && IsGone(item.second) &&
           item.second.created_ms < age_ms(policy.save_days);
  }));
  int64_t newest = 0;
  for (const EpochRecord& epoch : disk_->epochs) {
    newest = epoch.job_uid == job_uid ? std::max(newest, epoch.epoch) : newest;
  }
  removed += static_cast<int64_t>(std::erase_if(disk_->epochs, [&](const EpochRecord& epoch) {
    return epoch.job_uid == job_uid && epoch.epoch <= newest - policy.epochs_per_job;
  }));
  return removed + SweepEvents(job_uid, policy, age_ms(policy.event_days));
}

int64_t MemoryJobStore::SweepEvents(const std::string& job_uid,
                                    const RowRetention& policy,
                                    int64_t oldest_ms) {
  std::vector<JobEventRecord*> own;
  for (JobEventRecord& event : disk_->events) {
    if (event.job_uid == job_uid) {
      own.push_back(&event);
    }
  }
  int64_t old = 0;
  const auto count = static_cast<int64_t>(own.size());
  for (const JobEventRecord* event : own) {
    if (old < policy.most_rows &&
        (event->time_ms < oldest_ms || count - old > policy.events_per_job)) {
      ++old;
    }
  }
  const int64_t marked =
      old > 0 && own[0]->type == kEventsRemoved ? std::stoll(own[0]->message) : 0;
  if (old == 0 || (old == 1 && marked > 0)) {
    return 0;
  }
  JobEventRecord& marker = *own[static_cast<size_t>(old) - 1];
  const int64_t told = marked > 0 ? marked + old - 1 : old;
  const int64_t first_kept = marker.seq;
  marker.type = kEventsRemoved;
  marker.reason = "Retention";
  marker.message = std::to_string(told) + kEventsRemovedText;
  std::erase_if(disk_->events, [&](const JobEventRecord& event) {
    return event.job_uid == job_uid && event.seq < first_kept;
  });
  return old - 1;
}

absl::StatusOr<int64_t> MemoryJobStore::SweepRequests(const RowRetention& policy) {
  const int64_t oldest_ms = policy.now_ms - policy.request_days * 24 * 3600 * 1000;
  std::erase_if(disk_->nodes, [&](const auto& item) {
    return item.second.incarnation.empty() && item.second.hold == 0 &&
           item.second.seen_ms < policy.now_ms - policy.node_days * 24 * 3600 * 1000;
  });
  return static_cast<int64_t>(std::erase_if(disk_->requests, [&](const auto& item) {
    std::string uid = item.second.answer;
    const auto operation = disk_->operations.find(uid);
    uid = operation == disk_->operations.end() ? uid : operation->second.job_uid;
    const auto job = disk_->jobs.find(uid);
    const int64_t ended_ms =
        job == disk_->jobs.end() ? item.second.time_ms : job->second.finished_ms;
    const bool over = job == disk_->jobs.end() || job->second.finished_ms > 0;
    return over && ended_ms < oldest_ms && item.second.time_ms < oldest_ms;
  }));
}

absl::StatusOr<std::optional<RequestRecord>> MemoryJobStore::FindRequest(const std::string& id) {
  const auto found = disk_->requests.find(id);
  return found == disk_->requests.end() ? std::nullopt
                                        : std::optional<RequestRecord>(found->second);
}

absl::StatusOr<std::vector<JobEventRecord>> MemoryJobStore::Events(const std::string& job_uid,
                                                                   int64_t after,
                                                                   int64_t limit) {
  std::vector<JobEventRecord> found;
  for (const JobEventRecord& event : disk_->events) {
    if (event.job_uid == job_uid && event.seq > after &&
        static_cast<int64_t>(found.size()) < limit) {
      found.push_back(event);
    }
  }
  return found;
}

}  // namespace ravel::coordinator
