#pragma once

// The C interface of libravel_cuda.so, which hosts open at run time (kernels/cuda_library.h).
// Nothing but C types crosses it. Every change of a function or a struct raises the version; a
// library of another version is refused.

#include <cstdint>

namespace ravel::kernels::cuda {

inline constexpr int32_t kCudaAbiVersion = 1;

extern "C" {

struct RavelCudaDevice {
  char name[256];  // ends with a zero
  uint64_t memory_bytes;
  int32_t compute_major;
  int32_t compute_minor;
  int32_t multiprocessors;
  int32_t reserved;
};

// Functions return 0, or a CUDA runtime error code that `error_text` names.
struct RavelCudaFunctions {
  int32_t (*versions)(int32_t* driver,
                      int32_t* runtime);  // 13020 is 13.2; driver 0: none is installed
  int32_t (*device_count)(int32_t* count);
  int32_t (*device)(int32_t index, RavelCudaDevice* device);
  // Runs a small kernel on the device and checks its result: tells whether this build's device code
  // fits the device.
  int32_t (*self_test)(int32_t index);
  const char* (*error_text)(int32_t error);  // static storage
};

// The two symbols of the library.
using RavelCudaAbiVersionFunction = int32_t (*)();
using RavelCudaFunctionsFunction = const RavelCudaFunctions* (*)();

}  // extern "C"

inline constexpr char kCudaAbiVersionSymbol[] = "ravel_cuda_abi_version";
inline constexpr char kCudaFunctionsSymbol[] = "ravel_cuda_functions";

}  // namespace ravel::kernels::cuda
