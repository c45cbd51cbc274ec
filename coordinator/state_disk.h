#pragma once

// The disk under the state directory. A ballast file keeps room for the last words: when the disk
// is full it is given up, so that running jobs can still commit and end, while what may wait (new
// jobs, metrics, logs) is refused until there is room again.

#include <atomic>
#include <cstdint>
#include <string>

#include "common/status.h"

namespace ravel::coordinator {

struct StateDiskOptions {
  int64_t ballast_bytes = 32LL << 20;  // at most a sixteenth of the disk
  double alarm_used = 0.8;             // of the disk
};

// Thread-safe, but for Watch, which one thread calls now and then.
class StateDisk {
 public:
  StateDisk(std::string directory, StateDiskOptions options = {});

  // The disk is full: gives the ballast up.
  void Release();
  // True from Release until the ballast is back.
  bool low() const { return low_; }
  // Makes the ballast when there is room for twice as much, and complains when the disk is nearly
  // full.
  void Watch();
  // ResourceExhausted while the disk is low.
  absl::Status CheckRoom() const;

 private:
  struct Room {
    int64_t whole = 0;
    int64_t free = 0;
    int64_t ballast = 0;
  };
  Room Measure() const;
  std::string Path() const { return directory_ + "/ballast"; }

  const std::string directory_;
  const StateDiskOptions options_;
  std::atomic<bool> low_ = false;
  int64_t told_ms_ = 0;  // Watch only
};

}  // namespace ravel::coordinator
