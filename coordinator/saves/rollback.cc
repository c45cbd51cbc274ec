#include "coordinator/saves/rollback.h"

#include <absl/strings/str_cat.h>

#include "coordinator/saves/retention.h"

namespace ravel::coordinator {

absl::Status RollBack(store::ObjectStore& store, const RollbackTarget& target) {
  // They go first: another coordinator could publish one after the steps were listed.
  RETURN_IF_ERROR(CleanAttemptsOf(store, target.job, target.end_epoch));
  return MoveStepsAbove(store, target.step, absl::StrCat("rolled-back-e", target.epoch)).status();
}

}  // namespace ravel::coordinator
