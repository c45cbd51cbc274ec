#pragma once

// The device of the engine's tests in this process.

#include <algorithm>
#include <cstdint>
#include <memory>

#include <absl/strings/match.h>
#include <gtest/gtest.h>

#include "common/status.h"
#include "kernels/cuda_host/cuda_device.h"

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
  static bool emulated() { return absl::StrContains(gpu().properties().name, "Emulated"); }
  // Number of steps of a curve of `all` that are compared: on an emulated device the first 10,
  // since a step takes 0.1 s there.
  static int64_t ComparedSteps(int64_t all) {
    return emulated() ? std::min<int64_t>(all, 10) : all;
  }
};

}  // namespace ravel::trainer
