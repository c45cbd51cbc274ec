#pragma once

// Logs of trainers that ended: kept for a while and up to a size, then deleted. The folder holds
// JOB/attempt-N/rank-R.log*.

#include <cstdint>
#include <filesystem>
#include <set>
#include <string>
#include <thread>
#include <utility>

#include <absl/base/thread_annotations.h>

#include "common/mutex.h"

namespace ravel::daemon {

struct LogRules {
  int64_t limit_bytes = int64_t{4} << 30;               // of all attempts together
  int64_t max_age_ms = int64_t{14} * 24 * 3600 * 1000;  // since the last line of an attempt
};

struct LogSweep {
  int64_t kept_bytes = 0;
  int64_t removed_attempts = 0;
};

// Attempts by job's uid and number.
using AttemptSet = std::set<std::pair<std::string, int64_t>>;

// Deletes attempts that are too old, then the oldest until the rest fits; never one of `running`,
// whose files have a limit of their own. Job folders that are empty go too; what is
// not of this layout stays. What cannot be deleted is tried again next time. Blocks:
// not for an event loop.
LogSweep SweepLogs(const std::filesystem::path& folder,
                   const LogRules& rules,
                   const AttemptSet& running,
                   int64_t now_ms);

// Everything of one job, which is deleted; attempts of `running` stay.
void RemoveJobLogs(const std::filesystem::path& folder,
                   const std::string& job_uid,
                   const AttemptSet& running);

// Both on a thread of its own: deleting takes as long as the disk likes. Thread-safe.
class LogSweeper {
 public:
  LogSweeper(std::filesystem::path folder, LogRules rules);
  ~LogSweeper();

  // Soon; a request that waits takes the newer set of running attempts.
  void Sweep(AttemptSet running);
  void Forget(const std::string& job_uid, AttemptSet running);

 private:
  void Loop();

  const std::filesystem::path folder_;
  const LogRules rules_;
  Mutex mutex_;
  CondVar changed_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  bool sweep_ ABSL_GUARDED_BY(mutex_) = false;
  std::set<std::string> forgotten_ ABSL_GUARDED_BY(mutex_);
  AttemptSet running_ ABSL_GUARDED_BY(mutex_);
  std::thread thread_;
};

}  // namespace ravel::daemon
