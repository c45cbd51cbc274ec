#pragma once

// What one rank has of a group: where its buffers lie, which elements it stores, which it measures
// and which it saves, under every strategy. Rank r is (inner r % N, outer r / N).

#include <cstdint>
#include <vector>

#include "common/plan/layout/parameter_groups.h"
#include "common/plan/sharding_plan.h"

namespace ravel::plan {

// Elements [begin, begin + elements) of a group's flat buffer of T elements.
struct FlatRange {
  int64_t begin = 0;
  int64_t elements = 0;
  bool operator==(const FlatRange&) const = default;
};

// T / N: what a reduce of lanes leaves on a rank and a gather takes from it.
int64_t InnerShardElements(const ShardingPlan& plan, GroupId group);

// What the rank stores and updates: main weight and moments, or a frozen group's weights. Its
// shard; all of T where the optimizer is not sharded; its sub-piece of the shard where replicas cut
// it.
FlatRange StoredRange(const ShardingPlan& plan, GroupId group, int64_t rank);
// What the rank measures of the final gradient: disjoint over the ranks of a replica, and over all
// where replicas cut the shard. Always inside StoredRange.
FlatRange MeasuredRange(const ShardingPlan& plan, GroupId group, int64_t rank);
// Whether what the rank measures counts, and is saved by it: on exactly one of the ranks that
// measure the same elements.
bool Counts(const ShardingPlan& plan, GroupId group, int64_t rank);

// The parts of tensors inside a range, in buffer order; OwnedPiece::shard_offset counts from
// `origin`, an element of the flat buffer.
std::vector<OwnedPiece> PiecesIn(const ModelInventory& inventory,
                                 const GroupLayout& group,
                                 const FlatRange& range,
                                 int64_t origin);
// Of StoredRange, from the start of the stored buffers: what loading and initialisation fill.
std::vector<OwnedPiece> StoredPieces(const ShardingPlan& plan, GroupId group, int64_t rank);
// Of MeasuredRange, from its start, which is that of the buffer of MeasuredGradient.
std::vector<OwnedPiece> MeasuredPieces(const ShardingPlan& plan, GroupId group, int64_t rank);
// Of MeasuredRange where it counts, else nothing; from the start of the stored buffers: what this
// rank writes into a checkpoint.
std::vector<OwnedPiece> SavedPieces(const ShardingPlan& plan, GroupId group, int64_t rank);

// Buffer ids of a group. Stored weights: kMainWeight, or kModelWeight of a frozen group that has no
// other, its model weight being fp32.
BufferId StoredWeight(const ShardingPlan& plan, GroupId group);
// What kGather takes a rank's shard of: kModelWeight where there is one, else kMainWeight.
BufferId GatherSource(const ShardingPlan& plan, GroupId group);
// The final gradient over all lanes, replicas and calls: elements of MeasuredRange. kOuterGrad
// where replicas cut the shard, else the root of kMainGrad.
BufferId MeasuredGradient(const ShardingPlan& plan, GroupId group);
// The gradient that the optimizer reads: elements of StoredRange. kFullGrad where the optimizer is
// not sharded, else the same as MeasuredGradient.
BufferId UpdateGradient(const ShardingPlan& plan, GroupId group);

// Where a buffer begins in the rank's arena of its memory kind: the plan's offset, and inside
// another buffer that one's and the rank's part of it.
int64_t BufferOffset(const ShardingPlan& plan, BufferId buffer, int64_t rank);

}  // namespace ravel::plan
