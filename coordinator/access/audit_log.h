#pragma once

// The thread that writes audit rows of calls, so that no thread of gRPC waits for the disk.

#include <cstdint>
#include <deque>
#include <string>
#include <thread>

#include <absl/base/thread_annotations.h>

#include "common/clock.h"
#include "common/mutex.h"
#include "coordinator/store/sqlite_access_store.h"

namespace ravel::coordinator {

// Thread-safe. The destructor writes what is queued.
class AuditLog {
 public:
  // Rows in memory; more are counted and told in the next row.
  static constexpr size_t kMaxQueued = 10'000;
  // Rows a minute of callers without an identity that is good: they could fill the log otherwise.
  static constexpr int64_t kMaxAnonymous = 60;
  static constexpr int64_t kMaxRows = 1'000'000;

  AuditLog(SqliteAccessStore* store, const Clock* clock);
  ~AuditLog();
  AuditLog(const AuditLog&) = delete;
  AuditLog& operator=(const AuditLog&) = delete;

  void Record(AuditRow row);
  // Returns when everything that was recorded before is on disk, or failed to get there.
  void Flush();

 private:
  void Run();
  bool TooMany(const AuditRow& row) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  SqliteAccessStore* const store_;
  const Clock* const clock_;
  Mutex mutex_;
  CondVar changed_;
  std::deque<AuditRow> queue_ ABSL_GUARDED_BY(mutex_);
  int64_t left_out_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t minute_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t anonymous_ ABSL_GUARDED_BY(mutex_) = 0;  // in this minute
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace ravel::coordinator
