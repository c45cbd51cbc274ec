#pragma once

// How a trainer ends, and how an error travels to where that is decided.

#include <string_view>

#include "common/status.h"

namespace ravel::trainer {

// What a daemon sees; anything else, or a signal, is a crash.
enum class ExitCode : int {
  kDone = 0,
  kStopped = 10,       // told to
  kCommunicator = 11,  // a peer is lost, or the group is broken
  kDevice = 12,        // no driver, no such device, or it has failed
  kData = 13,
  kNumeric = 14,       // too many skipped steps in a row
  kOutOfMemory = 15,   // of the host or of the device
  kPlanMismatch = 16,  // job, plan, model or checkpoint do not fit together
  kStore = 17,
};

// Marks an error with the code that it will end the trainer with; the first mark stays. OK stays
// OK.
absl::Status WithCode(absl::Status status, ExitCode code);
// The mark; without one kDevice or kOutOfMemory for an error of this process's device, and else
// kCommunicator: what runs unmarked is collectives.
ExitCode CodeOf(const absl::Status& status);
// The coordinator's name of the cause: "CommError", "DataError", "CheckpointCorrupt", ...
std::string_view ReasonOf(const absl::Status& status);

}  // namespace ravel::trainer
