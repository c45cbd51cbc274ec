#pragma once

// From strategies to what programs do: placements become the booleans of GroupRules.

#include "common/model/job_spec.h"
#include "common/model/model_inventory.h"
#include "common/plan/layout/mesh.h"
#include "common/plan/layout/strategy_table.h"
#include "common/plan/program/lane_map.h"
#include "common/plan/program/step_program.h"
#include "common/status.h"

namespace ravel::plan {

// The strategies of a job on its axes; without replicas the outer one says nothing.
StrategyChoice ChoiceOf(const JobSpec& spec);
// What the table's placements allow and the engine executes: replicas keep their own weights and
// sum gradients once per step, and cut an optimizer only where the shard axis does. Errors name the
// field.
absl::Status CheckExecutable(const StrategyChoice& choice,
                             const ModelInventory& inventory,
                             const Mesh& mesh);

// Lanes of `ranks` ranks. In blocks where gradients stay Partial between micro-batches and ranks
// divide the lanes, several each. `spec` has its batch resolved; errors name the field.
absl::StatusOr<LaneMap> LanesOf(const JobSpec& spec, int64_t ranks);
// replicate (of more than one) x shard.
absl::StatusOr<Mesh> DataMesh(const LaneMap& lanes);

GroupRules RulesOf(const StrategyChoice& choice, const LaneMap& lanes, bool trainable);
// Whether some executable strategies give a group these rules.
bool PossibleRules(const GroupRules& rules, const LaneMap& lanes);
// Ranks that cut each group's flat buffer: the shard axis, and the replicas where they do.
int64_t LayoutWidth(const StrategyChoice& choice, const LaneMap& lanes);

}  // namespace ravel::plan
