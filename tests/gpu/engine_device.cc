#include "tests/gpu/engine_device.h"

#include <cstdlib>

#include "tests/testing/device_runs.h"

namespace ravel::trainer {

// Never closed: the driver may be gone before static objects are.
const absl::StatusOr<std::unique_ptr<kernels::CudaGpu>>& EngineDevice() {
  using Device = absl::StatusOr<std::unique_ptr<kernels::CudaGpu>>;
  static const Device& device = []() -> const Device& {
    setenv("RAVEL_CUDA_LIBRARY", RAVEL_BUILT_CUDA_LIBRARY, 0);  // before anything is opened
    return *new Device(OpenDevice());
  }();
  return device;
}

}  // namespace ravel::trainer
