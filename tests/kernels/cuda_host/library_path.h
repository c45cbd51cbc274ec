#pragma once

#include <string>

namespace ravel::kernels::cuda::testing {

// The libravel_cuda.so of this build; empty in builds without CUDA.
inline std::string BuiltCudaLibrary() {
  return RAVEL_BUILT_CUDA_LIBRARY;
}

}  // namespace ravel::kernels::cuda::testing
