#pragma once

// Ranks as processes of one host.

#include <memory>

#include "worker/comm/communicator.h"
#include "worker/comm/rendezvous.h"

namespace ravel::comm {

// Rank 0 makes the group's memory and announces it; the others map it. Returns as soon as this rank
// has it: who is missing shows in the first collective.
absl::StatusOr<std::unique_ptr<Communicator>> CreateShmCommunicator(int rank,
                                                                    int size,
                                                                    const Rendezvous& rendezvous);

}  // namespace ravel::comm
