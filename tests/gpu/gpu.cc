#include "tests/gpu/gpu.h"

#include <cstdlib>

#include "common/status.h"

namespace ravel::kernels::testing {
namespace {

absl::Status Open(Gpu& gpu) {
  const char* named = std::getenv("RAVEL_CUDA_LIBRARY");
  ASSIGN_OR_RETURN(const CudaLibrary library,
                   CudaLibrary::Open(named != nullptr ? named : RAVEL_BUILT_CUDA_LIBRARY));
  ASSIGN_OR_RETURN(gpu.device, CudaGpu::Open(library, 0));
  ASSIGN_OR_RETURN(gpu.scratch, gpu.device->AllocateDevice(cuda::kScratchBytes));
  ASSIGN_OR_RETURN(gpu.stream,
                   gpu.device->MakeStream(CudaGpu::Priority::kNormal, gpu.scratch.data()));
  return absl::OkStatus();
}

}  // namespace

Gpu& TheGpu() {
  static Gpu& gpu = []() -> Gpu& {
    Gpu& opened = *new Gpu;  // the driver may be gone before static objects are destroyed
    const absl::Status status = Open(opened);
    if (!status.ok()) {
      opened.missing = status.ToString();
    }
    return opened;
  }();
  return gpu;
}

}  // namespace ravel::kernels::testing
