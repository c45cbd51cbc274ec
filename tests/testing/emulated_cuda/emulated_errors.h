#pragma once

// Error codes of the CUDA runtime that the emulation gives, and texts of its own.

#include <cstdint>
#include <string>

namespace ravel::kernels::cuda::emulated {

enum RuntimeError : int32_t {
  kInvalidValue = 1,
  kOutOfMemory = 2,
  kInvalidDevice = 101,
  kInvalidHandle = 400,
  kNotReady = 600,
  kCaptureUnsupported = 900,
  kCaptureInvalidated = 901,
  kCaptureMerge = 902,
  kCaptureUnjoined = 904,
  kCaptureIsolation = 905,
  kCapturedEvent = 907,
  kCaptureWrongThread = 908,
};
inline constexpr int32_t kOwnError = 20000;  // the text that Fail was given

// Remembers the text for ErrorText of this thread; returns kOwnError.
int32_t Fail(std::string text);
const char* ErrorText(int32_t error);

}  // namespace ravel::kernels::cuda::emulated
