#include "worker/comm/communicator_factory.h"

#include <utility>
#include <vector>

#include <absl/strings/str_cat.h>

#include "worker/comm/gloo_communicator.h"
#include "worker/comm/local_communicator.h"
#include "worker/comm/mixed_communicator.h"
#include "worker/comm/nccl_communicator.h"
#include "worker/comm/shm_communicator.h"

namespace ravel::comm {

absl::StatusOr<std::unique_ptr<Communicator>> CreateCommunicator(
    const CommunicatorOptions& options) {
  if (options.size < 1 || options.rank < 0 || options.rank >= options.size) {
    return absl::InvalidArgumentError(
        absl::StrCat("rank ", options.rank, " of ", options.size, ": expected 0 <= rank < size"));
  }
  if (options.transport == "local") {
    if (options.size != 1) {
      return absl::InvalidArgumentError(
          absl::StrCat("transport local is for one rank, not ", options.size));
    }
    ASSIGN_OR_RETURN(auto group, CreateLocalGroup(1));
    return std::move(group[0]);
  }
  if (options.transport == "shm") {
    return CreateShmCommunicator(options.rank, options.size, options.rendezvous);
  }
  const GlooOptions gloo = {.rank = options.rank,
                            .size = options.size,
                            .rendezvous = options.rendezvous,
                            .host_address = options.host_address,
                            .ports = options.ports,
                            .timeout = options.timeout};
  if (options.transport == "gloo") {
    return CreateGlooCommunicator(gloo);
  }
  if (options.transport == "mixed") {
    return CreateMixedCommunicator({.gloo = gloo, .host_key = {}});
  }
  if (options.transport == "nccl") {
    return CreateNcclCommunicator({.rank = options.rank,
                                   .size = options.size,
                                   .rendezvous = options.rendezvous,
                                   .gpu = options.gpu,
                                   .setup_timeout = options.setup_timeout,
                                   .keep_going = options.keep_going,
                                   .max_ctas = options.max_ctas,
                                   .check_collectives = options.check_collectives});
  }
  return absl::InvalidArgumentError(
      absl::StrCat("transport ", options.transport, ": expected local, shm, gloo, mixed or nccl"));
}

}  // namespace ravel::comm
