#pragma once

// The whole plan of one (job, epoch): what a trainer needs to know before step 1, and nothing that
// differs by rank.

#include <cstdint>
#include <string>
#include <vector>

#include "common/model/job_spec.h"
#include "common/model/model_inventory.h"
#include "common/plan/layout/mesh.h"
#include "common/plan/layout/parameter_groups.h"
#include "common/plan/memory/buffer_plan.h"
#include "common/plan/program/lane_map.h"
#include "common/plan/program/program_moves.h"
#include "common/plan/program/step_program.h"
#include "common/status.h"

namespace ravel::plan {

struct ShardingPlan {
  int64_t ranks = 1;
  LaneMap lanes;
  MicroBatchShape micro_batch;  // of one lane
  ProgramOptions options;
  ModelInventory inventory;
  // replicate (where there are replicas) x shard x tensor (where the model is cut): lanes are those
  // of the first two, and ranks that differ on the third alone have the same one.
  Mesh mesh;
  // By unit, trainable before frozen; all of one width: N, or N * O where replicas cut the shards.
  GroupLayouts groups;
  RolesOfGroups roles;
  MoveTable moves;  // the collectives of all programs
  ProgramBuffers buffers;
  BufferPlan memory;
  std::vector<StepProgram> programs;

  // The rank among those of the data axes, by which lanes are numbered.
  int64_t DataRank(int64_t rank) const { return rank / inventory.cut.degree; }

  // CHECKs that it exists.
  const StepProgram& program(Phase phase, LanePart part = LanePart::kWhole) const;
};

// The program that a step runs as its `index`-th of lanes.programs(): turn by turn, the
// micro-batches of a lane in order.
struct StepSlot {
  Phase phase = Phase::kOnly;
  LanePart part = LanePart::kWhole;
  int64_t turn = 0;
  int64_t micro_batch = 0;  // of the lane
};
StepSlot SlotOf(const LaneMap& lanes, int64_t index);

// The lane of a rank of the mesh at a turn, or -1: ranks of a tensor group compute one together.
int64_t LaneOf(const ShardingPlan& plan, int64_t turn, int64_t rank);
// True on one rank of each tensor group, which counts what the group computes: losses, targets.
bool CountsLane(const ShardingPlan& plan, int64_t rank);

struct PlanRequest {
  JobSpec spec;  // validated
  int64_t ranks = 1;
  // Ranks of one host that can share memory: chooses in-place gathers and peer reads.
  bool shared_memory = true;
};

// The pure pipeline: inventory, lanes, layouts, programs, buffers, checker. Errors name the job
// field that is at fault.
absl::StatusOr<ShardingPlan> BuildShardingPlan(const PlanRequest& request);

// The moves of the plan's groups.
absl::StatusOr<MoveTable> MovesOf(const ShardingPlan& plan);

// The part of it after inventory, lanes, groups, roles and options (0: windows to choose): moves,
// buffers, programs and addresses, not yet checked.
absl::Status PlanPrograms(ShardingPlan& plan);

// Lanes and micro-batches: V a power of two, at least the largest device count divided by the
// tensor axis; the global batch a multiple of V, and each lane's part of it one of the micro-batch.
// Fills virtual_ranks and micro_batch (one per lane) where they are auto; errors name the field.
absl::StatusOr<JobSpec> ResolveBatch(JobSpec spec);

}  // namespace ravel::plan
