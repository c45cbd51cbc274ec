#pragma once

// A complaint that may come thousands of times: said at most every ten seconds, with how often.

#include <cstdint>
#include <string>

#include <absl/base/thread_annotations.h>
#include <absl/strings/str_cat.h>

#include "common/clock.h"
#include "common/logging.h"
#include "common/mutex.h"

namespace ravel::coordinator {

// Thread-safe.
class ComplainNowAndThen {
 public:
  void Say(const std::string& what) {
    const int64_t now_ms = SystemClock::Get().MonotonicMs();
    MutexLock lock(mutex_);
    ++count_;
    if (said_ms_ != 0 && now_ms - said_ms_ < 10'000) {
      return;
    }
    said_ms_ = now_ms;
    log::Error(count_ == 1 ? what : absl::StrCat(what, " (", count_, " times so far)"));
  }

 private:
  Mutex mutex_;
  int64_t said_ms_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t count_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace ravel::coordinator
