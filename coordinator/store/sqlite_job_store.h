#pragma once

// The JobStore of a running coordinator: one SQLite file in WAL mode, synchronous=FULL, one writer,
// fenced by a lock file and by the term that every transaction checks.

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <absl/base/thread_annotations.h>

#include "common/mutex.h"
#include "coordinator/store/job_store.h"

struct sqlite3;

namespace ravel::coordinator {

// Name of a file system whose locks are unsafe, by f_type of statfs; empty for any other.
std::string_view NetworkFileSystemName(uint64_t type);

class SqliteJobStore : public JobStore {
 public:
  // Locks DIRECTORY/coordinator.lock (AlreadyExists when another process holds it), opens or
  // creates DIRECTORY/ravel.db, checks it (quick_check) and migrates it. A newer schema, a network
  // file system and one that cannot do WAL are FailedPrecondition.
  static absl::StatusOr<std::unique_ptr<SqliteJobStore>> Create(const std::string& directory);
  ~SqliteJobStore() override;

  // Before Open: the term will be at least this. For a state that was restored from a backup:
  // daemons do not listen to a term below the highest that they have heard.
  void RaiseTerm(int64_t term) { least_term_ = term; }
  absl::StatusOr<LoadedState> Open() override;
  absl::Status Apply(const StoreChange& change) override;
  absl::Status BeginGroup() override;
  absl::Status CommitGroup() override;
  absl::StatusOr<std::optional<RequestRecord>> FindRequest(const std::string& id) override;
  absl::StatusOr<int64_t> SweepJob(const std::string& job_uid, const RowRetention& policy) override;
  absl::StatusOr<int64_t> SweepRequests(const RowRetention& policy) override;
  absl::StatusOr<std::vector<JobEventRecord>> Events(const std::string& job_uid,
                                                     int64_t after,
                                                     int64_t limit) override;

  // Called when the disk is full, before the change is tried once more.
  void OnFull(std::function<void()> make_room) { make_room_ = std::move(make_room); }
  // A whole copy while work goes on, in DIRECTORY/backup; the newest `keep` stay. Thread-safe.
  absl::Status Backup(int64_t now_ms, size_t keep) const;

  static constexpr int64_t kSchemaVersion = 3;

 private:
  SqliteJobStore(sqlite3* database, int lock_file) : database_(database), lock_file_(lock_file) {}
  absl::Status SetUp(const std::string& path);
  absl::Status Execute(const char* sql);
  absl::Status Migrate();
  absl::Status LoadJobs(std::vector<JobRecord>& jobs);
  absl::Status CheckTerm();
  // One transaction, of this coordinator's term, or a part of the group.
  absl::Status Transact(const std::function<absl::Status()>& write);
  absl::Status Write(const StoreChange& change);
  void MakeRoom();

  sqlite3* database_;
  Mutex reading_;
  // Committed rows only, for callers on other threads.
  sqlite3* reader_ ABSL_PT_GUARDED_BY(reading_) = nullptr;
  int lock_file_;
  std::string directory_;
  std::function<void()> make_room_;
  bool grouping_ = false;
  absl::Status group_;  // why the group cannot be committed any more
  int64_t term_ = 0;
  int64_t least_term_ = 0;
};

}  // namespace ravel::coordinator
