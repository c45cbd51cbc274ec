#pragma once

// From strategies to the placements of a group's buffers in each of their roles.

#include <string>

#include "common/model/job_spec.h"
#include "common/model/model_inventory.h"
#include "common/plan/layout/mesh.h"
#include "common/plan/layout/strategy_table.h"
#include "common/plan/program/lane_map.h"
#include "common/plan/program/program_moves.h"
#include "common/status.h"

namespace ravel::plan {

// The strategies of a unit; without replicas the outer one says nothing.
struct UnitChoice {
  StrategyChoice strategies;
  std::string field;  // of the job, which chose them: "parallelism.units[1].strategy"
};
using UnitChoices = IdVector<UnitId, UnitChoice>;
// Errors name the entry of parallelism.units: each must be the first to match a unit that has
// tensors.
absl::StatusOr<UnitChoices> ChoicesOf(const JobSpec& spec, const ModelInventory& inventory);
// "optim", or with replicas "optim, replicate no_shard".
std::string ChoiceText(const StrategyChoice& choice, const LaneMap& lanes);

// Lanes of `devices` ranks, not in blocks: those of a tensor group have one lane. `spec` has its
// batch resolved and a tensor axis of 1 or more; errors name the field.
absl::StatusOr<LaneMap> LanesOf(const JobSpec& spec, int64_t devices);
// True if each rank computes an aligned block of lanes: where all trained units keep gradients
// Partial between micro-batches, and several ranks of a replica divide the lanes, several each.
bool InBlocks(const LaneMap& lanes,
              WireType wire,
              const ModelInventory& inventory,
              const UnitChoices& choices);
// True if a unit has a tensor that is trained.
bool Trains(const ModelInventory& inventory, UnitId unit);
// replicate (of more than one) x shard x tensor (of more than one).
absl::StatusOr<Mesh> MeshOf(const LaneMap& lanes, int64_t tensor_ranks = 1);

// The roles that the strategy table gives a group, for lanes as they are summed: where they are not
// in blocks, what leaves a rank in a turn is summed by the innermost axis, whoever needs it whole
// at the step. Replicas sum last, in the order of the fixed tree, so once per step: what
// `optim_grads` says to them is what `optim` says. Errors name axis, from and to, and a tensor:
// data axes place all tensors alike.
absl::StatusOr<GroupRoles> RolesOf(const StrategyChoice& choice,
                                   const PlacedTensor& tensor,
                                   const LaneMap& lanes,
                                   const Mesh& mesh,
                                   bool trainable);
// Checks that the strategies can run: the placements of a trained tensor exist, and the moves
// between them. Errors name tensor, axis, from and to.
absl::Status CheckChoice(const StrategyChoice& choice,
                         const PlacedTensor& tensor,
                         const LaneMap& lanes,
                         const Mesh& mesh);
// True if some choice of strategies gives a group these roles.
bool PossibleRoles(const GroupRoles& roles, const LaneMap& lanes, const Mesh& mesh, bool trainable);
// Ranks that cut each group's flat buffer.
int64_t LayoutWidth(const GroupRoles& roles, const Mesh& mesh);

}  // namespace ravel::plan
