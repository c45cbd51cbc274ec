#pragma once

// K4 and K5 across ranks: what happens when ranks run these programs together.

#include <vector>

#include "common/plan/sharding_plan.h"
#include "common/status.h"

namespace ravel::plan {

// How a rank runs a program: every stream on its own, or all instructions in list order.
enum class RankOrder { kStreams, kList };

// Runs one program per rank as far as waits and collectives allow. A collective is among the ranks
// of its move's axes in the plan's mesh; each stream has communicators of its own. Errors:
// K4 where ranks meet in different collectives, K5 where nobody can go on; they name rank and
// instruction.
absl::Status CheckRanks(const ShardingPlan& plan,
                        const std::vector<const StepProgram*>& programs,
                        RankOrder order = RankOrder::kStreams);
// K4 between two ranks' copies of a program: the same collectives of the same units in the same
// order per stream.
absl::Status CheckSameCollectives(const StepProgram& a, const StepProgram& b);

}  // namespace ravel::plan
