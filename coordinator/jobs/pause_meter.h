#pragma once

// Measures how long this process itself did not run (stopped, swapped out, its host suspended), as
// a thread sees it that does nothing but come by. A busy strand is no pause.

#include <algorithm>
#include <cstdint>
#include <utility>

#include <absl/base/thread_annotations.h>

#include "common/mutex.h"

namespace ravel::coordinator {

// Thread-safe.
class PauseMeter {
 public:
  static constexpr int64_t kEveryMs = 20;
  static constexpr int64_t kLeastMs = 200;  // shorter gaps are scheduling

  // From a thread of its own, every kEveryMs.
  void Beat(int64_t now_ms) ABSL_LOCKS_EXCLUDED(mutex_) {
    MutexLock lock(mutex_);
    Count(now_ms);
    beaten_ms_ = std::max(beaten_ms_, now_ms);
  }
  // Pauses since the last call; each is told once. One that has just ended counts although its
  // thread did not come by yet.
  int64_t TakeMs(int64_t now_ms) ABSL_LOCKS_EXCLUDED(mutex_) {
    MutexLock lock(mutex_);
    Count(now_ms);
    return std::exchange(paused_ms_, 0);
  }

 private:
  void Count(int64_t now_ms) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    const int64_t gap_ms = now_ms - beaten_ms_;
    if (beaten_ms_ != 0 && gap_ms > kLeastMs) {
      paused_ms_ += gap_ms;
      beaten_ms_ = now_ms;
    }
  }

  Mutex mutex_;
  int64_t beaten_ms_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t paused_ms_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace ravel::coordinator
