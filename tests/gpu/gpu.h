#pragma once

// The device that GPU tests share, or why there is none.

#include <cstdint>
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

// Of a test's inputs: the same ones in every run; others with
// --gtest_shuffle --gtest_random_seed=N, and others again in each round of --gtest_repeat.
uint64_t InputSeed();

}  // namespace ravel::kernels::testing
