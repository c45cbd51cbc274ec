#pragma once

// The JobStore of a running coordinator: one SQLite file in WAL mode, synchronous=FULL, one writer,
// fenced by a lock file and by the term that every transaction checks.

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "coordinator/job_store.h"

struct sqlite3;

namespace ravel::coordinator {

class SqliteJobStore : public JobStore {
 public:
  // Locks DIRECTORY/coordinator.lock (AlreadyExists when another process holds it), opens or
  // creates DIRECTORY/ravel.db, checks it (quick_check) and migrates it. A newer schema is
  // FailedPrecondition.
  static absl::StatusOr<std::unique_ptr<SqliteJobStore>> Create(const std::string& directory);
  ~SqliteJobStore() override;

  // Before Open: the term will be at least this. For a state that was restored from a backup:
  // daemons do not listen to a term below the highest that they have heard.
  void RaiseTerm(int64_t term) { least_term_ = term; }
  absl::StatusOr<LoadedState> Open() override;
  absl::Status Apply(const StoreChange& change) override;
  absl::StatusOr<std::optional<RequestRecord>> FindRequest(const std::string& id) override;
  absl::StatusOr<int64_t> SweepJob(const std::string& job_uid, const RowRetention& policy) override;
  absl::StatusOr<int64_t> SweepRequests(const RowRetention& policy) override;
  absl::StatusOr<std::vector<JobEventRecord>> Events(const std::string& job_uid,
                                                     int64_t after,
                                                     int64_t limit) override;

  static constexpr int64_t kSchemaVersion = 2;

 private:
  SqliteJobStore(sqlite3* database, int lock_file) : database_(database), lock_file_(lock_file) {}
  absl::Status Execute(const char* sql);
  absl::Status Migrate();
  absl::Status LoadJobs(std::vector<JobRecord>& jobs);
  absl::Status CheckTerm();
  // One transaction, of this coordinator's term.
  absl::Status Transact(const std::function<absl::Status()>& write);
  absl::Status Write(const StoreChange& change);

  sqlite3* database_;
  int lock_file_;
  int64_t term_ = 0;
  int64_t least_term_ = 0;
};

}  // namespace ravel::coordinator
