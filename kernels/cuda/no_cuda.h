#pragma once

namespace ravel::kernels::cuda {

// Ends the process: `op` was given a CUDA stream, and no CUDA implementation of it is in this
// build.
[[noreturn]] void RefuseOp(const char* op);

}  // namespace ravel::kernels::cuda
