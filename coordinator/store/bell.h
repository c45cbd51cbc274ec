#pragma once

// Wakes subscribers when a job's files grow.

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <absl/base/thread_annotations.h>

#include "common/mutex.h"

namespace ravel::coordinator {

// Thread-safe.
class Bell {
 public:
  // `heard` runs on the thread that rings, and does not block. It may still be running, once, when
  // Unsubscribe returns.
  uint64_t Subscribe(std::string job_uid, std::function<void()> heard) {
    MutexLock lock(mutex_);
    waiting_.emplace(++last_id_, std::make_pair(std::move(job_uid), std::move(heard)));
    return last_id_;
  }
  void Unsubscribe(uint64_t id) {
    MutexLock lock(mutex_);
    waiting_.erase(id);
  }
  void Ring(const std::string& job_uid) {
    std::vector<std::function<void()>> heard;
    {
      MutexLock lock(mutex_);
      for (const auto& [id, waiter] : waiting_) {
        if (waiter.first == job_uid) {
          heard.push_back(waiter.second);
        }
      }
    }
    for (const std::function<void()>& call : heard) {
      call();
    }
  }

 private:
  Mutex mutex_;
  uint64_t last_id_ ABSL_GUARDED_BY(mutex_) = 0;
  std::map<uint64_t, std::pair<std::string, std::function<void()>>> waiting_
      ABSL_GUARDED_BY(mutex_);
};

}  // namespace ravel::coordinator
