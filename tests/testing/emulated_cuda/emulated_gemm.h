#pragma once

// What stands for cuBLASLt: two algorithms that give the same bits, the first of which also
// overwrites workspace.

#include <cstdint>

#include "tests/testing/emulated_cuda/kernel_work.h"

namespace ravel::kernels::cuda::emulated {

// As gemm_candidates, for a gemm that fits; false where strides, types or sizes do not.
bool GemmIsOffered(const RavelCudaGemm& gemm);
int32_t GemmAlgorithms(uint64_t workspace_bytes, RavelCudaAlgorithm* algorithms, int32_t limit);
PlannedLaunch PlanCublasGemm(const RavelCudaGemm& gemm,
                             const RavelCudaAlgorithm& algorithm,
                             const RavelCudaGemmBuffers& buffers);

}  // namespace ravel::kernels::cuda::emulated
