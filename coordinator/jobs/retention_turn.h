#pragma once

// The turns of a job's retention: it runs one at a time, and again after a failure. A retention
// lists the steps first, so one that ran beside another could miss the newest commit and find
// folders that the other is deleting.

#include <algorithm>
#include <cstdint>
#include <utility>

namespace ravel::coordinator {

// Not thread-safe.
class RetentionTurn {
 public:
  // True: the caller starts it now. False: it runs, and another one follows.
  // `save_after`: a save waits for the room; kept until a retention has succeeded.
  bool Begin(bool save_after) {
    save_after_ = save_after_ || save_after;
    again_ = busy_;
    due_ms_ = -1;
    return !std::exchange(busy_, true);
  }
  // The one that ran is over. True: one more follows at once.
  bool EndOk() {
    busy_ = false;
    failures_ = 0;
    return std::exchange(again_, false);
  }
  // Returns when it is due again, in monotonic ms: after 5 s, doubled by each failure in a row, at
  // most 10 min.
  int64_t EndFailed(int64_t now_ms) {
    busy_ = again_ = false;
    due_ms_ = now_ms + std::min(kFirstMs << std::min(failures_++, 7), kMostMs);
    return due_ms_;
  }
  bool Due(int64_t now_ms) const { return due_ms_ >= 0 && now_ms >= due_ms_; }
  int64_t due_ms() const { return due_ms_; }  // -1: not
  bool TakeSaveAfter() { return std::exchange(save_after_, false); }

 private:
  static constexpr int64_t kFirstMs = 5 * 1000;
  static constexpr int64_t kMostMs = 10 * 60 * 1000;
  bool busy_ = false;
  bool again_ = false;
  bool save_after_ = false;
  int failures_ = 0;
  int64_t due_ms_ = -1;
};

}  // namespace ravel::coordinator
