#pragma once

// The request from which programs and their buffers are made.

#include "common/model/model_inventory.h"
#include "common/plan/layout/parameter_groups.h"
#include "common/plan/program/lane_map.h"
#include "common/plan/program/step_program.h"

namespace ravel::plan {

struct ProgramRequest {
  const ModelInventory& inventory;
  const GroupLayouts& groups;
  const RulesOfGroups& rules;
  LaneMap lanes;
  ProgramOptions options;  // windows resolved
};

}  // namespace ravel::plan
