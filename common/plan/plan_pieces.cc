#include "common/plan/plan_pieces.h"

#include <algorithm>
#include <cstddef>

#include "common/check.h"
#include "common/plan/program/buffer_index.h"
#include "common/signed_size.h"

namespace ravel::plan {
namespace {

const GroupLayout& LayoutOf(const ShardingPlan& plan, GroupId group) {
  return plan.groups[group];
}
bool StoredIsCut(const ShardingPlan& plan, GroupId group) {
  return !CutAxes(plan.roles[group].stored).empty();
}
// Of a trained group: whether replicas cut what the shard axis has cut.
bool ReplicasCut(const ShardingPlan& plan, GroupId group) {
  return CutAxes(plan.roles[group].stored).size() > 1;
}

int64_t TotalElements(const ShardingPlan& plan, GroupId group) {
  return LayoutOf(plan, group).layout.total_elements();
}

// The rank's shard of the replica, and of that its replica's part.
FlatRange InnerShard(const ShardingPlan& plan, GroupId group, int64_t rank) {
  const int64_t elements = InnerShardElements(plan, group);
  return {.begin = rank % plan.lanes.width() * elements, .elements = elements};
}
FlatRange SubPiece(const ShardingPlan& plan, GroupId group, int64_t rank) {
  const FlatRange shard = InnerShard(plan, group, rank);
  const int64_t elements = shard.elements / plan.lanes.replicas;
  return {.begin = shard.begin + rank / plan.lanes.width() * elements, .elements = elements};
}

BufferId FindOfGroup(const ShardingPlan& plan, BufferKind kind, GroupId group, int slot = 0) {
  return FindBuffer(plan.buffers, {.kind = kind, .owner = group, .slot = slot});
}

}  // namespace

int64_t InnerShardElements(const ShardingPlan& plan, GroupId group) {
  return TotalElements(plan, group) / plan.lanes.width();
}

FlatRange StoredRange(const ShardingPlan& plan, GroupId group, int64_t rank) {
  if (!StoredIsCut(plan, group)) {
    return {.begin = 0, .elements = TotalElements(plan, group)};
  }
  return MeasuredRange(plan, group, rank);
}

FlatRange MeasuredRange(const ShardingPlan& plan, GroupId group, int64_t rank) {
  return ReplicasCut(plan, group) ? SubPiece(plan, group, rank) : InnerShard(plan, group, rank);
}

bool Counts(const ShardingPlan& plan, GroupId group, int64_t rank) {
  return ReplicasCut(plan, group) || rank < plan.lanes.width();
}

std::vector<OwnedPiece> PiecesIn(const ModelInventory& inventory,
                                 const GroupLayout& group,
                                 const FlatRange& range,
                                 int64_t origin) {
  std::vector<OwnedPiece> pieces;
  // Tensors lie in ascending order: the last one that begins at or before the range comes first.
  const auto first = group.tensor_offsets.begin();
  const auto after = std::upper_bound(first, group.tensor_offsets.end(), range.begin);
  size_t i = Size(std::max<std::ptrdiff_t>(0, after - first - 1));
  for (; i < group.tensors.size(); ++i) {
    const int64_t offset = group.tensor_offsets[i];
    if (offset >= range.begin + range.elements) {
      break;
    }
    const TensorSpec& tensor = inventory.tensors[group.tensors[i]];
    const int64_t begin = std::max(offset, range.begin);
    const int64_t end = std::min(offset + ElementCount(tensor.shape), range.begin + range.elements);
    if (begin < end) {
      pieces.push_back({.tensor = group.tensors[i],
                        .begin = begin - offset,
                        .end = end - offset,
                        .shard_offset = begin - origin});
    }
  }
  return pieces;
}

std::vector<OwnedPiece> StoredPieces(const ShardingPlan& plan, GroupId group, int64_t rank) {
  const FlatRange range = StoredRange(plan, group, rank);
  return PiecesIn(plan.inventory, LayoutOf(plan, group), range, range.begin);
}

std::vector<OwnedPiece> MeasuredPieces(const ShardingPlan& plan, GroupId group, int64_t rank) {
  const FlatRange range = MeasuredRange(plan, group, rank);
  return PiecesIn(plan.inventory, LayoutOf(plan, group), range, range.begin);
}

std::vector<OwnedPiece> SavedPieces(const ShardingPlan& plan, GroupId group, int64_t rank) {
  if (!Counts(plan, group, rank)) {
    return {};
  }
  return PiecesIn(plan.inventory,
                  LayoutOf(plan, group),
                  MeasuredRange(plan, group, rank),
                  StoredRange(plan, group, rank).begin);
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
  return StoredIsCut(plan, group) ? MeasuredGradient(plan, group)
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
      offset += inner.bytes * (of_shard ? rank / plan.lanes.width() : rank % plan.lanes.width());
    }
    buffer = inner.inside;
  }
}

}  // namespace ravel::plan
