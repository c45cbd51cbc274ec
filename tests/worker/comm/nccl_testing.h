#pragma once

// Communicators over NCCL for tests that know only memory of the host.

#include <functional>
#include <memory>
#include <string>

#include "common/status.h"
#include "kernels/cuda_host/cuda_device.h"
#include "tests/testing/emulated_nccl/emulated_nccl.h"
#include "worker/comm/communicator.h"
#include "worker/comm/nccl_communicator.h"

namespace ravel::comm {

// Names the libraries that this test is built for in the environment, unless others are named
// there; for NCCL perhaps none. To be called before the first device of the process is opened.
void UseTestLibraries();

// Device 0.
absl::StatusOr<std::unique_ptr<kernels::CudaGpu>> OpenTestGpu();

// Stands before a device communicator: its arena and all operands are memory of the host, and every
// collective is waited for. Memory of the device is staged, so it works on real devices, too.
// `options.gpu` is opened here.
absl::StatusOr<std::unique_ptr<Communicator>> CreateHostedNccl(NcclOptions options);

// Waits for the stream, or for a failure of the communicator.
absl::Status WaitForStream(const kernels::CudaStream& stream, const Communicator& communicator);

// Of tests built for the emulated NCCL: what it does wrong from now on, and what it has counted.
inline constexpr kernels::cuda::emulated::EmulatedNcclFaults kNoFaults = {-1, -1, -1, -1, -1};
void InjectNcclFaults(const kernels::cuda::emulated::EmulatedNcclFaults& faults);
kernels::cuda::emulated::EmulatedNcclCounts CountsOfNccl();

}  // namespace ravel::comm
