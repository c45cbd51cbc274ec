#include "kernels/cuda/no_cuda.h"

#include <array>
#include <cstdio>

#include "common/check.h"

namespace ravel::kernels::cuda {

void RefuseOp(const char* op) {
  std::array<char, 160> message;
  std::snprintf(message.data(),
                message.size(),
                "%s was given a CUDA stream, but has no CUDA kernel: use a CPU stream",
                op);
  CheckFailed(__FILE__, __LINE__, "an op runs where its kernel exists", message.data());
}

}  // namespace ravel::kernels::cuda
