#pragma once

// What stands for cuBLASLt: two algorithms that give the same bits, the first of which also
// overwrites workspace. RAVEL_EMULATED_GEMM_ORDER, read whenever they are asked for, makes bits
// depend on m and n, as a library's may: 1 through what is proposed, which sums k in one to three
// pieces; 2 through what is run, by the size that it is given then.

#include <cstdint>

#include "tests/testing/emulated_cuda/kernel_work.h"

namespace ravel::kernels::cuda::emulated {

// As gemm_candidates, for a gemm that fits; false where strides, types or sizes do not, or where
// devices of this compute capability (major number) have none with scales of such blocks.
bool GemmIsOffered(const RavelCudaGemm& gemm, int32_t compute_major);
int32_t GemmAlgorithms(const RavelCudaGemm& gemm,
                       uint64_t workspace_bytes,
                       RavelCudaAlgorithm* algorithms,
                       int32_t limit);
PlannedLaunch PlanCublasGemm(const RavelCudaGemm& gemm,
                             const RavelCudaAlgorithm& algorithm,
                             const RavelCudaGemmBuffers& buffers,
                             int32_t compute_major);

}  // namespace ravel::kernels::cuda::emulated
