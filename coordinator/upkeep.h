#pragma once

// Work that ravel-coordinator does now and then, apart from any job.

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <utility>

#include <absl/strings/str_cat.h>

#include "common/clock.h"
#include "common/logging.h"
#include "coordinator/access/namespace_roots.h"
#include "coordinator/jobs/work_pools.h"
#include "coordinator/store/sqlite_backup.h"
#include "coordinator/store/sqlite_job_store.h"
#include "coordinator/store/state_disk.h"

namespace ravel::coordinator {

// Watches pools, disk and the file of namespace roots at every tick, and backs the databases of
// jobs and of identities up on the thread that writes files.
class Upkeep {
 public:
  // `roots`: null: none.
  Upkeep(std::string state_dir,
         const SqliteJobStore* store,
         StateDisk* disk,
         WorkPools* pools,
         NamespaceRootsFile* roots,
         int64_t backup_every_ms)
      : state_dir_(std::move(state_dir)),
        store_(store),
        disk_(disk),
        pools_(pools),
        roots_(roots),
        backup_every_ms_(backup_every_ms) {}
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
    backup_ms_ = now_ms + backup_every_ms_;
    pools_->io().Post([store = store_, state_dir = state_dir_] {
      const int64_t wall_ms = SystemClock::Get().WallMs();
      absl::Status status = store->Backup(wall_ms, kBackups);
      if (std::filesystem::exists(state_dir + "/access.db")) {
        status.Update(BackUpDatabase(state_dir, "access", wall_ms, kBackups));
      }
      if (!status.ok()) {
        log::Error(absl::StrCat("backup of the database: ", std::string(status.message())));
      }
    });
  }

 private:
  static constexpr size_t kBackups = 2;
  const std::string state_dir_;
  const SqliteJobStore* store_;
  StateDisk* disk_;
  WorkPools* pools_;
  NamespaceRootsFile* roots_;
  const int64_t backup_every_ms_;
  int64_t backup_ms_ = SystemClock::Get().MonotonicMs() + backup_every_ms_;
};

}  // namespace ravel::coordinator
