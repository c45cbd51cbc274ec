#pragma once

// CUDA devices through NCCL: one rank per process and device, or, for tests, several processes on
// one device.

#include <chrono>
#include <functional>
#include <memory>

#include "kernels/cuda_host/cuda_device.h"
#include "worker/comm/communicator.h"
#include "worker/comm/rendezvous.h"

namespace ravel::comm {

struct NcclOptions {
  int rank = 0;
  int size = 1;
  Rendezvous rendezvous = {};
  kernels::CudaGpu* gpu = nullptr;  // outlives the communicator
  // Bound of each set-up: joining the group, and every split.
  std::chrono::milliseconds setup_timeout = std::chrono::minutes(2);
  // Asked from time to time while a set-up waits; an error cancels it. May be null.
  std::function<absl::Status()> keep_going = nullptr;
  int max_ctas = 0;  // blocks of the device that a collective may occupy; 0: NCCL's choice
  // Every tensor collective is preceded by a small one that tells peers what it is, so that ranks
  // that disagree are named (by Failure) instead of waiting for ever. Costs a launch per
  // collective. Without it only the host's collectives find such ranks, and the watch over beats.
  bool check_collectives = false;
};

// Joins the group: rank 0 makes a single-use id, which the rendezvous tells the others.
// DeadlineExceeded where a peer does not come in time; Unavailable, and where it was sought, where
// NCCL is missing or too old. Collectives have no time-out of their own: they end by a failure of
// NCCL or by Abort. Failure asks NCCL and so finds errors of work that is on its way; what runs and
// what is enqueued then ends with the next Abort, from whichever thread.
absl::StatusOr<std::unique_ptr<Communicator>> CreateNcclCommunicator(const NcclOptions& options);

}  // namespace ravel::comm
