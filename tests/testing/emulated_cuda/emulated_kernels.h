#pragma once

// The emulated kernels: for every kernel and variant of libravel_cuda.so, how a launch becomes
// work. tests/testing/emulated_cuda/README.md says what that proves and what it does not.

#include <cstdint>
#include <cstring>
#include <vector>

#include "tests/testing/emulated_cuda/kernel_work.h"

namespace ravel::kernels::cuda::emulated {

struct EmulatedKernel {
  Kernel kernel;
  int32_t variant;
  const char* name;
  uint64_t param_bytes;
  PlannedLaunch (*plan)(const KernelLaunch& launch, const void* params);
};

std::vector<EmulatedKernel> RowKernels();
std::vector<EmulatedKernel> NormKernels();
std::vector<EmulatedKernel> FlatKernels();
std::vector<EmulatedKernel> MatrixKernels();
std::vector<EmulatedKernel> StatisticsKernels();

const std::vector<EmulatedKernel>& AllKernels();

// The work of a launch. The argument is copied, as the runtime does.
PlannedLaunch PlanLaunch(const RavelCudaLaunch& launch);
bool HasKernel(int32_t kernel, uint64_t param_bytes);

// Entries of a kernel whose launches the function `kPlan` plans, in these variants.
template <typename Params, PlannedLaunch (*kPlan)(const KernelLaunch&, const Params&)>
void AddKernel(Kernel kernel,
               const char* name,
               const std::vector<int32_t>& variants,
               std::vector<EmulatedKernel>& kernels) {
  for (const int32_t variant : variants) {
    kernels.push_back(
        {kernel, variant, name, sizeof(Params), [](const KernelLaunch& launch, const void* bytes) {
           Params params;
           std::memcpy(static_cast<void*>(&params), bytes, sizeof(params));
           return kPlan(launch, params);
         }});
  }
}

}  // namespace ravel::kernels::cuda::emulated
