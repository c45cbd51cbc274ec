#include "tests/testing/emulated_cuda/emulated_errors.h"

#include <utility>

#include "kernels/cuda/nccl_library.h"

namespace ravel::kernels::cuda::emulated {
namespace {

std::string& LastText() {
  thread_local std::string text;
  return text;
}

}  // namespace

int32_t Fail(std::string text) {
  LastText() = std::move(text);
  return kOwnError;
}

const char* ErrorText(int32_t error) {
  if (error >= kNcclErrors && error < kNcclErrorsEnd) {
    return NcclErrorText(error);
  }
  switch (error) {
    case kInvalidValue:
      return "invalid argument";
    case kOutOfMemory:
      return "out of memory";
    case kInvalidDevice:
      return "invalid device ordinal";
    case kInvalidHandle:
      return "invalid resource handle";
    case kNotReady:
      return "device not ready";
    case kCaptureUnsupported:
      return "operation not permitted when stream is capturing";
    case kCaptureInvalidated:
      return "operation failed due to a previous error during capture";
    case kCaptureMerge:
      return "operation would merge two independent captures";
    case kCaptureUnjoined:
      return "capturing stream has unjoined work";
    case kCaptureIsolation:
      return "dependency created on uncaptured work in another stream";
    case kCapturedEvent:
      return "operation not permitted on an event last recorded in a capturing stream";
    case kCaptureWrongThread:
      return "attempt to terminate a thread-local capture sequence from another thread";
    case kOwnError:
      return LastText().c_str();
    default:
      return "unknown error";
  }
}

}  // namespace ravel::kernels::cuda::emulated
