#pragma once

// A job goes back to an earlier step: what came after it moves aside, and nothing may follow.

#include <cstdint>
#include <string>

#include "common/status.h"
#include "common/store/object_store.h"

namespace ravel::coordinator {

struct RollbackTarget {
  std::string job;        // uid
  int64_t step = 0;       // stays, and what is below it
  int64_t epoch = 0;      // names the folder that the others move to
  int64_t end_epoch = 0;  // attempts of earlier epochs go first
};

// Steps move to rolled-back-*, old-* or bad/. Where a folder is not renamed as a whole, one whose
// move was cut off has two names, and may not get a third. Moves of steps [first_step, last_step]
// are ended under the names that they have: that of a next try would be another one.
absl::Status EndCutOffMoves(store::ObjectStore& store, int64_t first_step, int64_t last_step);

// Removes the job's attempts, so that none is published behind the rollback, then moves every step
// above the target, with its marks, into rolled-back-e<epoch>/. May be interrupted anywhere and
// repeated, also under another epoch.
absl::Status RollBack(store::ObjectStore& store, const RollbackTarget& target);

}  // namespace ravel::coordinator
