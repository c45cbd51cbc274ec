#pragma once

// The kernels of libravel_cuda.so: what a launch of each reads and writes, and what it promises.
// Launches run the device's own code (tests/testing/device_code).

#include <cstdint>
#include <cstring>
#include <vector>

#include "tests/testing/emulated_cuda/kernel_work.h"

namespace ravel::kernels::cuda::emulated {

// Declares the operands of a kernel from its argument.
struct KernelOperands {
  Kernel kernel;
  const char* name;
  uint64_t param_bytes;
  void (*declare)(const void* params, Operands& operands);
};

std::vector<KernelOperands> RowKernels();
std::vector<KernelOperands> FlatKernels();
std::vector<KernelOperands> MatrixKernels();
std::vector<KernelOperands> QuantizeKernelOperands();

// The work of a launch. The argument is copied, as the runtime does.
PlannedLaunch PlanLaunch(const RavelCudaLaunch& launch);
bool HasKernel(int32_t kernel, uint64_t param_bytes);

template <typename Params, void (*kDeclare)(const Params&, Operands&)>
KernelOperands Declare(Kernel kernel, const char* name) {
  return {kernel, name, sizeof(Params), [](const void* bytes, Operands& operands) {
            Params params;
            std::memcpy(static_cast<void*>(&params), bytes, sizeof(params));
            kDeclare(params, operands);
          }};
}

}  // namespace ravel::kernels::cuda::emulated
