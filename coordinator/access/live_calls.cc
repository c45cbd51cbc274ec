#include "coordinator/access/live_calls.h"

#include <utility>
#include <vector>

#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>

namespace ravel::coordinator {
namespace {

bool IsUser(const std::string& identity) {
  return absl::StartsWith(identity, "user/");
}

absl::Status Exhausted(const std::string& who, int64_t most) {
  return absl::ResourceExhaustedError(absl::StrCat(
      who, " may have ", most, " calls under way at most; try again when some have ended"));
}

}  // namespace

absl::Status LiveCalls::CheckRoom(const std::string& identity) const {
  MutexLock lock(mutex_);
  const auto found = counts_.find(identity);
  if (found != counts_.end() && found->second >= limits_.of_identity) {
    return Exhausted(identity, limits_.of_identity);
  }
  if (IsUser(identity) && of_users_ >= limits_.of_users) {
    return Exhausted("all users together", limits_.of_users);
  }
  return static_cast<int64_t>(calls_.size()) < limits_.in_all
             ? absl::OkStatus()
             : Exhausted("all callers together", limits_.in_all);
}

LiveCalls::CallId LiveCalls::Add(const std::string& identity,
                                 int64_t not_after_ms,
                                 std::function<void()> cancel) {
  MutexLock lock(mutex_);
  ++counts_[identity];
  of_users_ += IsUser(identity) ? 1 : 0;
  calls_[++last_] = {
      .identity = identity, .not_after_ms = not_after_ms, .cancel = std::move(cancel)};
  return last_;
}

void LiveCalls::Remove(CallId id) {
  std::function<void()> last;  // destroyed after the lock is released
  MutexLock lock(mutex_);
  if (const auto found = calls_.find(id); found != calls_.end()) {
    last = std::move(found->second.cancel);
    const auto count = counts_.find(found->second.identity);
    of_users_ -= IsUser(found->second.identity) ? 1 : 0;
    if (--count->second == 0) {
      counts_.erase(count);
    }
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
