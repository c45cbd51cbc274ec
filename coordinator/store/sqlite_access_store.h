#pragma once

// Identities, tokens and the audit log in a database of their own (access.db): a damaged job
// database locks nobody out, and a copy of one does not carry the other.

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <absl/base/thread_annotations.h>

#include "common/mutex.h"
#include "common/status.h"
#include "coordinator/store/access_record.h"

struct sqlite3;

namespace ravel::coordinator {

// Thread-safe; every change is on disk when Apply returns OK.
class SqliteAccessStore {
 public:
  // Opens or creates DIRECTORY/access.db, mode 0600. A newer schema is FailedPrecondition, a
  // damaged file DataLoss.
  static absl::StatusOr<std::unique_ptr<SqliteAccessStore>> Open(const std::string& directory);
  ~SqliteAccessStore();
  SqliteAccessStore(const SqliteAccessStore&) = delete;
  SqliteAccessStore& operator=(const SqliteAccessStore&) = delete;

  absl::StatusOr<std::vector<IdentityRow>> Identities();
  absl::StatusOr<std::vector<TokenRow>> Tokens();
  absl::StatusOr<std::vector<EndedEnrolment>> EndedEnrolments();
  absl::Status Apply(const AccessChange& change);
  // Rows with seq > after, oldest first, at most `limit`.
  absl::StatusOr<std::vector<AuditRow>> Audit(int64_t after, int64_t limit);
  // Only the newest `keep` audit rows stay.
  absl::Status Trim(int64_t keep);

 private:
  explicit SqliteAccessStore(sqlite3* database) : database_(database) {}
  absl::Status SetUp() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status Execute(const char* sql) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status Write(const AccessChange& change) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  Mutex mutex_;
  sqlite3* database_ ABSL_PT_GUARDED_BY(mutex_);
};

}  // namespace ravel::coordinator
