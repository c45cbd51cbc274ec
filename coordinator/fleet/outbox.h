#pragma once

// Tracks the commands that each rank should have been told, and those it lacks: a pure core.
// Messages to daemons may be lost with their stream, so nothing is a message alone: wanted state is
// held against what every beat and Hello says that a rank has, and the difference is sent again
// until there is none.

#include <cstdint>
#include <map>
#include <string>
#include <variant>
#include <vector>

#include "coordinator/fleet/fleet_messages.h"

namespace ravel::coordinator {

// The same for all ranks of an epoch.
struct Wanted {
  int64_t until_step = -1;  // horizon; -1: not told to train yet
  int64_t save_every_ms = 0;
  int64_t save_sequence = 0;
  bool then_stop = false;
};

// The horizon after `step` finished steps: as many more steps as fit into `horizon_ms` at
// `step_seconds` each (0: not known yet), at least 1000, at most the job's last.
int64_t HorizonStep(int64_t step, double step_seconds, int64_t horizon_ms, int64_t last_step);
// True once half of what was allowed beyond `granted_at` is used up.
bool HorizonNeedsRenewal(int64_t step, int64_t granted_at, int64_t until_step, int64_t last_step);

// Frames that bring a rank that `has` to what is wanted, in the order in which they must arrive.
// `sets` are the complete communicator records of the epoch, by group.
std::vector<decltype(TrainerCommand::frame)> Missing(
    const Wanted& wanted, const std::map<std::string, CommRecordSet>& sets, const TrainerHas& has);

}  // namespace ravel::coordinator
