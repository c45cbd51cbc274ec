#pragma once

// NCCL over emulated streams: the functions of the library are those of libravel_cuda.so, which
// open what RAVEL_NCCL_LIBRARY names; libnccl_emulated.so gives its work to the streams here.

#include "kernels/cuda/cuda_abi.h"
#include "tests/testing/emulated_cuda/emulated_stream.h"

namespace ravel::kernels::cuda::emulated {

// `use_device` is the table's. Once per process.
void AddEmulatedNccl(EmulatedStreams& streams,
                     int32_t (*use_device)(int32_t index),
                     RavelCudaFunctions& functions);

}  // namespace ravel::kernels::cuda::emulated
