#pragma once

// The collectives of a plan as moves between the placements of a group's buffers. Builder, checker,
// executor, wire table, timeline and printer read them; no other code derives a collective.

#include <cstdint>
#include <string>
#include <vector>

#include "common/model/job_spec.h"
#include "common/model/segments.h"
#include "common/plan/layout/mesh.h"
#include "common/plan/layout/parameter_groups.h"
#include "common/plan/layout/placement.h"
#include "common/plan/layout/placement_move.h"
#include "common/plan/program/step_program.h"
#include "common/status.h"

namespace ravel::plan {

// Placements of a group's flat buffer in each of its roles.
struct GroupRoles {
  Placements stored;     // main weights and moments; of a frozen group what it keeps of its weights
  Placements parameter;  // weights between uses
  Placements used;       // weights as compute reads them
  // Placements of the gradient, if the group is trained, in the order of a step: as a lane leaves
  // it, between turns, as statistics measure it, as the optimizer reads it.
  Placements staged;
  Placements between;
  Placements measured;
  Placements at_step;
  bool operator==(const GroupRoles&) const = default;
};
using RolesOfGroups = IdVector<GroupId, GroupRoles>;

enum class MoveOf : uint8_t { kWeights, kGradient, kStatistics, kAmax, kActivation };

// The work of a collective, which no group changes.
struct ProgramMove {
  MoveOf of = MoveOf::kWeights;
  std::vector<std::string> axes;  // of the mesh; one, or of statistics and amaxes all
  Move move;                      // of `axis_size` ranks that follow each other on the axis; of
                                  // statistics: of no axis, an all-gather of messages; of amaxes
                                  // an all-reduce to the maximum
  DType type = DType::kF32;       // of the elements that travel
  StreamId stream = StreamId::kGather;
  bool operator==(const ProgramMove&) const = default;
};

// The moves of a group from role to role, each list in order and empty where nothing moves.
struct GroupMoves {
  std::vector<MoveId> weights;  // stored -> used; the last one fills the gathered buffer, those
                                // before it, once per step, the model weight
  // What ranks of `tensor` add up where the gradient of each is an addend: when a lane closes,
  // before any data axis, Partial -> Replicate. Ranks of copied heads do so in aligned blocks of
  // the axis.
  std::vector<MoveId> each_lane;
  std::vector<MoveId> each_turn;  // staged -> between; none: the lanes of a rank are summed there
  std::vector<MoveId> each_step;  // between -> measured
  // measured -> at the step, after the calls of a group are joined; none on an axis of one rank
  std::vector<MoveId> whole;
  bool operator==(const GroupMoves&) const = default;
};

struct MoveTable {
  IdVector<MoveId, ProgramMove> moves;
  IdVector<GroupId, GroupMoves> of_groups;
  MoveId statistics = {};
  MoveId amax = {};  // where weights are quantized
  // Moves of activations where the mesh has a tensor axis: Partial -> Replicate of the addends of
  // one buffer, the sum being each token's owner's; under sequence parallelism in its place
  // Partial -> Shard(0); and Shard(0) -> Replicate.
  MoveId activation_sum = {};
  MoveId activation_scatter = {};
  MoveId activation_gather = {};
};

struct MoveRequest {
  const ModelInventory& inventory;
  const GroupLayouts& groups;
  const RolesOfGroups& roles;
  const Mesh& mesh;
  const ProgramOptions& options;
};
// The table of all groups. Refuses what no moves lead to, and moves that the engine does not make:
// weights are gathered for use over the innermost axis alone, all else once per step, and the
// gradients of lanes are summed by that axis first, in each turn or once. Errors name tensor, axis,
// from and to.
absl::StatusOr<MoveTable> MovesOf(const MoveRequest& request);

// True if the final sums of a trained group are parts of what a reduce of lanes leaves
// (kOuterGrad, else the root of kMainGrad).
bool CutsSums(const MoveTable& table, GroupId group);
// True if the addends are those of lanes: not every rank has one in every turn.
bool SumsLanes(const ProgramMove& move);
// True if the addends are those of one lane, of the ranks of `tensor` that compute it together.
bool SumsAddends(const ProgramMove& move);
// True if the move is over the innermost data axis of the mesh.
bool IsInnermost(const Mesh& mesh, const ProgramMove& move);

// The move of a step of a unit's pass; none without one.
MoveId MoveOfStep(const MoveTable& table, SegmentMove move);
SegmentMove MoveOfInstruction(const MoveTable& table, const Instruction& compute);

// True if the move of an instruction is one of its group, and of its op; of statistics, of all.
bool HasMove(const MoveTable& table, const Instruction& instruction);

OpLabel LabelOf(const MoveTable& table, const Instruction& instruction);
// The name in logs and traces: LabelOf, but of a step with a move that move.
OpLabel WorkLabelOf(const MoveTable& table, const Instruction& instruction);
// The group's move that plans on disk call so; none where it has no such move.
MoveId MoveOfLabel(const MoveTable& table, GroupId group, OpLabel label);
// The op of an instruction that is called so.
OpCode OpOfLabel(OpLabel label);

}  // namespace ravel::plan
