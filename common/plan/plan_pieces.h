#pragma once

// Answers what one rank has of a group: the elements it stores, measures and saves, and the places
// of its buffers. All of it follows from the placements of the group's buffers and the mesh.

#include <cstdint>
#include <vector>

#include "common/plan/layout/owned_boxes.h"
#include "common/plan/layout/placement.h"
#include "common/plan/sharding_plan.h"

namespace ravel::plan {

// Placements of a group's buffers on the data axes. A tensor that the `tensor` axis cuts
// (TensorSpec::cut) is cut there first; each of its parts is then a piece.
//
// The slice that a reduce over the shard axis leaves on a rank and a gather takes from it: T / N
// elements.
Placements SlicePlacements();
// The part that a rank stores and updates: main weight and moments, or a frozen group's weights.
// The whole buffer where the optimizer is not sharded, a slice, or the replica's part of one.
Placements StoredPlacements(const ShardingPlan& plan, GroupId group);
// The part of the final gradient that a rank measures: disjoint over the ranks of a replica, and
// over all where replicas cut the slice. Always inside what it stores.
Placements MeasuredPlacements(const ShardingPlan& plan, GroupId group);

// The rank's interval of the group's flat buffer under these placements.
ElementRange FlatRange(const ShardingPlan& plan,
                       GroupId group,
                       int64_t rank,
                       const Placements& placements);
ElementRange StoredRange(const ShardingPlan& plan, GroupId group, int64_t rank);
ElementRange MeasuredRange(const ShardingPlan& plan, GroupId group, int64_t rank);
int64_t InnerShardElements(const ShardingPlan& plan, GroupId group);
// Returns true if the part that the rank measures counts and is saved by it: this holds on exactly
// one of the ranks that measure the same interval.
bool Counts(const ShardingPlan& plan, GroupId group, int64_t rank);

// The pieces of a group's tensors that a coordinate has, in buffer order, none of them empty;
// offsets count from the start of its interval.
struct PiecesQuery {
  const ModelInventory& inventory;
  const GroupLayout& group;
  const Mesh& mesh;
  Placements placements;        // of the flat buffer
  bool first_replicas = false;  // leaves out what a lower coordinate has as well
};
std::vector<OwnedPiece> PiecesOf(const PiecesQuery& query, const Coordinate& coordinate);
std::vector<OwnedPiece> PiecesOf(const ShardingPlan& plan,
                                 GroupId group,
                                 int64_t rank,
                                 Placements placements);
// The pieces of StoredPlacements: loading and initialisation fill them.
std::vector<OwnedPiece> StoredPieces(const ShardingPlan& plan, GroupId group, int64_t rank);
// The pieces of MeasuredPlacements where they count; offsets are into the buffer of
// MeasuredGradient.
std::vector<OwnedPiece> CountedPieces(const ShardingPlan& plan, GroupId group, int64_t rank);
// The same pieces with offsets into the stored buffers: what this rank writes into a checkpoint.
std::vector<OwnedPiece> SavedPieces(const ShardingPlan& plan, GroupId group, int64_t rank);

// Buffer ids of a group. Stored weights: kMainWeight, or kModelWeight of a frozen group that has no
// other, its model weight being fp32.
BufferId StoredWeight(const ShardingPlan& plan, GroupId group);
// The buffer from which kGather takes a rank's shard: kModelWeight where there is one, else
// kMainWeight.
BufferId GatherSource(const ShardingPlan& plan, GroupId group);
// The final gradient over all lanes, replicas and calls: elements of MeasuredRange. kOuterGrad
// where replicas cut the shard, else the root of kMainGrad.
BufferId MeasuredGradient(const ShardingPlan& plan, GroupId group);
// The gradient that the optimizer reads: elements of StoredRange. kFullGrad where the optimizer is
// not sharded and several ranks measure it, else the same as MeasuredGradient.
BufferId UpdateGradient(const ShardingPlan& plan, GroupId group);

// Returns a buffer's begin in the rank's arena of its memory kind: the plan's offset; for a buffer
// inside another one, that one's offset and the rank's part of it.
int64_t BufferOffset(const ShardingPlan& plan, BufferId buffer, int64_t rank);

}  // namespace ravel::plan
