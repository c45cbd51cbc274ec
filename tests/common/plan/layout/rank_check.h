#pragma once

// K4 and K5 across ranks: what happens when ranks run these programs together.

#include <vector>

#include "common/plan/program/lane_map.h"
#include "common/plan/program/step_program.h"
#include "common/status.h"

namespace ravel::plan {

// How a rank runs a program: every stream on its own, or all instructions in list order.
enum class RankOrder { kStreams, kList };

// Runs one program per rank as far as waits and collectives allow. Gather, ReduceScatter and
// GatherGradient are among the ranks of a replica, OuterReduce and OuterGather among the ranks of
// equal place in theirs, StatsReduce among all; each stream has communicators of its own. Errors:
// K4 where ranks meet in different collectives, K5 where nobody can go on; they name rank and
// instruction.
absl::Status CheckRanks(const LaneMap& lanes,
                        const std::vector<const StepProgram*>& programs,
                        RankOrder order = RankOrder::kStreams);

}  // namespace ravel::plan
