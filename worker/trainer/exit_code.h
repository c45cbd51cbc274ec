#pragma once

// How a trainer ends, and how an error travels to where that is decided.

#include <string_view>

#include "common/failure_reason.h"
#include "common/status.h"

namespace ravel::trainer {

using ravel::ExitCode;

// Marks an error with the code that it will end the trainer with; the first mark stays. OK stays
// OK.
absl::Status WithCode(absl::Status status, ExitCode code);
// The mark; without one kDevice or kOutOfMemory for an error of this process's device, and else
// kCommunicator: what runs unmarked is collectives.
ExitCode CodeOf(const absl::Status& status);
// The coordinator's name of the cause: "CommError", "DataError", "CheckpointCorrupt", ...
std::string_view ReasonOf(const absl::Status& status);

}  // namespace ravel::trainer
