#include "worker/daemon/exit_reason.h"

#include <cstring>

#include <absl/strings/str_cat.h>

#include "common/failure_reason.h"

namespace ravel::daemon {

std::string ExitReason(const ExitStatus& status) {
  return std::string(ReasonOfExit(status.exit_code, status.signal));
}

std::string ExitText(const ExitStatus& status) {
  if (status.signal != 0) {
    return absl::StrCat("signal ", status.signal, " (", std::string(strsignal(status.signal)), ")");
  }
  return absl::StrCat("exit code ", status.exit_code);
}

}  // namespace ravel::daemon
