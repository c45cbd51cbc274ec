// Reports what the CUDA runtime says about this host, and a self-test of device code. 4 KiB moved
// per self-test: latency-bound.

#include <cstdint>
#include <cstdio>
#include <cstring>

#include <cuda_runtime_api.h>

#include "kernels/cuda/functions.h"

namespace ravel::kernels::cuda {
namespace {

constexpr int kSelfTestElements = 1024;

__global__ void SelfTestKernel(uint32_t* values) {
  const uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
  values[i] = i * 2654435761u;
}

}  // namespace

int32_t Versions(int32_t* driver, int32_t* runtime) {
  const cudaError_t error = cudaDriverGetVersion(driver);
  return error != cudaSuccess ? error : cudaRuntimeGetVersion(runtime);
}

int32_t DeviceCount(int32_t* count) {
  return cudaGetDeviceCount(count);
}

int32_t Device(int32_t index, RavelCudaDevice* device) {
  cudaDeviceProp properties;
  const cudaError_t error = cudaGetDeviceProperties(&properties, index);
  if (error != cudaSuccess) {
    return error;
  }
  static_assert(sizeof(device->name) == sizeof(properties.name));
  std::memcpy(device->name, properties.name, sizeof(device->name));
  device->memory_bytes = properties.totalGlobalMem;
  device->compute_major = properties.major;
  device->compute_minor = properties.minor;
  device->multiprocessors = properties.multiProcessorCount;
  device->cache_bytes = properties.l2CacheSize;
  std::snprintf(device->pci,
                sizeof(device->pci),
                "%04x:%02x:%02x.0",
                static_cast<unsigned>(properties.pciDomainID),
                static_cast<unsigned>(properties.pciBusID),
                static_cast<unsigned>(properties.pciDeviceID));
  return 0;
}

namespace {

// Launches on a stream of its own and compares with the host's result.
cudaError_t RunSelfTest(uint32_t* values, cudaStream_t stream) {
  // Not <<<>>>, after which the thread's last error would tell of calls before this one, too.
  void* arguments[] = {&values};
  cudaError_t error = cudaLaunchKernel(reinterpret_cast<const void*>(SelfTestKernel),
                                       dim3(kSelfTestElements / 256),
                                       dim3(256),
                                       arguments,
                                       0,
                                       stream);
  uint32_t host[kSelfTestElements] = {};
  if (error == cudaSuccess) {
    error = cudaMemcpyAsync(host, values, sizeof(host), cudaMemcpyDeviceToHost, stream);
  }
  if (error == cudaSuccess) {
    error = cudaStreamSynchronize(stream);
  }
  for (uint32_t i = 0; error == cudaSuccess && i < kSelfTestElements; ++i) {
    if (host[i] != i * 2654435761u) {
      error = cudaErrorAssert;
    }
  }
  return error;
}

}  // namespace

int32_t SelfTest(int32_t index) {
  cudaError_t error = cudaSetDevice(index);
  cudaStream_t stream = nullptr;
  if (error == cudaSuccess) {
    error = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  }
  if (error != cudaSuccess) {
    return error;
  }
  void* values = nullptr;
  error = cudaMalloc(&values, kSelfTestElements * sizeof(uint32_t));
  if (error == cudaSuccess) {
    error = RunSelfTest(static_cast<uint32_t*>(values), stream);
    cudaFree(values);
  }
  cudaStreamDestroy(stream);
  return error;
}

}  // namespace ravel::kernels::cuda
