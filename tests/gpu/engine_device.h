#pragma once

// The device of the engine's tests in this process.

#include <memory>

#include <gtest/gtest.h>

#include "common/status.h"
#include "kernels/cuda_device.h"

namespace ravel::trainer {

// Of the library of this build, unless RAVEL_CUDA_LIBRARY names another; or why there is none.
const absl::StatusOr<std::unique_ptr<kernels::CudaGpu>>& EngineDevice();

class GpuEngine : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!EngineDevice().ok()) {
      GTEST_SKIP() << EngineDevice().status();
    }
  }
  static kernels::CudaGpu& gpu() { return **EngineDevice(); }
};

}  // namespace ravel::trainer
