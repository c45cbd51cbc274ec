#pragma once

// Work that ravel-coordinator does now and then, apart from any job.

#include <cstddef>
#include <cstdint>
#include <string>

#include <absl/strings/str_cat.h>

#include "common/clock.h"
#include "common/logging.h"
#include "coordinator/access/namespace_roots.h"
#include "coordinator/jobs/work_pools.h"
#include "coordinator/store/sqlite_job_store.h"
#include "coordinator/store/state_disk.h"

namespace ravel::coordinator {

// Watches pools, disk and the file of namespace roots at every tick, and backs the database up on
// the thread that writes files.
class Upkeep {
 public:
  Upkeep(const SqliteJobStore* store, StateDisk* disk, WorkPools* pools, NamespaceRootsFile* roots)
      : store_(store), disk_(disk), pools_(pools), roots_(roots) {}
  void Tick() {
    if (roots_ != nullptr) {
      roots_->Refresh();
    }
    pools_->Watch();
    disk_->Watch();
    const int64_t now_ms = SystemClock::Get().MonotonicMs();
    if (now_ms < backup_ms_ || disk_->low()) {
      return;
    }
    backup_ms_ = now_ms + kBackupEveryMs;
    pools_->io().Post([store = store_] {
      const absl::Status status = store->Backup(SystemClock::Get().WallMs(), kBackups);
      if (!status.ok()) {
        log::Error(absl::StrCat("backup of the database: ", std::string(status.message())));
      }
    });
  }

 private:
  static constexpr int64_t kBackupEveryMs = 3'600'000;
  static constexpr size_t kBackups = 2;
  const SqliteJobStore* store_;
  StateDisk* disk_;
  WorkPools* pools_;
  NamespaceRootsFile* roots_;  // null: none
  int64_t backup_ms_ = SystemClock::Get().MonotonicMs() + kBackupEveryMs;
};

}  // namespace ravel::coordinator
