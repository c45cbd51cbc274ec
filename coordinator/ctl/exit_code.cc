#include "coordinator/ctl/exit_code.h"

#include <cstdio>

namespace ravel::ctl {

int ExitCodeOf(const absl::Status& status) {
  switch (status.code()) {
    case absl::StatusCode::kOk:
      return kExitOk;
    case absl::StatusCode::kInvalidArgument:
      return kExitUsage;
    case absl::StatusCode::kNotFound:
      return kExitNotFound;
    case absl::StatusCode::kAlreadyExists:
    case absl::StatusCode::kFailedPrecondition:
    case absl::StatusCode::kAborted:
      return kExitConflict;
    case absl::StatusCode::kPermissionDenied:
    case absl::StatusCode::kUnauthenticated:
      return kExitNotAllowed;
    case absl::StatusCode::kUnavailable:
    case absl::StatusCode::kDeadlineExceeded:
      return kExitUnreachable;
    case absl::StatusCode::kCancelled:
      return kExitInterrupted;
    default:
      return kExitGeneric;
  }
}

int ExitCodeOfJob(const std::string& state, const std::string& failure_class) {
  if (state == "SUCCEEDED") {
    return kExitOk;
  }
  if (state == "CANCELLED") {
    return kExitCancelled;
  }
  return failure_class == "user" ? kExitJobFailedUser : kExitJobFailedInfrastructure;
}

int Report(const absl::Status& status) {
  if (!status.ok() && !absl::IsCancelled(status)) {  // whoever pressed Ctrl-C knows
    const std::string message(status.message());
    std::fprintf(stderr, "ravelctl: %s\n", message.c_str());
  }
  return ExitCodeOf(status);
}

int ReportUsage(const std::string& message) {
  std::fprintf(stderr, "ravelctl: %s\n", message.c_str());
  return kExitUsage;
}

}  // namespace ravel::ctl
