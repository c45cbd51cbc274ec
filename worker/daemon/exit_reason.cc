#include "worker/daemon/exit_reason.h"

#include <cstring>

#include <absl/strings/str_cat.h>

namespace ravel::daemon {

std::string ExitReason(const ExitStatus& status) {
  if (status.signal != 0) {
    return "ProcessCrash";
  }
  switch (status.exit_code) {
    case 0:
      return "Done";
    case 10:
      return "Stopped";
    case 11:
      return "CommError";
    case 12:
      return "DeviceError";
    case 13:
      return "DataError";
    case 14:
      return "NonFinitePersistent";
    case 15:
      return "HostOutOfMemory";
    case 16:
      return "PlanRejected";
    case 17:
      return "StoreUnavailable";
    default:
      return "ProcessCrash";
  }
}

std::string ExitText(const ExitStatus& status) {
  if (status.signal != 0) {
    return absl::StrCat("signal ", status.signal, " (", std::string(strsignal(status.signal)), ")");
  }
  return absl::StrCat("exit code ", status.exit_code);
}

}  // namespace ravel::daemon
