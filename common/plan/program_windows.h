#pragma once

// K6 and K10 of the checker: byte windows as caps, and prefetch that overlaps.

#include <vector>

#include "common/plan/program_order.h"
#include "common/plan/sharding_plan.h"

namespace ravel::plan {

struct WindowCheck {
  const ShardingPlan& plan;
  const StepProgram& program;
  const HappensBefore& order;
  const std::vector<Lifetime>& lifetimes;
  const std::vector<int>& use_at;  // instruction of each forward and backward, in order
};
absl::Status CheckWindows(const WindowCheck& check);

}  // namespace ravel::plan
