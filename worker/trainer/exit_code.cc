#include "worker/trainer/exit_code.h"

#include <string>

#include <absl/strings/cord.h>
#include <absl/strings/match.h>
#include <absl/strings/numbers.h>
#include <absl/strings/str_cat.h>

#include "common/store/store_refusal.h"
#include "kernels/cuda_host/cuda_library.h"
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
  const ExitCode code = CodeOf(status);
  // One code may stand for several reasons; the trainer knows more than its code says.
  if (code == ExitCode::kCommunicator && absl::StrContains(status.message(), comm::kMismatchText)) {
    return "CollectiveMismatch";
  }
  if (code == ExitCode::kOutOfMemory && kernels::IsDeviceError(status)) {
    return "DeviceOutOfMemory";
  }
  if (code == ExitCode::kStore && store::RefusalOf(status) == store::RefusalCause::kJobKeys) {
    return "StoreRefused";
  }
  if (code == ExitCode::kStore && absl::IsDataLoss(status)) {
    return "CheckpointCorrupt";
  }
  if (code == ExitCode::kStore && absl::IsResourceExhausted(status)) {
    return "StoreFull";
  }
  return ReasonOfExit(static_cast<int32_t>(code), 0);
}

}  // namespace ravel::trainer
