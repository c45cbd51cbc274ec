#pragma once

// The communicator that a plan's transport names.

#include <chrono>
#include <functional>
#include <memory>
#include <string>

#include "common/net_address.h"
#include "kernels/cuda_host/cuda_device.h"
#include "worker/comm/communicator.h"
#include "worker/comm/rendezvous.h"

namespace ravel::comm {

struct CommunicatorOptions {
  std::string transport;  // "local" (one rank), "shm", "gloo", "mixed", "nccl"
  int rank = 0;
  int size = 1;
  Rendezvous rendezvous = {};     // not used by "local"
  std::string host_address = {};  // gloo, mixed: address of this host that peers can reach
  PortRange ports = {};           // gloo, mixed: see GlooOptions
  std::chrono::milliseconds timeout =
      std::chrono::seconds(30);  // gloo, mixed: bound of set-up and of each transfer
  // nccl: see NcclOptions.
  kernels::CudaGpu* gpu = nullptr;
  std::chrono::milliseconds setup_timeout = std::chrono::minutes(2);
  std::function<absl::Status()> keep_going = nullptr;
  int max_ctas = 0;
  bool check_collectives = false;
};

// InvalidArgument names the transport and what was expected. Ignores SIGPIPE for the process
// (gloo).
absl::StatusOr<std::unique_ptr<Communicator>> CreateCommunicator(
    const CommunicatorOptions& options);

}  // namespace ravel::comm
