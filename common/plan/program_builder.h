#pragma once

// Step programs: gather, use, free, reduce within two byte windows; what each group needs is read
// from its rules. sharding rules 5 and 6.

#include <vector>

#include "common/plan/flat_layout.h"
#include "common/plan/lane_map.h"
#include "common/plan/model_inventory.h"
#include "common/plan/step_program.h"

namespace ravel::plan {

struct ProgramRequest {
  const ModelInventory& inventory;
  const GroupLayouts& groups;
  const RulesOfGroups& rules;
  LaneMap lanes;
  ProgramOptions options;  // windows resolved
};

// Whether the group's gathered buffer stays: its weights are not cut, or gathers are in place.
bool IsResident(const ProgramRequest& request, GroupId group);

// Where a window is 0: the most bytes that two consecutive uses need together.
ProgramOptions ResolveWindows(const ProgramRequest& request);

// Every buffer of every program.
ProgramBuffers BuildBuffers(const ProgramRequest& request);

// The distinct programs of a step, in the order in which it first runs them, and eval.
std::vector<StepProgram> BuildPrograms(const ProgramRequest& request,
                                       const ProgramBuffers& buffers);

}  // namespace ravel::plan
