#pragma once

// Sealed attempts that no coordinator has answered yet. While it is away nobody commits and nobody
// deletes, so the trainers themselves keep the store from filling up.

#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "common/ckpt/step_layout.h"
#include "common/status.h"
#include "common/store/object_store.h"

namespace ravel::checkpoint {

// Attempts of one rank of the world; used from one thread.
class UnacknowledgedAttempts {
 public:
  UnacknowledgedAttempts(int64_t ranks, int64_t most) : ranks_(ranks), most_(most) {}

  void Sealed(const ckpt::AttemptKey& key) { attempts_.push_back(key); }
  // Forgets attempts of steps up to `answered_step`, keeps the newest complete ones (sealed by all
  // ranks) and what is newer than these, removes the others. Returns what was removed. An attempt
  // gets another name before anything in it is deleted, so that a coordinator that is back commits
  // all of it or finds nothing.
  absl::StatusOr<std::vector<ckpt::AttemptKey>> Trim(store::ObjectStore& store,
                                                     int64_t answered_step);

 private:
  absl::StatusOr<bool> IsComplete(const store::ObjectStore& store,
                                  const ckpt::AttemptKey& key) const;

  int64_t ranks_;
  int64_t most_;
  std::deque<ckpt::AttemptKey> attempts_;  // oldest first
};

}  // namespace ravel::checkpoint
