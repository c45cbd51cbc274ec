#pragma once

// The functions of the CUDA runtime that kernels/cuda/functions_runtime.cc calls, over two devices
// without memory. A thread has no device until it selects one: the real runtime would make a
// context on device 0 then.

#include <string>
#include <vector>

namespace ravel::kernels::cuda::fake_runtime {

// "NAME: device 1, current -1" for each call so far on a handle whose device was not the thread's
// current one. Thread-safe.
std::vector<std::string> Faults();
// Names of all calls so far, in order.
std::vector<std::string> Calls();

}  // namespace ravel::kernels::cuda::fake_runtime
