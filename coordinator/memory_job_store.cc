#include "coordinator/memory_job_store.h"

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
  state.last_event_seq = disk_->events.empty() ? 0 : disk_->events.back().seq;
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
  return absl::OkStatus();
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
