#pragma once

// Ranks as threads of one process, all on one CUDA device: for tests of plans on a device, and for
// a job of one rank.

#include <memory>
#include <vector>

#include "kernels/cuda_host/cuda_device.h"
#include "worker/comm/communicator.h"

namespace ravel::comm {

// One communicator per rank, in rank order; each is used by its own thread, and any may be
// destroyed first, once the streams that were given to it are done. The device outlives them all.
//
// Peers read each other's memory by its address, and a collective is what each rank's own stream
// does after events of its peers: what one rank enqueues waits for what the others have recorded.
// An event must be recorded before anybody can wait for it, so hosts meet once per collective
// (twice where it copies) and hand their events over; no host waits for the device.
absl::StatusOr<std::vector<std::unique_ptr<Communicator>>> CreateDeviceLocalGroup(
    kernels::CudaGpu& gpu, int size);

}  // namespace ravel::comm
