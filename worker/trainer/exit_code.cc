#include "worker/trainer/exit_code.h"

#include <string>

#include <absl/strings/cord.h>
#include <absl/strings/match.h>
#include <absl/strings/numbers.h>
#include <absl/strings/str_cat.h>

#include "common/check.h"
#include "kernels/cuda_library.h"
#include "worker/comm/issue_log.h"

namespace ravel::trainer {
namespace {

constexpr char kPayload[] = "ravel/trainer_exit_code";

}  // namespace

absl::Status WithCode(absl::Status status, ExitCode code) {
  if (!status.ok() && !status.GetPayload(kPayload).has_value()) {
    status.SetPayload(kPayload, absl::Cord(absl::StrCat(static_cast<int>(code))));
  }
  return status;
}

ExitCode CodeOf(const absl::Status& status) {
  const auto payload = status.GetPayload(kPayload);
  int code = 0;
  if (!payload.has_value() || !absl::SimpleAtoi(std::string(*payload), &code)) {
    if (!kernels::IsDeviceError(status)) {
      return ExitCode::kCommunicator;
    }
    return absl::IsResourceExhausted(status) ? ExitCode::kOutOfMemory : ExitCode::kDevice;
  }
  return static_cast<ExitCode>(code);
}

std::string_view ReasonOf(const absl::Status& status) {
  switch (CodeOf(status)) {
    case ExitCode::kDone:
      return "Done";
    case ExitCode::kStopped:
      return "Stopped";
    case ExitCode::kCommunicator:
      return absl::StrContains(status.message(), comm::kMismatchText) ? "CollectiveMismatch"
                                                                      : "CommError";
    case ExitCode::kDevice:
      return "DeviceError";
    case ExitCode::kData:
      return "DataError";
    case ExitCode::kNumeric:
      return "NonFinitePersistent";
    case ExitCode::kOutOfMemory:
      return kernels::IsDeviceError(status) ? "DeviceOutOfMemory" : "HostOutOfMemory";
    case ExitCode::kPlanMismatch:
      return "PlanRejected";
    case ExitCode::kStore:
      if (absl::IsDataLoss(status)) {
        return "CheckpointCorrupt";
      }
      return absl::IsResourceExhausted(status) ? "StoreFull" : "StoreUnavailable";
  }
  CheckFailed(__FILE__, __LINE__, "exit code", "unknown");
}

}  // namespace ravel::trainer
