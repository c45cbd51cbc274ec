#pragma once

// Reports of the collectives that a rank has issued, made by its watchdog. The step thread may be
// stuck in one of them.

#include <cstdint>
#include <vector>

#include "worker/comm/communicator.h"
#include "worker/trainer/supervision.h"

namespace ravel::trainer {

// Returns the state of every group of the rank.
std::vector<CollectiveState> CollectiveStates(comm::Communicator& communicator);
// The last `most` entries of every group, with the names of their units.
std::vector<LedgerOfGroup> LedgerGroups(comm::Communicator& communicator, int64_t most);

}  // namespace ravel::trainer
