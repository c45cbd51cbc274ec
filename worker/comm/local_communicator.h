#pragma once

// Ranks as threads of one process.

#include <memory>
#include <vector>

#include "worker/comm/communicator.h"

namespace ravel::comm {

// One communicator per rank, in rank order; each is used by its own thread. Any may be destroyed
// first.
absl::StatusOr<std::vector<std::unique_ptr<Communicator>>> CreateLocalGroup(int size);

}  // namespace ravel::comm
