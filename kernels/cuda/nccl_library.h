#pragma once

// The NCCL functions of cuda_abi.h over libnccl.so.2, which is opened when one of them is first
// called. No CUDA header: what needs the runtime is passed in, so the same code stands behind
// libravel_cuda.so and behind the emulated one of the tests.

#include <cstdint>
#include <string>

#include "kernels/cuda/cuda_abi.h"
#include "kernels/cuda/nccl_api.h"

namespace ravel::kernels::cuda {

// Names a library in place of those that are looked for.
inline constexpr char kNcclLibrarySetting[] = "RAVEL_NCCL_LIBRARY";
// Oldest that works; 2.28.3 to 2.28.8 lose messages and are refused.
inline constexpr int kOldestNccl = 22700;

static_assert(kNcclInCuda == kNcclErrors + kNcclUnhandledCudaError);

struct NcclLibrary {
  NcclFunctions functions;
  int version = 0;      // 22809 is 2.28.9
  std::string missing;  // why it cannot be used, and where it was sought; empty if it can
};
// `chosen`: the one library to open, or empty. It stays open.
NcclLibrary OpenNccl(const std::string& chosen);
// Why a library of this version is refused; empty if it is not.
std::string NcclVersionFault(int version);

// Functions of the CUDA runtime that the NCCL functions need.
struct NcclHost {
  int32_t (*use_device)(int32_t index);  // current device of the calling thread
  void* (*stream_of)(void* stream);      // cudaStream_t of a handle of this library
};
void AddNcclFunctions(const NcclHost& host, RavelCudaFunctions& functions);
// Returns the text of an error in [kNcclErrors, kNcclErrorsEnd); valid until the thread's next
// call.
const char* NcclErrorText(int32_t error);

}  // namespace ravel::kernels::cuda
