#pragma once

// Inside libravel_cuda.so: what stands behind the functions of cuda_abi.h, and its handles.

#include <cstdint>
#include <string>

#include <cuda_runtime_api.h>

#include "kernels/cuda/cuda_abi.h"

namespace ravel::kernels::cuda {

// Errors of other libraries, beside those of the CUDA runtime.
inline constexpr int32_t kCublasLtErrors = 10000;  // plus a cublasStatus_t
inline constexpr int32_t kOtherError = 20000;      // the text that Fail was given

struct StreamHandle {
  int32_t device;
  cudaStream_t stream;
  void* cudnn = nullptr;  // functions_cudnn.cc
};
struct EventHandle {
  int32_t device;
  cudaEvent_t event;
};
struct GraphHandle {
  int32_t device;
  cudaGraphExec_t graph;
};

// `call` with the device current. What frees, asks or waits needs that, too: a thread that has
// chosen no device has device 0, and with its first call makes a context there, which takes
// hundreds of MiB.
template <typename Call>
int32_t On(int32_t device, const Call& call) {
  const cudaError_t error = cudaSetDevice(device);
  return error != cudaSuccess ? error : static_cast<int32_t>(call());
}

// Remembers the text for ErrorText of this thread; returns kOtherError.
int32_t Fail(std::string text);
const char* ErrorText(int32_t error);

int32_t Versions(int32_t* driver, int32_t* runtime);
int32_t DeviceCount(int32_t* count);
int32_t Device(int32_t index, RavelCudaDevice* device);
int32_t SelfTest(int32_t index);

int32_t UseDevice(int32_t index);
int32_t Launch(void* stream, const RavelCudaLaunch* launch);
int32_t HasKernel(int32_t kernel, uint64_t param_bytes);

int32_t GemmVersion(uint64_t* version);
int32_t GemmCandidates(int32_t index,
                       const RavelCudaGemm* gemm,
                       uint64_t workspace_bytes,
                       RavelCudaAlgorithm* algorithms,
                       int32_t limit,
                       int32_t* count);
int32_t GemmRun(void* stream,
                const RavelCudaGemm* gemm,
                const RavelCudaAlgorithm* algorithm,
                const RavelCudaGemmBuffers* buffers);

int32_t AttentionVersion(uint64_t* version);
int32_t AttentionPlan(void* stream,
                      const RavelCudaAttention* attention,
                      RavelCudaAttentionPlan* plan);
int32_t AttentionPlanDestroy(void* plan);
int32_t AttentionRun(void* stream, void* plan, const RavelCudaAttentionBuffers* buffers);
// Releases a stream's cuDNN handle; called before the stream is destroyed.
void ReleaseAttention(StreamHandle& on);

// Fills in the functions of functions_runtime.cc: memory, streams, events, copies, graphs, ranges.
void AddDeviceFunctions(RavelCudaFunctions& functions);

}  // namespace ravel::kernels::cuda
