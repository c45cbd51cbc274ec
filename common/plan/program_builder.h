#pragma once

// Step programs of ZeRO-3: gather, use, free, reduce within two byte windows. sharding rules 5
// and 6.

#include <vector>

#include "common/plan/flat_layout.h"
#include "common/plan/lane_map.h"
#include "common/plan/model_inventory.h"
#include "common/plan/step_program.h"

namespace ravel::plan {

struct ProgramRequest {
  const ModelInventory& inventory;
  const std::vector<GroupLayout>& groups;  // one per unit
  LaneMap lanes;
  ProgramOptions options;  // windows resolved
};

// One forward or backward of a unit, with the units whose weights it needs: itself and those it
// borrows from.
struct UnitUse {
  OpCode op = OpCode::kForward;
  int unit = 0;
  std::vector<int> needs;
};
// The uses of one micro-batch in order: forward 0..n-1, then backward n-1..0 (training) or nothing
// (evaluation).
std::vector<UnitUse> UsesOf(const ModelInventory& inventory, Phase phase);

// One staged gradient: call 0 of a unit is the first in backward order. A tied table has two: the
// head's, then its own.
struct GradientCall {
  int unit = 0;
  int call = 0;
};
// The gradients that each use of a training program stages, in the order in which they are reduced.
std::vector<std::vector<GradientCall>> GradientCallsOf(const ModelInventory& inventory,
                                                       const std::vector<UnitUse>& uses);

// Where a window is 0: the most bytes that two consecutive uses need together.
ProgramOptions ResolveWindows(const ProgramRequest& request);

// Every buffer of every program. In-place gathers make the gathered buffers one persistent common
// block each, with the main weights inside.
std::vector<ProgramBuffer> BuildBuffers(const ProgramRequest& request);

// The programs that a job of this many turns runs: only, or first [, middle], last; and eval.
std::vector<StepProgram> BuildPrograms(const ProgramRequest& request,
                                       const std::vector<ProgramBuffer>& buffers);

}  // namespace ravel::plan
