#pragma once

// Rules K11 to K13.

#include "common/plan/sharding_plan.h"
#include "common/status.h"

namespace ravel::plan {

// K11, K12, K13 of a whole plan.
absl::Status CheckPlaces(const ShardingPlan& plan);

}  // namespace ravel::plan
