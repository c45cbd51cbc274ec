#pragma once

// From strategies to the placements of a group's buffers in each of their roles.

#include "common/model/job_spec.h"
#include "common/model/model_inventory.h"
#include "common/plan/layout/mesh.h"
#include "common/plan/layout/strategy_table.h"
#include "common/plan/program/lane_map.h"
#include "common/plan/program/program_moves.h"
#include "common/status.h"

namespace ravel::plan {

// The strategies of a job on its axes; without replicas the outer one says nothing.
StrategyChoice ChoiceOf(const JobSpec& spec);

// Lanes of `ranks` ranks. In blocks where gradients stay Partial between micro-batches and ranks
// divide the lanes, several each. `spec` has its batch resolved; errors name the field.
absl::StatusOr<LaneMap> LanesOf(const JobSpec& spec, int64_t ranks);
// replicate (of more than one) x shard.
absl::StatusOr<Mesh> DataMesh(const LaneMap& lanes);

// What the strategy table says to a group, for lanes as they are summed: where they are not in
// blocks, what leaves a rank in a turn is summed by the innermost axis, whoever needs it whole at
// the step. Errors name axis, from and to, and a tensor: data axes place all tensors alike.
absl::StatusOr<GroupRoles> RolesOf(const StrategyChoice& choice,
                                   const PlacedTensor& tensor,
                                   const LaneMap& lanes,
                                   const Mesh& mesh,
                                   bool trainable);
// Whether some choice of strategies gives a group these roles.
bool PossibleRoles(const GroupRoles& roles, const LaneMap& lanes, const Mesh& mesh, bool trainable);
// Ranks that cut each group's flat buffer.
int64_t LayoutWidth(const GroupRoles& roles, const Mesh& mesh);

}  // namespace ravel::plan
