#pragma once

// The device of the engine's tests in this process.

#include <algorithm>
#include <cstdint>
#include <memory>

#include <absl/strings/match.h>
#include <gtest/gtest.h>

#include "common/model/gemm_paths.h"
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
  // Why the device has no gemms of this recipe's codes, if it has none.
  static absl::Status CheckCodes(plan::Recipe recipe) {
    return CheckPath(plan::PathOfCodes(recipe));
  }
  static absl::Status CheckPath(plan::GemmPath path) {
    const kernels::CudaDevice& device = gpu().properties();
    return plan::CheckGemmPath(path,
                               {.name = device.name,
                                .compute_major = device.compute_major,
                                .compute_minor = device.compute_minor,
                                .cublas_lt_version = gpu().cublas_version()});
  }
  // Number of steps of a curve of `all` that are compared: on an emulated device the first 10,
  // since a step takes 0.1 s there.
  static int64_t ComparedSteps(int64_t all) {
    return emulated() ? std::min<int64_t>(all, 10) : all;
  }
};

}  // namespace ravel::trainer
