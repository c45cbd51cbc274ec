#include "common/failure_reason.h"

#include "common/check.h"

namespace ravel {
namespace {

using A = FailureAnswer;
using C = FailureClass;
using R = RepeatRule;

constexpr int32_t Code(ExitCode code) {
  return static_cast<int32_t>(code);
}

// The first row of an exit code names it. kUser weighs 3: what a trainer says of its input is not
// an echo.
constexpr FailureReason kReasons[] = {
    // name, class, charged, answer, repeats, weight, exit code
    {"Done", C::kControl, false, A::kRestart, R::kNever, 0, Code(ExitCode::kDone)},
    {"Stopped", C::kControl, false, A::kRestart, R::kNever, 0, Code(ExitCode::kStopped)},
    {"DataError", C::kUser, true, A::kAvoidNode, R::kElsewhere, 3, Code(ExitCode::kData)},
    // A variable, a secret or a network of the job that its node does not allow or lacks.
    {"EnvironmentRefused", C::kUser, true, A::kAvoidNode, R::kElsewhere, 3, -1},
    // The store refuses the keys that the job brought along: no node can help.
    {"StoreRefused", C::kUser, true, A::kRestart, R::kSameStep, 3, -1},
    {"NonFinitePersistent", C::kUser, true, A::kRestart, R::kSameStep, 3, Code(ExitCode::kNumeric)},
    {"HostOutOfMemory",
     C::kUser,
     true,
     A::kAvoidNode,
     R::kElsewhere,
     3,
     Code(ExitCode::kOutOfMemory)},
    {"PlanRejected", C::kUser, true, A::kRestart, R::kSameStep, 3, Code(ExitCode::kPlanMismatch)},
    {"UserExit", C::kUser, true, A::kRestart, R::kSameStep, 3, -1},
    {"MaxRunTime", C::kUser, true, A::kFail, R::kSameStep, 3, -1},
    {"ProcessCrash", C::kInfrastructure, true, A::kAvoidNode, R::kNever, 2, -1},
    {"DeviceError", C::kInfrastructure, true, A::kAvoidNode, R::kNever, 2, Code(ExitCode::kDevice)},
    {"NodeLost", C::kInfrastructure, true, A::kAvoidNode, R::kNever, 2, -1},
    {"CommError",
     C::kInfrastructure,
     true,
     A::kRestart,
     R::kNever,
     1,
     Code(ExitCode::kCommunicator)},
    {"CollectiveMismatch", C::kInfrastructure, true, A::kRestart, R::kNever, 2, -1},
    {"Stall", C::kInfrastructure, true, A::kAvoidNode, R::kNever, 2, -1},
    {"CheckpointCorrupt", C::kInfrastructure, true, A::kRestart, R::kNever, 2, -1},
    {"DeviceOutOfMemory", C::kInfrastructure, true, A::kRestart, R::kNever, 2, -1},
    // Limits that the job itself has set (spec.checkpoint): it ends when they are passed.
    {"SavesFailing", C::kInfrastructure, true, A::kFail, R::kNever, 2, -1},
    {"CheckpointTooOld", C::kInfrastructure, true, A::kFail, R::kNever, 2, -1},
    {"StartFailed", C::kInfrastructure, false, A::kAvoidNode, R::kNever, 2, -1},
    {"PreflightFailed", C::kInfrastructure, false, A::kAvoidNode, R::kNever, 2, -1},
    // A data set is larger than all that the node's --data-cache-bytes allows, or than every
    // node's.
    {"DataCacheTooSmall", C::kInfrastructure, false, A::kAvoidNode, R::kNever, 2, -1},
    {"DataCachesTooSmall", C::kInfrastructure, true, A::kFail, R::kNever, 3, -1},
    {"Preempted", C::kPreemption, false, A::kMove, R::kNever, 2, -1},
    {"NodeDrain", C::kPreemption, false, A::kMove, R::kNever, 2, -1},
    {"CapacityNotice", C::kPreemption, false, A::kMove, R::kNever, 2, -1},
    {"ResizeRequested", C::kPreemption, false, A::kMove, R::kNever, 2, -1},
    {"WaitingForDevices", C::kCapacity, false, A::kStayQueued, R::kNever, 2, -1},
    {"WaitingForQuota", C::kCapacity, false, A::kStayQueued, R::kNever, 2, -1},
    {"BelowMinimum", C::kCapacity, false, A::kStayQueued, R::kNever, 2, -1},
    {"HigherPriorityAhead", C::kCapacity, false, A::kStayQueued, R::kNever, 2, -1},
    {"Backoff", C::kCapacity, false, A::kStayQueued, R::kNever, 2, -1},
    {"CoordinatorRestart", C::kControl, false, A::kRestart, R::kNever, 2, -1},
    {"StoreUnavailable", C::kControl, false, A::kWait, R::kNever, 2, Code(ExitCode::kStore)},
    {"StoreFull", C::kControl, false, A::kWait, R::kNever, 2, -1},
    {"VersionSkew", C::kControl, false, A::kAvoidNode, R::kNever, 2, Code(ExitCode::kRelease)},
    {"BudgetExhausted", C::kFinal, false, A::kFail, R::kNever, 2, -1},
    {"NoProgress", C::kFinal, false, A::kFail, R::kNever, 2, -1},
    // A resume that the job does not allow (spec.checkpoint.allowNumericsChange).
    {"NumericsChanged", C::kUser, true, A::kFail, R::kNever, 3, -1},
    {"NoGoodCheckpoint", C::kFinal, false, A::kFail, R::kNever, 2, -1},
    {"Rollback", C::kControl, false, A::kRestart, R::kNever, 2, -1},
};

const FailureReason* Find(std::string_view name) {
  for (const FailureReason& reason : kReasons) {
    if (reason.name == name) {
      return &reason;
    }
  }
  return nullptr;
}

}  // namespace

std::span<const FailureReason> FailureReasons() {
  return kReasons;
}

const FailureReason& FindFailureReason(std::string_view name) {
  const FailureReason* found = Find(name);
  return found != nullptr ? *found : *Find("ProcessCrash");
}

std::string_view ReasonOfExit(int32_t exit_code, int32_t signal) {
  if (signal == 0 && exit_code >= 0) {
    for (const FailureReason& reason : kReasons) {
      if (reason.exit_code == exit_code) {
        return reason.name;
      }
    }
  }
  return "ProcessCrash";
}

std::string_view FailureClassName(FailureClass kind) {
  switch (kind) {
    case FailureClass::kUser:
      return "user";
    case FailureClass::kInfrastructure:
      return "infrastructure";
    case FailureClass::kPreemption:
      return "preemption";
    case FailureClass::kCapacity:
      return "capacity";
    case FailureClass::kControl:
      return "control";
    case FailureClass::kFinal:
      return "final";
  }
  CheckFailed(__FILE__, __LINE__, "failure class", "unknown");
}

}  // namespace ravel
