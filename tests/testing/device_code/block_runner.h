#pragma once

#include "kernels/cuda/cuda_abi.h"

namespace ravel::kernels::cuda::simt {

// In which threads of a block, and blocks of a grid, take their turns: what one of them needs of
// another without a barrier is missing in some order.
enum class TurnOrder { kAscending, kDescending, kScattered };

// A kernel and its argument.
struct KernelCall {
  void (*caller)(const void* function, const void* params);
  const void* function;
  const void* params;

  void Run() const { caller(function, params); }
};

// Makes the call as every thread of every block of a launch. Shared memory is NaN at first, where
// it is dynamic. One launch at a time.
void RunBlocks(const RavelCudaLaunch& launch, TurnOrder order, const KernelCall& call);

}  // namespace ravel::kernels::cuda::simt
