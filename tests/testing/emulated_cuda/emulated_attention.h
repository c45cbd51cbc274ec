#pragma once

// What stands for cuDNN's attention: plans for heads of whole 16 bytes and at most 128 elements,
// whose workspace grows with sequences and heads and is overwritten.

#include <cstdint>

#include "tests/testing/emulated_cuda/kernel_work.h"

namespace ravel::kernels::cuda::emulated {

// Our own attention kernels by the CPU's op, unless RAVEL_EMULATED_ATTENTION is device_code. A
// backward kernel computes all gradients and drops those of the other.
void RunOwnAttention(Kernel kernel, DType dtype, int64_t sequences, const AttentionParams& p);

// Why no engine takes the description; empty where one does.
std::string AttentionProblem(const RavelCudaAttention& attention);
uint64_t AttentionWorkspaceBytes(const RavelCudaAttention& attention);
PlannedLaunch PlanAttention(const RavelCudaAttention& attention,
                            const RavelCudaAttentionBuffers& buffers);

}  // namespace ravel::kernels::cuda::emulated
