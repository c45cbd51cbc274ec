#pragma once

// Why trainers end and jobs fail: one table for trainer, daemon and coordinator. A new reason is a
// new row; no other code compares reasons for their class.

#include <cstdint>
#include <span>
#include <string_view>

namespace ravel {

// How a trainer process ends; anything else, or a signal, is a crash.
enum class ExitCode : int32_t {
  kDone = 0,
  kStopped = 10,       // told to
  kCommunicator = 11,  // a peer is lost, or the group is broken
  kDevice = 12,        // no driver, no such device, or it has failed
  kData = 13,
  kNumeric = 14,       // too many skipped steps in a row
  kOutOfMemory = 15,   // of the host or of the device
  kPlanMismatch = 16,  // job, plan, model or checkpoint do not fit together
  kStore = 17,
  kRelease = 18,  // of another release than its daemon, or than the coordinator where that matters
};

enum class FailureClass { kUser, kInfrastructure, kPreemption, kCapacity, kControl, kFinal };

// The coordinator's answer to the failure.
enum class FailureAnswer {
  kRestart,    // a new epoch from the newest commit
  kAvoidNode,  // the same, and elsewhere if there is room
  kWait,       // a new epoch after a back-off: what is missing comes back by itself
  kMove,       // save if there is time, then shrink or queue
  kStayQueued,
  kFail,
};

// When the same reason again proves that it would come everywhere.
enum class RepeatRule {
  kNever,      // it is the machine's fault however often it comes
  kSameStep,   // twice at the same step: the input decides, not the place
  kElsewhere,  // on a second node, or on the same one when the job could run nowhere else
};

struct FailureReason {
  std::string_view name;
  FailureClass kind = FailureClass::kInfrastructure;
  bool charged = true;
  FailureAnswer answer = FailureAnswer::kRestart;
  RepeatRule repeats = RepeatRule::kNever;
  // The more telling of two causes of one broken epoch has the higher weight: a communicator error
  // is usually what a peer's death looks like.
  int weight = 2;
  int32_t exit_code = -1;  // of a trainer that ends so; -1: no code of its own
};

std::span<const FailureReason> FailureReasons();
// The row of `name`; of ProcessCrash for a name that nobody knows, which a newer trainer may send.
const FailureReason& FindFailureReason(std::string_view name);
// The reason of a trainer's end: of its signal, or of its exit code.
std::string_view ReasonOfExit(int32_t exit_code, int32_t signal);

// "user", "infrastructure", ...
std::string_view FailureClassName(FailureClass kind);

}  // namespace ravel
