#pragma once

// libravel_cuda.so, opened at run time: the same binaries run on hosts without CUDA, where the
// answer is a status.

#include <cstdint>
#include <string>
#include <vector>

#include <absl/status/status.h>
#include <absl/status/statusor.h>

#include "kernels/cuda/cuda_abi.h"

namespace ravel::kernels {

inline constexpr int32_t kCudaOutOfMemory = 2;  // cudaErrorMemoryAllocation

struct CudaDevice {
  std::string name;
  uint64_t memory_bytes = 0;
  int compute_major = 0;
  int compute_minor = 0;
  int multiprocessors = 0;
  int64_t cache_bytes = 0;  // of the cache that all multiprocessors share
  std::string pci = {};     // "0000:17:00.0"; empty: unknown
};

struct CudaVersions {
  int driver = 0;  // 13020 is 13.2; 0 where no driver is installed
  int runtime = 0;
};

// Returns the path where the library is expected: the value of the environment variable
// RAVEL_CUDA_LIBRARY, else libravel_cuda.so in the folder of the running binary.
std::string DefaultCudaLibraryPath();

// Stays open for the process. Thread-compatible.
class CudaLibrary {
 public:
  // NotFound where there is no file, FailedPrecondition for a file that cannot be loaded or has
  // another ABI version.
  static absl::StatusOr<CudaLibrary> Open(const std::string& path);

  absl::StatusOr<CudaVersions> Versions() const;
  // Unavailable, with the runtime's reason, where there is no driver or no device.
  absl::StatusOr<std::vector<CudaDevice>> Devices() const;
  // Runs a small kernel on the device.
  absl::Status SelfTest(int index) const;

  // OK for 0, else an error that is one of the device (see IsDeviceError): ResourceExhausted where
  // memory is short, Unavailable for all else, with the library's text and what usually helps.
  absl::Status ToStatus(int32_t error, const std::string& what) const;
  const cuda::RavelCudaFunctions& functions() const { return *functions_; }

 private:
  CudaLibrary(std::string path, const cuda::RavelCudaFunctions* functions)
      : path_(std::move(path)), functions_(functions) {}

  std::string path_;
  const cuda::RavelCudaFunctions* functions_;
};

// Returns true if a status of ToStatus, however annotated, is a fault of this process's device or
// its libraries, and not of a peer. All errors of the runtime and of libraries that it opens are;
// of NCCL's errors those that failed in CUDA, and that it was not found.
bool IsDeviceError(const absl::Status& status);
// Returns a hint that usually helps against an error of the CUDA runtime; empty where there is
// none.
std::string CudaHint(int32_t error);

}  // namespace ravel::kernels
