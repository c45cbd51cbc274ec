#pragma once

// The turns of a job's work on its store, which is tried again after a failure. Retention runs one
// at a time, and again after a failure. A retention lists the steps first, so one that ran beside
// another could miss the newest commit and find folders that the other is deleting. A job that is
// over lets go of its pins and attempts until that has been done, also by the next coordinator:
// nothing durable says whether it was.

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

// Not thread-safe. Times are monotonic ms.
class ReleaseTurn {
 public:
  // The job is over, or was when this coordinator began.
  void Want(int64_t now_ms) {
    due_ms_ = now_ms;
    failures_ = 0;
    last_try_ = true;
  }
  bool Due(int64_t now_ms) const { return due_ms_ >= 0 && now_ms >= due_ms_; }
  void EndOk() { due_ms_ = -1; }
  // Due again after 5 s, doubled by each failure in a row, at most 1 h. Returns when.
  int64_t EndFailed(int64_t now_ms) {
    due_ms_ = now_ms + std::min(kFirstMs << std::min(failures_++, 10), kMostMs);
    return due_ms_;
  }
  // The job's record is to go. True, once: it is tried before that, whether it is due or not.
  bool TakeLastTry() { return due_ms_ >= 0 && std::exchange(last_try_, false); }

 private:
  static constexpr int64_t kFirstMs = 5 * 1000;
  static constexpr int64_t kMostMs = 60 * 60 * 1000;
  bool last_try_ = false;
  int failures_ = 0;
  int64_t due_ms_ = -1;  // -1: it has been done, or the job was never over
};

}  // namespace ravel::coordinator
