#pragma once

#include <functional>

#include "kernels/cuda/cuda_abi.h"

namespace ravel::kernels::cuda::simt {

// In which threads of a block, and blocks of a grid, take their turns: what one of them needs of
// another without a barrier is missing in some order.
enum class TurnOrder { kAscending, kDescending, kScattered };

using ThreadBody = std::function<void()>;

// Calls `body` as every thread of every block of a launch. Shared memory is NaN at first, where
// it is dynamic.
void RunBlocks(const RavelCudaLaunch& launch, TurnOrder order, const ThreadBody& body);

}  // namespace ravel::kernels::cuda::simt
