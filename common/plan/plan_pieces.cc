#include "common/plan/plan_pieces.h"

#include <algorithm>
#include <cstddef>

#include "common/check.h"
#include "common/plan/buffer_index.h"

namespace ravel::plan {
namespace {

const GroupLayout& LayoutOf(const ShardingPlan& plan, int group) {
  return plan.groups[static_cast<size_t>(group)];
}
const GroupRules& RulesOf(const ShardingPlan& plan, int group) {
  return plan.rules[static_cast<size_t>(group)];
}

int64_t TotalElements(const ShardingPlan& plan, int group) {
  return LayoutOf(plan, group).layout.total_elements();
}

// The rank's shard of the replica, and of that its replica's part.
FlatRange InnerShard(const ShardingPlan& plan, int group, int64_t rank) {
  const int64_t elements = InnerShardElements(plan, group);
  return {.begin = rank % plan.lanes.width() * elements, .elements = elements};
}
FlatRange SubPiece(const ShardingPlan& plan, int group, int64_t rank) {
  const FlatRange shard = InnerShard(plan, group, rank);
  const int64_t elements = shard.elements / plan.lanes.replicas;
  return {.begin = shard.begin + rank / plan.lanes.width() * elements, .elements = elements};
}

int FindOfGroup(const ShardingPlan& plan, BufferKind kind, int group, int slot = 0) {
  return FindBuffer(plan.buffers, {.kind = kind, .owner = group, .slot = slot});
}

}  // namespace

int64_t InnerShardElements(const ShardingPlan& plan, int group) {
  return TotalElements(plan, group) / plan.lanes.width();
}

FlatRange StoredRange(const ShardingPlan& plan, int group, int64_t rank) {
  const GroupRules& rules = RulesOf(plan, group);
  if (!rules.optimizer_sharded) {
    return {.begin = 0, .elements = TotalElements(plan, group)};
  }
  return rules.outer_gradient_sharded ? SubPiece(plan, group, rank) : InnerShard(plan, group, rank);
}

FlatRange MeasuredRange(const ShardingPlan& plan, int group, int64_t rank) {
  return RulesOf(plan, group).outer_gradient_sharded ? SubPiece(plan, group, rank)
                                                     : InnerShard(plan, group, rank);
}

bool Counts(const ShardingPlan& plan, int group, int64_t rank) {
  return RulesOf(plan, group).outer_gradient_sharded || rank < plan.lanes.width();
}

std::vector<OwnedPiece> PiecesIn(const ModelInventory& inventory,
                                 const GroupLayout& group,
                                 const FlatRange& range,
                                 int64_t origin) {
  std::vector<OwnedPiece> pieces;
  // Tensors lie in ascending order: the last one that begins at or before the range comes first.
  const auto after =
      std::upper_bound(group.tensor_offsets.begin(), group.tensor_offsets.end(), range.begin);
  auto i =
      static_cast<size_t>(std::max<std::ptrdiff_t>(0, after - group.tensor_offsets.begin() - 1));
  for (; i < group.tensors.size(); ++i) {
    const int64_t offset = group.tensor_offsets[i];
    if (offset >= range.begin + range.elements) {
      break;
    }
    const TensorSpec& tensor = inventory.tensors[static_cast<size_t>(group.tensors[i])];
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

std::vector<OwnedPiece> StoredPieces(const ShardingPlan& plan, int group, int64_t rank) {
  const FlatRange range = StoredRange(plan, group, rank);
  return PiecesIn(plan.inventory, LayoutOf(plan, group), range, range.begin);
}

std::vector<OwnedPiece> MeasuredPieces(const ShardingPlan& plan, int group, int64_t rank) {
  const FlatRange range = MeasuredRange(plan, group, rank);
  return PiecesIn(plan.inventory, LayoutOf(plan, group), range, range.begin);
}

std::vector<OwnedPiece> SavedPieces(const ShardingPlan& plan, int group, int64_t rank) {
  if (!Counts(plan, group, rank)) {
    return {};
  }
  return PiecesIn(plan.inventory,
                  LayoutOf(plan, group),
                  MeasuredRange(plan, group, rank),
                  StoredRange(plan, group, rank).begin);
}

int StoredWeight(const ShardingPlan& plan, int group) {
  const int main_weight = FindOfGroup(plan, BufferKind::kMainWeight, group);
  return main_weight >= 0 ? main_weight : FindOfGroup(plan, BufferKind::kModelWeight, group);
}

int GatherSource(const ShardingPlan& plan, int group) {
  const int model_weight = FindOfGroup(plan, BufferKind::kModelWeight, group);
  return model_weight >= 0 ? model_weight : FindOfGroup(plan, BufferKind::kMainWeight, group);
}

int MeasuredGradient(const ShardingPlan& plan, int group) {
  return RulesOf(plan, group).outer_gradient_sharded
             ? FindOfGroup(plan, BufferKind::kOuterGrad, group)
             : FindOfGroup(plan, BufferKind::kMainGrad, group, CounterRoot(plan.lanes.Inner()));
}

int UpdateGradient(const ShardingPlan& plan, int group) {
  return RulesOf(plan, group).optimizer_sharded ? MeasuredGradient(plan, group)
                                                : FindOfGroup(plan, BufferKind::kFullGrad, group);
}

int64_t BufferOffset(const ShardingPlan& plan, int buffer, int64_t rank) {
  int64_t offset = 0;
  while (true) {
    const ProgramBuffer& inner = plan.buffers[static_cast<size_t>(buffer)];
    if (inner.inside < 0) {
      return offset + plan.memory.offsets[static_cast<size_t>(buffer)];
    }
    const ProgramBuffer& outer = plan.buffers[static_cast<size_t>(inner.inside)];
    CHECK(inner.bytes > 0 && outer.bytes % inner.bytes == 0);
    if (outer.bytes != inner.bytes) {  // a replica's part of a shard, or a rank's shard of all
      const bool of_shard = outer.kind == BufferKind::kModelWeight;
      offset += inner.bytes * (of_shard ? rank / plan.lanes.width() : rank % plan.lanes.width());
    }
    buffer = inner.inside;
  }
}

}  // namespace ravel::plan
