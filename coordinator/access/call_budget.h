#pragma once

// Limits the calls of one identity: each has a bucket of tokens, so that a script in a loop costs
// its owner and nobody else.

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>

#include <absl/base/thread_annotations.h>

#include "common/clock.h"
#include "common/mutex.h"
#include "common/status.h"

namespace ravel::coordinator {

// Thread-safe. A call costs a look into a map of the identities that called lately.
class CallBudget {
 public:
  struct Rate {
    int64_t per_second = 100;
    int64_t burst = 200;
  };
  CallBudget(const Clock& clock, Rate rate) : clock_(clock), rate_(rate) {}

  // Takes one call; ResourceExhausted when there is none left, with the time until there is.
  absl::Status Take(const std::string& identity);
  // Calls that were refused, of all identities.
  int64_t refused() const;

 private:
  // Thousandths of a call: one comes in 1000 / per_second milliseconds.
  struct Bucket {
    int64_t thousandths = 0;
    int64_t at_ms = 0;
  };
  // Full buckets are as good as none.
  void ForgetFull(int64_t now_ms) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  int64_t Filled(const Bucket& bucket, int64_t now_ms) const;

  const Clock& clock_;
  const Rate rate_;
  mutable Mutex mutex_;
  std::map<std::string, Bucket> buckets_ ABSL_GUARDED_BY(mutex_);
  size_t forget_at_ ABSL_GUARDED_BY(mutex_) = 1024;
  int64_t refused_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace ravel::coordinator
