#pragma once

// Turns of threads that plan: a few hold one at once, in the order of asking. A thread with a long
// plan passes its turn on now and then, so that a short plan never waits for a whole long one.

#include <cstdint>

#include <absl/base/thread_annotations.h>

#include "common/clock.h"
#include "common/mutex.h"

namespace ravel::coordinator {

// Thread-safe.
class FairTurns {
 public:
  explicit FairTurns(int64_t at_once) : at_once_(at_once) {}

  void Take() {
    MutexLock lock(mutex_);
    const int64_t mine = asked_++;
    while (mine >= left_ + at_once_) {
      changed_.Wait(mutex_);
    }
  }
  void Leave() {
    {
      MutexLock lock(mutex_);
      ++left_;
    }
    changed_.NotifyAll();
  }
  // Somebody waits for a turn.
  bool awaited() const {
    MutexLock lock(mutex_);
    return asked_ > left_ + at_once_;
  }

 private:
  const int64_t at_once_;
  mutable Mutex mutex_;
  CondVar changed_;
  int64_t asked_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t left_ ABSL_GUARDED_BY(mutex_) = 0;
};

// A turn, held as long as this lives.
class Turn {
 public:
  static constexpr int64_t kSliceMs = 100;

  explicit Turn(FairTurns& turns) : turns_(turns) {
    turns_.Take();
    since_ms_ = Now();
  }
  ~Turn() { turns_.Leave(); }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;

  // Lets others go first if they wait and this one has had its slice.
  void MayPass() {
    if (Now() - since_ms_ < kSliceMs || !turns_.awaited()) {
      return;
    }
    used_ms_ += Now() - since_ms_;
    turns_.Leave();
    turns_.Take();
    since_ms_ = Now();
  }
  // Time for which the turn was held, without the waiting.
  int64_t used_ms() const { return used_ms_ + Now() - since_ms_; }

 private:
  static int64_t Now() { return SystemClock::Get().MonotonicMs(); }

  FairTurns& turns_;
  int64_t since_ms_ = 0;
  int64_t used_ms_ = 0;
};

}  // namespace ravel::coordinator
