#pragma once

// The calls that are under way, by who makes them: a revocation ends them, and so does the end of a
// certificate. Each costs memory until it ends, so there are limits of one caller and of all.

#include <cstdint>
#include <functional>
#include <map>
#include <string>

#include <absl/base/thread_annotations.h>

#include "common/mutex.h"
#include "common/status.h"

namespace ravel::coordinator {

// Streams of one connection; more wait at the client, as HTTP/2 has it. A fleet stream and its
// plans are far below, and so is a terminal that watches jobs.
inline constexpr int kMaxCallsOfConnection = 128;

struct LiveCallLimits {
  int64_t of_identity = 256;
  // The bound of all users: nodes find room whatever these do.
  int64_t of_users = 4096;
  int64_t in_all = 32768;
};

// Thread-safe.
class LiveCalls {
 public:
  using CallId = int64_t;

  explicit LiveCalls(LiveCallLimits limits = {}) : limits_(limits) {}

  // ResourceExhausted names the limit that one more call of this identity would pass. Calls that
  // ask at the same moment may all be let in: no more than there are threads that judge calls.
  absl::Status CheckRoom(const std::string& identity) const;

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

  const LiveCallLimits limits_;
  mutable Mutex mutex_;
  std::map<std::string, int64_t> counts_ ABSL_GUARDED_BY(mutex_);  // by identity; none is 0
  int64_t of_users_ ABSL_GUARDED_BY(mutex_) = 0;
  CallId last_ ABSL_GUARDED_BY(mutex_) = 0;
  std::map<CallId, Call> calls_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ravel::coordinator
