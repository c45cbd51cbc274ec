#pragma once

#include <string>
#include <vector>

#include "common/json.h"
#include "common/plan/device_kind.h"
#include "common/plan/program/group_roles.h"
#include "common/plan/report/plan_fit.h"
#include "common/plan/sharding_plan.h"

namespace ravel::ctl {

struct PlanDocument {
  const plan::ShardingPlan& plan;
  const plan::UnitChoices& strategies;  // empty: one for all
  const plan::DeviceKind& device;
  const std::string& digest;  // hexadecimal
  bool fits = true;
  const std::vector<plan::Remedy>& remedies;
};
// Everything that `ravelctl plan` can say: sizes, groups with their buffers, memory by category,
// wire bytes by axis, the timeline of the last program, fit and remedies.
json::Value PlanJson(const PlanDocument& document);

}  // namespace ravel::ctl
