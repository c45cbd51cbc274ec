#pragma once

// The kernels of kernels/cuda, compiled for the host and run one block after another. README.md
// says what that proves.

#include <string>

#include "kernels/cuda/cuda_abi.h"

namespace ravel::kernels::cuda::simt {

// True if there is a kernel of this id that takes an argument of so many bytes.
bool HasKernel(int32_t kernel, uint64_t param_bytes);

// What a device would refuse of a launch before it begins; empty if nothing.
std::string LaunchProblem(const RavelCudaLaunch& launch);

// Runs a launch that has no problem, to its end. A fault of the device code (a trap, a barrier that
// not all threads reach) ends the process with a message. The argument lies at a multiple of 8.
// Thread-safe: launches run one at a time.
void RunLaunch(const RavelCudaLaunch& launch);

}  // namespace ravel::kernels::cuda::simt
