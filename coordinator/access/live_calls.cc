#include "coordinator/access/live_calls.h"

#include <utility>
#include <vector>

namespace ravel::coordinator {

LiveCalls::CallId LiveCalls::Add(const std::string& identity,
                                 int64_t not_after_ms,
                                 std::function<void()> cancel) {
  MutexLock lock(mutex_);
  calls_[++last_] = {
      .identity = identity, .not_after_ms = not_after_ms, .cancel = std::move(cancel)};
  return last_;
}

void LiveCalls::Remove(CallId id) {
  std::function<void()> last;  // destroyed after the lock is released
  MutexLock lock(mutex_);
  if (const auto found = calls_.find(id); found != calls_.end()) {
    last = std::move(found->second.cancel);
    calls_.erase(found);
  }
}

template <typename Chosen>
void LiveCalls::Cancel(const Chosen& chosen) {
  std::vector<std::function<void()>> cancels;
  {
    MutexLock lock(mutex_);
    for (auto& [id, call] : calls_) {
      if (call.cancel != nullptr && chosen(call)) {
        cancels.push_back(std::exchange(call.cancel, nullptr));
      }
    }
  }
  for (const std::function<void()>& cancel : cancels) {
    cancel();
  }
}

void LiveCalls::CancelOf(const std::string& identity) {
  Cancel([&identity](const Call& call) { return call.identity == identity; });
}

void LiveCalls::CancelExpired(int64_t now_ms) {
  Cancel([now_ms](const Call& call) { return call.not_after_ms < now_ms; });
}

}  // namespace ravel::coordinator
