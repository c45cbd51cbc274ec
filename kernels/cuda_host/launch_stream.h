#pragma once

// A stream as the host half of the CUDA ops sees it: it launches kernels by name, each with one
// argument. CudaStream (kernels/cuda_host/cuda_device.h) gives them to the device; tests record
// them.

#include <array>
#include <cstdint>

#include "kernels/cuda/cuda_abi.h"
#include "kernels/cuda/kernel_params.h"
#include "kernels/gemm.h"
#include "kernels/stream.h"

namespace ravel::kernels::cuda {

struct LaunchShape {
  Kernel kernel;
  int32_t variant = 0;
  std::array<uint32_t, 3> grid = {1, 1, 1};
  uint32_t block = kFlatThreads;
  uint32_t shared_bytes = 0;
};

// Scratch that every stream has for its ops, one at a time. Part of the memory plan; fixed, because
// it bounds which algorithms a gemm may use, and so its bits.
inline constexpr int64_t kScratchBytes = int64_t{64} << 20;

// Used only from the thread that issues the stream's work. A failure ends the process.
class LaunchStream : public Stream {
 public:
  Backend backend() const final { return Backend::kCuda; }
  virtual int multiprocessors() const = 0;

  template <typename Params>
  void Run(const LaunchShape& shape, const Params& params) {
    RunKernel(shape, &params, sizeof(params));
  }
  virtual void RunKernel(const LaunchShape& shape, const void* params, uint64_t param_bytes) = 0;
  virtual void CopyMemory(void* to, const void* from, int64_t bytes) = 0;
  virtual void FillZero(void* to, int64_t bytes) = 0;
  // False where there is no cuBLASLt, or it has no algorithm for the gemm. The workspace is the
  // stream's matter.
  virtual bool RunGemm(const RavelCudaGemm& gemm,
                       const RavelCudaGemmBuffers& operands,
                       const GemmPart& part) = 0;
  // Attention through cuDNN, within the workspace of the buffers, or within the stream's where that
  // is larger; false where it has no engine for the description.
  virtual bool RunAttention(const RavelCudaAttention& attention,
                            const RavelCudaAttentionBuffers& buffers) = 0;
  // Makes the choice that RunAttention will follow with so much workspace or more; the workspace
  // with which it would run at once.
  virtual int64_t PrepareAttention(const RavelCudaAttention& attention,
                                   uint64_t workspace_bytes) = 0;
  // Device memory that the next op may overwrite; at most kScratchBytes.
  virtual void* Scratch(int64_t bytes) = 0;
  // Waits for the stream.
  virtual uint64_t ReadWord(const void* device_word) = 0;
};

}  // namespace ravel::kernels::cuda
