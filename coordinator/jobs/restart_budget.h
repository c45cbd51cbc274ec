#pragma once

// When to try again and when to give up: the pure rules of the restart budget.

#include <cstdint>
#include <string>
#include <string_view>

#include "common/failure_reason.h"
#include "common/model/job_spec.h"
#include "coordinator/store/job_record.h"

namespace ravel::coordinator {

// The cause that ended an epoch: the first cause, not the communicator errors that follow from it.
struct FailureCause {
  std::string reason;  // ProcessCrash, NodeLost, DataError, ... of common/failure_reason.h
  std::string message;
  std::string node;
  int64_t rank = -1;
  int64_t step = -1;  // last finished step when it happened
  // The job could run on other nodes than `node`, which may be busy just now.
  bool elsewhere = false;
  bool starting = false;  // not all ranks were ready yet
};

// The reason of a trainer's exit: from its code (11 communicator, 13 data, ...) or signal.
std::string ExitReason(int32_t exit_code, int32_t signal);
FailureClass ClassOf(std::string_view reason);
// Not charged to the job: a resize, a drain, a store that is away, a node that cannot start it.
bool IsCharged(std::string_view reason);
// The store is away or full: the job waits until it is back, and says so once.
bool IsStoreWait(std::string_view reason);
// A more telling cause has a higher weight.
int CauseWeight(std::string_view reason);

struct BudgetVerdict {
  BudgetState next;
  bool fail = false;
  std::string final_reason;  // BudgetExhausted, NoProgress, or the cause itself, when fail
  int64_t backoff_ms = 0;    // wait before the next attempt
};

// Judges one failure at wall time `now_ms`. It fails the job only when it would come again anywhere
// (RepeatRule), or over a limit that the job file sets: the machines' failures wait and try again.
// The first charged failure since progress restarts at once; then the back-off doubles up to
// restart.maxBackoff, with a jitter of at most a tenth that is a hash of (uid, attempt). Uncharged
// ones that something must mend first wait up to a minute.
BudgetVerdict Charge(const plan::RestartSpec& limits,
                     const BudgetState& budget,
                     const FailureCause& cause,
                     std::string_view uid,
                     int64_t attempt,
                     int64_t now_ms);
// A commit of a new highest step.
BudgetState Refill(BudgetState budget);

}  // namespace ravel::coordinator
