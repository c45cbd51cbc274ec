#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "coordinator/store/job_store.h"

namespace ravel::coordinator {

// A JobStore without a disk, for tests: what was applied survives in `Disk`, which several stores
// may open in turn.
class MemoryJobStore : public JobStore {
 public:
  struct Disk {
    std::string cluster_id = "memory-cluster";
    int64_t term = 0;
    std::map<std::string, JobRecord> jobs;
    std::vector<JobEventRecord> events;
    std::map<std::string, RequestRecord> requests;
    std::map<std::string, OperationRecord> operations;
    std::vector<EpochRecord> epochs;
    std::map<std::tuple<std::string, int64_t, int64_t, int64_t>, SaveRecord> saves;
    std::map<std::string, NodeRow> nodes;
    std::map<std::string, GoodputRow> goodput;
    int64_t last_event_seq = 0;         // of jobs that are deleted
    int64_t last_resource_version = 0;  // of them, too
    int64_t applied = 0;
    // Asked before each Apply with its number, from 0; an error is returned and nothing applied.
    std::function<absl::Status(int64_t)> fault;
  };
  // The disk must outlive the store.
  explicit MemoryJobStore(Disk* disk) : disk_(disk) {}

  absl::StatusOr<LoadedState> Open() override;
  absl::Status Apply(const StoreChange& change) override;
  absl::StatusOr<std::optional<RequestRecord>> FindRequest(const std::string& id) override;
  absl::StatusOr<int64_t> SweepJob(const std::string& job_uid, const RowRetention& policy) override;
  absl::StatusOr<int64_t> SweepRequests(const RowRetention& policy) override;
  absl::StatusOr<std::vector<JobEventRecord>> Events(const std::string& job_uid,
                                                     int64_t after,
                                                     int64_t limit) override;

 private:
  void DeleteJob(const std::string& uid, int64_t now_ms);
  int64_t SweepEvents(const std::string& job_uid, const RowRetention& policy, int64_t oldest_ms);

  Disk* disk_;
  int64_t term_ = 0;
};

}  // namespace ravel::coordinator
