#pragma once

// Drills: one rank's plan is not that of the others.

#include "common/plan/sharding_plan.h"
#include "common/status.h"

namespace ravel::trainer {

// With the fault point "plan.swap": exchanges two neighbouring collectives of the rank's programs,
// `plan.swap:error=same` of one stream, `plan.swap:error=other` of two streams. NotFound when the
// plan has no such pair, so that a drill cannot pass unseen.
absl::Status ApplyPlanFaults(plan::ShardingPlan& plan);

}  // namespace ravel::trainer
