#pragma once

#include "common/json.h"
#include "common/plan/sharding_plan.h"

namespace ravel::ctl {

// Sizes, memory per category, padding and bytes on the wire of a plan.
json::Value PlanJson(const plan::ShardingPlan& plan);

}  // namespace ravel::ctl
