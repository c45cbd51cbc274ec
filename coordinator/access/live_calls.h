#pragma once

// The calls that are under way, by who makes them: a revocation ends them, and so does the end of a
// certificate.

#include <cstdint>
#include <functional>
#include <map>
#include <string>

#include <absl/base/thread_annotations.h>

#include "common/mutex.h"

namespace ravel::coordinator {

// Thread-safe.
class LiveCalls {
 public:
  using CallId = int64_t;

  // `cancel` owns what it touches: it may run while Remove does, or a moment later. It runs without
  // a lock, because a cancelled call may end, and leave this list, before its cancel returns.
  CallId Add(const std::string& identity, int64_t not_after_ms, std::function<void()> cancel);
  void Remove(CallId id);
  void CancelOf(const std::string& identity);
  void CancelExpired(int64_t now_ms);

 private:
  struct Call {
    std::string identity;
    int64_t not_after_ms = 0;
    std::function<void()> cancel;  // empty: it was cancelled
  };

  template <typename Chosen>
  void Cancel(const Chosen& chosen);

  Mutex mutex_;
  CallId last_ ABSL_GUARDED_BY(mutex_) = 0;
  std::map<CallId, Call> calls_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ravel::coordinator
