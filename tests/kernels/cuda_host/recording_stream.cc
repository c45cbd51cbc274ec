#include "tests/kernels/cuda_host/recording_stream.h"

#include <optional>

#include <gtest/gtest.h>

#include "kernels/cuda_host/cuda_library.h"
#include "tests/kernels/cuda_host/library_path.h"

namespace ravel::kernels::cuda::testing {
namespace {

// The real table of kernels, where this build has it: asking it needs no device.
const CudaLibrary* BuiltLibrary() {
  static const std::optional<CudaLibrary> library = [] {
    const std::string path = BuiltCudaLibrary();
    std::optional<CudaLibrary> opened;
    if (!path.empty()) {
      absl::StatusOr<CudaLibrary> result = CudaLibrary::Open(path);
      CHECK_MSG(result.ok(), result.status().ToString().c_str());
      opened = *std::move(result);
    }
    return opened;
  }();
  return library.has_value() ? &*library : nullptr;
}

}  // namespace

void RecordingStream::RunKernel(const LaunchShape& shape,
                                const void* params,
                                uint64_t param_bytes) {
  const int32_t kernel = KernelId(shape.kernel, shape.variant);
  EXPECT_TRUE(shape.block % kWarpThreads == 0 && shape.block > 0 && shape.block <= 1024)
      << shape.block;
  EXPECT_TRUE(shape.grid[0] > 0 && shape.grid[1] > 0 && shape.grid[2] > 0);
  EXPECT_LE(shape.grid[1], 65535u);
  EXPECT_LE(shape.grid[2], 65535u);
  EXPECT_LE(shape.shared_bytes, 227u * 1024);
  if (BuiltLibrary() != nullptr) {
    EXPECT_EQ(BuiltLibrary()->functions().has_kernel(kernel, param_bytes), 1)
        << "kernel " << static_cast<int>(shape.kernel) << " variant " << shape.variant;
  }
  Record& record = launches.emplace_back();
  record.shape = shape;
  record.params.resize(param_bytes);
  std::memcpy(record.params.data(), params, param_bytes);
}

}  // namespace ravel::kernels::cuda::testing
