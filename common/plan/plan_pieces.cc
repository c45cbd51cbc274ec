// Answers what a rank stores, measures and saves of a group. Each answer is a list of placements on
// the mesh and the owned range that follows from it; nothing is kept per rank. What is measured is
// always inside what is stored, and disjoint over the ranks that count it, so sums over ranks
// (norms, digests) and checkpoints have every element exactly once.

#include "common/plan/plan_pieces.h"

#include <algorithm>
#include <cstddef>
#include <utility>

#include "common/check.h"
#include "common/plan/program/buffer_index.h"
#include "common/signed_size.h"

namespace ravel::plan {
namespace {

// Returns true if replicas cut what the shard axis has cut of a trained group.
bool ReplicasCut(const ShardingPlan& plan, GroupId group) {
  return CutAxes(plan.roles[group].stored).size() > 1;
}

// The placements of one tensor in a buffer: the cut of the `tensor` axis comes first.
Placements CutFirst(const TensorSpec& tensor, const Mesh& mesh, const Placements& flat) {
  Placements placements;
  if (tensor.cut.cuts() && mesh.AxisIndex(kTensorAxis) >= 0) {
    placements.push_back({kTensorAxis, Placement::Of(tensor.cut)});
  }
  placements.insert(placements.end(), flat.begin(), flat.end());
  return placements;
}

BufferId FindOfGroup(const ShardingPlan& plan, BufferKind kind, GroupId group, int slot = 0) {
  return FindBuffer(plan.buffers, {.kind = kind, .owner = group, .slot = slot});
}

}  // namespace

Placements SlicePlacements() {
  return {{kShardAxis, Placement::Flat()}};
}

Placements StoredPlacements(const ShardingPlan& plan, GroupId group) {
  return plan.roles[group].stored;
}

Placements MeasuredPlacements(const ShardingPlan& plan, GroupId group) {
  return plan.roles[group].measured;
}

ElementRange FlatRange(const ShardingPlan& plan,
                       GroupId group,
                       int64_t rank,
                       const Placements& placements) {
  return FlatInterval(plan.groups[group].layout.total_elements(),
                      placements,
                      plan.mesh,
                      plan.mesh.CoordinateOf(rank));
}

ElementRange StoredRange(const ShardingPlan& plan, GroupId group, int64_t rank) {
  return FlatRange(plan, group, rank, StoredPlacements(plan, group));
}

ElementRange MeasuredRange(const ShardingPlan& plan, GroupId group, int64_t rank) {
  return FlatRange(plan, group, rank, MeasuredPlacements(plan, group));
}

int64_t InnerShardElements(const ShardingPlan& plan, GroupId group) {
  return FlatRange(plan, group, 0, SlicePlacements()).size();
}

bool Counts(const ShardingPlan& plan, GroupId group, int64_t rank) {
  return ReplicaOf(MeasuredPlacements(plan, group), plan.mesh, plan.mesh.CoordinateOf(rank)) == 0;
}

std::vector<OwnedPiece> PiecesOf(const PiecesQuery& query, const Coordinate& coordinate) {
  const GroupLayout& group = query.group;
  const int64_t total = group.layout.total_elements();
  const ElementRange mine = FlatInterval(total, query.placements, query.mesh, coordinate);
  // Tensors lie in ascending order: the last one that begins at or before the interval comes first.
  const auto begin = group.tensor_offsets.begin();
  const auto after = std::upper_bound(begin, group.tensor_offsets.end(), mine.begin);
  std::vector<OwnedPiece> pieces;
  for (size_t i = Size(std::max<std::ptrdiff_t>(0, after - begin - 1));
       i < group.tensors.size() && group.tensor_offsets[i] < mine.end;
       ++i) {
    const TensorSpec& tensor = query.inventory.tensors[group.tensors[i]];
    const Placements placements = CutFirst(tensor, query.mesh, query.placements);
    if (query.first_replicas && ReplicaOf(placements, query.mesh, coordinate) != 0) {
      continue;
    }
    for (OwnedPiece& piece : OwnedParts({.shape = tensor.shape,
                             .placements = placements,
                             .mesh = query.mesh,
                             .place = {.offset = group.tensor_offsets[i], .total_elements = total},
                             .tensor = group.tensors[i]},
                                        coordinate)) {
      if (piece.elements() > 0) {
        pieces.push_back(std::move(piece));
      }
    }
  }
  return pieces;
}

std::vector<OwnedPiece> PiecesOf(const ShardingPlan& plan,
                                 GroupId group,
                                 int64_t rank,
                                 Placements placements) {
  return PiecesOf({.inventory = plan.inventory,
                   .group = plan.groups[group],
                   .mesh = plan.mesh,
                   .placements = std::move(placements)},
                  plan.mesh.CoordinateOf(rank));
}

std::vector<OwnedPiece> StoredPieces(const ShardingPlan& plan, GroupId group, int64_t rank) {
  return PiecesOf(plan, group, rank, StoredPlacements(plan, group));
}

std::vector<OwnedPiece> CountedPieces(const ShardingPlan& plan, GroupId group, int64_t rank) {
  return PiecesOf({.inventory = plan.inventory,
                   .group = plan.groups[group],
                   .mesh = plan.mesh,
                   .placements = MeasuredPlacements(plan, group),
                   .first_replicas = true},
                  plan.mesh.CoordinateOf(rank));
}

std::vector<OwnedPiece> SavedPieces(const ShardingPlan& plan, GroupId group, int64_t rank) {
  std::vector<OwnedPiece> pieces = CountedPieces(plan, group, rank);
  const int64_t inside =
      MeasuredRange(plan, group, rank).begin - StoredRange(plan, group, rank).begin;
  for (OwnedPiece& piece : pieces) {
    piece.shard_offset += inside;
  }
  return pieces;
}

BufferId StoredWeight(const ShardingPlan& plan, GroupId group) {
  const BufferId main_weight = FindOfGroup(plan, BufferKind::kMainWeight, group);
  return main_weight >= 0 ? main_weight : FindOfGroup(plan, BufferKind::kModelWeight, group);
}

BufferId GatherSource(const ShardingPlan& plan, GroupId group) {
  const BufferId model_weight = FindOfGroup(plan, BufferKind::kModelWeight, group);
  return model_weight >= 0 ? model_weight : FindOfGroup(plan, BufferKind::kMainWeight, group);
}

BufferId MeasuredGradient(const ShardingPlan& plan, GroupId group) {
  return ReplicasCut(plan, group)
             ? FindOfGroup(plan, BufferKind::kOuterGrad, group)
             : FindOfGroup(plan, BufferKind::kMainGrad, group, CounterRoot(plan.lanes.Inner()));
}

BufferId UpdateGradient(const ShardingPlan& plan, GroupId group) {
  return plan.moves.of_groups[group].whole.empty()
             ? MeasuredGradient(plan, group)
             : FindOfGroup(plan, BufferKind::kFullGrad, group);
}

int64_t BufferOffset(const ShardingPlan& plan, BufferId buffer, int64_t rank) {
  int64_t offset = 0;
  while (true) {
    const ProgramBuffer& inner = plan.buffers[buffer];
    if (inner.inside < 0) {
      return offset + plan.memory.offsets[buffer];
    }
    const ProgramBuffer& outer = plan.buffers[inner.inside];
    CHECK(inner.bytes > 0 && outer.bytes % inner.bytes == 0);
    if (outer.bytes != inner.bytes) {  // a replica's part of a shard, or a rank's shard of all
      const bool of_shard = outer.kind == BufferKind::kModelWeight;
      offset += inner.bytes * plan.mesh.GroupIndex(rank, {of_shard ? kReplicateAxis : kShardAxis});
    }
    buffer = inner.inside;
  }
}

}  // namespace ravel::plan
