#pragma once

#include <string>

#include "common/status.h"

namespace ravel::ctl {

// Exit codes of ravelctl; documented in README.md, tested, never renumbered.
enum ExitCode : int {
  kExitOk = 0,
  kExitGeneric = 1,
  kExitUsage = 2,  // or an invalid file
  kExitNotFound = 3,
  kExitConflict = 4,  // or a precondition
  kExitNotAllowed = 5,
  kExitUnreachable = 6,
  kExitJobFailedUser = 7,
  kExitJobFailedInfrastructure = 8,
  kExitCancelled = 9,
  kExitTimeout = 124,
  kExitInterrupted = 130,
};

int ExitCodeOf(const absl::Status& status);
// Returns the exit code for a job in a terminal state ("SUCCEEDED", "FAILED", "CANCELLED").
int ExitCodeOfJob(const std::string& state, const std::string& failure_class);

// Prints `ravelctl: MESSAGE` on stderr; returns ExitCodeOf(status).
int Report(const absl::Status& status);
// The same for a mistake in the command line.
int ReportUsage(const std::string& message);

}  // namespace ravel::ctl
