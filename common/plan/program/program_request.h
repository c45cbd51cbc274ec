#pragma once

// The request from which programs and their buffers are made.

#include "common/model/model_inventory.h"
#include "common/plan/layout/parameter_groups.h"
#include "common/plan/program/lane_map.h"
#include "common/plan/program/program_moves.h"
#include "common/plan/program/step_program.h"

namespace ravel::plan {

struct ProgramRequest {
  const ModelInventory& inventory;
  const GroupLayouts& groups;
  const Mesh& mesh;
  const RolesOfGroups& roles;
  const MoveTable& moves;
  LaneMap lanes;
  ProgramOptions options;  // windows resolved
};

}  // namespace ravel::plan
