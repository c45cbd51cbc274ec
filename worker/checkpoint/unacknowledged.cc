#include "worker/checkpoint/unacknowledged.h"

#include <algorithm>

namespace ravel::checkpoint {
namespace {

// False: it was committed, or removed by the coordinator, meanwhile.
absl::StatusOr<bool> RemoveAttempt(store::ObjectStore& store, const ckpt::AttemptKey& key) {
  ckpt::AttemptKey removed_key = key;
  removed_key.attempt += ckpt::kRemovedAttempt;
  const std::string removed = ckpt::AttemptName(removed_key);
  const absl::Status renamed = store.PublishIfAbsent(ckpt::AttemptName(key), removed);
  if (absl::IsNotFound(renamed)) {
    return false;
  }
  RETURN_IF_ERROR(renamed);
  RETURN_IF_ERROR(store::WithdrawIfThere(store, removed));
  return true;
}

}  // namespace

absl::StatusOr<bool> UnacknowledgedAttempts::IsComplete(const store::ObjectStore& store,
                                                        const ckpt::AttemptKey& key) const {
  const auto seals = store.List(store::JoinPath(ckpt::AttemptName(key), ckpt::kSealsFolder));
  if (absl::IsNotFound(seals.status())) {
    return false;
  }
  RETURN_IF_ERROR(seals.status());
  return std::ssize(*seals) == ranks_;
}

absl::StatusOr<std::vector<ckpt::AttemptKey>> UnacknowledgedAttempts::Trim(
    store::ObjectStore& store, int64_t answered_step) {
  std::erase_if(attempts_, [&](const ckpt::AttemptKey& key) { return key.step <= answered_step; });
  std::vector<ckpt::AttemptKey> removed;
  int64_t complete = 0;
  for (size_t i = attempts_.size(); i-- > 0 && static_cast<int64_t>(attempts_.size()) > most_;) {
    if (complete >= most_) {
      ASSIGN_OR_RETURN(const bool removed_here, RemoveAttempt(store, attempts_[i]));
      if (removed_here) {
        removed.push_back(attempts_[i]);
      }
      attempts_.erase(attempts_.begin() + static_cast<int64_t>(i));
      continue;
    }
    ASSIGN_OR_RETURN(const bool whole, IsComplete(store, attempts_[i]));
    complete += whole ? 1 : 0;
  }
  std::reverse(removed.begin(), removed.end());
  return removed;
}

}  // namespace ravel::checkpoint
