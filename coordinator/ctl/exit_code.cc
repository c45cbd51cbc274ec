#include "coordinator/ctl/exit_code.h"

#include <absl/strings/str_cat.h>

#include "coordinator/ctl/output.h"

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
    Say(absl::StrCat("ravelctl: ", status.message()));
  }
  return ExitCodeOf(status);
}

int ReportUsage(const std::string& message) {
  Say(absl::StrCat("ravelctl: ", message));
  return kExitUsage;
}

}  // namespace ravel::ctl
