#pragma once

// Turns the end of a trainer process into the reason that the coordinator acts on. Pure.

#include <cstdint>
#include <string>

namespace ravel::daemon {

// How a child ended, as the kernel tells it: one of the two is set.
struct ExitStatus {
  int32_t exit_code = -1;  // -1 when it was ended by a signal
  int32_t signal = 0;
};

// "Done" for 0, else as common/failure_reason.h has it: "ProcessCrash" for a signal and for every
// code without a row.
std::string ExitReason(const ExitStatus& status);

// "exit code 13", "signal 9 (Killed)"
std::string ExitText(const ExitStatus& status);

}  // namespace ravel::daemon
