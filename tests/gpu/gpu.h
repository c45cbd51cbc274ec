#pragma once

// The device that GPU tests share, or why there is none.

#include <memory>
#include <string>

#include "kernels/cuda_device.h"

namespace ravel::kernels::testing {

struct Gpu {
  std::unique_ptr<CudaGpu> device;
  CudaMemory scratch;
  std::unique_ptr<CudaStream> stream;
  std::string missing;  // empty where there is a device
};

// Opened on first use: the library that RAVEL_CUDA_LIBRARY names, else that of this build; device
// 0.
Gpu& TheGpu();

}  // namespace ravel::kernels::testing
