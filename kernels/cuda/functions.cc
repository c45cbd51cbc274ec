// The two symbols of the library and its table of functions.

#include "kernels/cuda/functions.h"

#include <array>
#include <mutex>

#include "kernels/cuda/kernel_table.h"
#include "kernels/cuda/nccl_library.h"

namespace ravel::kernels::cuda {
namespace {

std::string& LastText() {
  thread_local std::string text;
  return text;
}

// Loads every kernel: the driver would do so at its first launch, which takes memory beside the
// plan and may wait for what runs on the device, such as a collective that waits for this very
// host. A kernel gets more than 48 KiB of dynamic shared memory only where that was asked for.
cudaError_t PrepareKernels() {
  for (const KernelEntry& entry : AllKernels()) {
    cudaFuncAttributes attributes = {};
    cudaError_t error = cudaFuncGetAttributes(&attributes, entry.function);
    if (error == cudaSuccess && entry.dynamic_shared_bytes > 0) {
      error = cudaFuncSetAttribute(
          entry.function, cudaFuncAttributeMaxDynamicSharedMemorySize, entry.dynamic_shared_bytes);
    }
    if (error != cudaSuccess) {
      return error;
    }
  }
  return cudaSuccess;
}

int32_t SetDevice(int32_t index) {
  return cudaSetDevice(index);
}

void* RawStream(void* stream) {
  return static_cast<StreamHandle*>(stream)->stream;
}

RavelCudaFunctions MakeFunctions() {
  RavelCudaFunctions functions = {};
  AddDeviceFunctions(functions);
  functions.versions = Versions;
  functions.device_count = DeviceCount;
  functions.device = Device;
  functions.self_test = SelfTest;
  functions.error_text = ErrorText;
  functions.use_device = UseDevice;
  functions.launch = Launch;
  functions.has_kernel = HasKernel;
  functions.gemm_version = GemmVersion;
  functions.gemm_candidates = GemmCandidates;
  functions.gemm_run = GemmRun;
  functions.attention_version = AttentionVersion;
  functions.attention_plan = AttentionPlan;
  functions.attention_plan_destroy = AttentionPlanDestroy;
  functions.attention_run = AttentionRun;
  AddNcclFunctions({.use_device = SetDevice, .stream_of = RawStream}, functions);
  return functions;
}

}  // namespace

int32_t Fail(std::string text) {
  LastText() = std::move(text);
  return kOtherError;
}

const char* ErrorText(int32_t error) {
  if (error == kOtherError) {
    return LastText().c_str();
  }
  if (error >= kNcclErrors && error < kNcclErrorsEnd) {
    return NcclErrorText(error);
  }
  if (error >= kCublasLtErrors) {
    LastText() = "cuBLASLt status " + std::to_string(error - kCublasLtErrors);
    return LastText().c_str();
  }
  return cudaGetErrorString(static_cast<cudaError_t>(error));
}

int32_t UseDevice(int32_t index) {
  constexpr int32_t kMaxDevices = 64;
  if (index < 0 || index >= kMaxDevices) {
    return cudaErrorInvalidDevice;
  }
  const cudaError_t error = cudaSetDevice(index);
  if (error != cudaSuccess) {
    return error;
  }
  static std::mutex mutex;
  static std::array<bool, kMaxDevices> prepared = {};
  const std::lock_guard<std::mutex> lock(mutex);
  bool& done = prepared[static_cast<size_t>(index)];
  if (!done) {
    const cudaError_t failure = PrepareKernels();
    if (failure != cudaSuccess) {
      return failure;
    }
    done = true;
  }
  return 0;
}

int32_t HasKernel(int32_t kernel, uint64_t param_bytes) {
  const KernelEntry* entry = FindKernel(kernel);
  return entry != nullptr && entry->param_bytes == param_bytes ? 1 : 0;
}

int32_t Launch(void* stream, const RavelCudaLaunch* launch) {
  const KernelEntry* entry = FindKernel(launch->kernel);
  if (entry == nullptr || entry->param_bytes != launch->param_bytes) {
    return Fail("no kernel " + std::to_string(launch->kernel) + " with an argument of " +
                std::to_string(launch->param_bytes) + " bytes");
  }
  const StreamHandle* handle = static_cast<StreamHandle*>(stream);
  const cudaError_t error = cudaSetDevice(handle->device);
  if (error != cudaSuccess) {
    return error;
  }
  void* arguments[] = {const_cast<void*>(launch->params)};
  return cudaLaunchKernel(entry->function,
                          dim3(launch->grid[0], launch->grid[1], launch->grid[2]),
                          dim3(launch->block),
                          arguments,
                          launch->shared_bytes,
                          handle->stream);
}

extern "C" __attribute__((visibility("default"))) int32_t ravel_cuda_abi_version() {
  return kCudaAbiVersion;
}

extern "C" __attribute__((visibility("default"))) const RavelCudaFunctions* ravel_cuda_functions() {
  static const RavelCudaFunctions functions = MakeFunctions();
  return &functions;
}

}  // namespace ravel::kernels::cuda
