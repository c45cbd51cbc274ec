#pragma once

// The kernels of the .cu files: each file offers a list, and the lists are joined to one table by
// id. Inside libravel_cuda.so, and in what runs the same files on a host
// (tests/testing/device_code).

#include <cstdint>
#include <vector>

#include "kernels/cuda/kernel_params.h"

namespace ravel::kernels::cuda {

struct KernelEntry {
  Kernel kernel;
  int32_t variant;
  const void* function;
  uint64_t param_bytes;
  // Asked of the device when it is first used; 0 below the limit that needs no asking.
  int32_t dynamic_shared_bytes = 0;
};

std::vector<KernelEntry> NormKernels();
std::vector<KernelEntry> HeadNormKernels();
std::vector<KernelEntry> LayerNormKernels();
std::vector<KernelEntry> ActivationKernels();
std::vector<KernelEntry> GeluKernels();
std::vector<KernelEntry> BiasKernels();
std::vector<KernelEntry> RopeKernels();
std::vector<KernelEntry> EmbeddingKernels();
std::vector<KernelEntry> LossKernels();
std::vector<KernelEntry> PartKernels();
std::vector<KernelEntry> AdamWKernels();
std::vector<KernelEntry> WeightUpdateKernels();
std::vector<KernelEntry> ReduceKernels();
std::vector<KernelEntry> CastKernels();
std::vector<KernelEntry> GemmKernels();
std::vector<KernelEntry> AttentionKernels();
std::vector<KernelEntry> QuantizeKernels();
std::vector<KernelEntry> TensorCodesKernels();
std::vector<KernelEntry> BlockCodesKernels();
std::vector<KernelEntry> Fp4CodesKernels();
std::vector<KernelEntry> WeightCodeKernels();
std::vector<KernelEntry> StatisticsKernels();
std::vector<KernelEntry> StartKernels();

// The entry of an id; null where there is none.
const KernelEntry* FindKernel(int32_t kernel);
const std::vector<KernelEntry>& AllKernels();

template <typename Params>
KernelEntry EntryOf(Kernel kernel, int32_t variant, void (*function)(Params)) {
  return {kernel, variant, reinterpret_cast<const void*>(function), sizeof(Params)};
}

}  // namespace ravel::kernels::cuda
