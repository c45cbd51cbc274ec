#include "common/plan/program/group_roles.h"

#include <bit>
#include <string>
#include <utility>
#include <vector>

#include <absl/strings/str_cat.h>

#include "common/field_error.h"
#include "common/plan/layout/placement.h"

namespace ravel::plan {
namespace {

// A replica's part of a shard is whole elements: shards are multiples of 256.
constexpr int64_t kMostReplicas = 256;
// Micro-batches of all lanes.
constexpr int64_t kMostPrograms = int64_t{1} << 22;

// The same placements with the innermost axis Flat.
Placements CutInnermost(const Placements& placements, const Mesh& mesh) {
  const std::string& innermost = mesh.axes().back().name;
  Placements cut = {{innermost, Placement::Flat()}};
  for (const AxisPlacement& entry : placements) {
    if (entry.axis != innermost) {
      cut.push_back(entry);
    }
  }
  return Canonical(cut, mesh);
}

absl::Status CheckReplicas(const JobSpec& spec, int64_t ranks) {
  const auto fault = [&](const std::string& expected) {
    return FieldRefusal("parallelism.replicas", expected, absl::StrCat(spec.replicas));
  };
  if (spec.replicas < 1 || spec.replicas > kMostReplicas ||
      !std::has_single_bit(static_cast<uint64_t>(spec.replicas))) {
    return fault(absl::StrCat("a power of two up to ", kMostReplicas));
  }
  if (spec.virtual_ranks % spec.replicas != 0) {
    return fault(absl::StrCat("a divisor of determinism.virtualRanks ", spec.virtual_ranks));
  }
  if (ranks % spec.replicas != 0) {
    return fault(absl::StrCat("a divisor of the ", ranks, " devices"));
  }
  return absl::OkStatus();
}

}  // namespace

StrategyChoice ChoiceOf(const JobSpec& spec) {
  return {.replicate = spec.replicas > 1 ? spec.replicate_strategy : Strategy::kNoShard,
          .shard = spec.strategy};
}

absl::StatusOr<LaneMap> LanesOf(const JobSpec& spec, int64_t ranks) {
  if (ranks < 1 || ranks > spec.virtual_ranks) {
    return FieldRefusal("devices.count",
                        absl::StrCat("1 to determinism.virtualRanks ", spec.virtual_ranks),
                        absl::StrCat(ranks));
  }
  RETURN_IF_ERROR(CheckReplicas(spec, ranks));
  LaneMap lanes = {.lanes = spec.virtual_ranks, .ranks = ranks, .replicas = spec.replicas};
  lanes.micro_batches = spec.global_batch / spec.virtual_ranks / spec.micro_batch;
  if (lanes.micro_batches > kMostPrograms / spec.virtual_ranks) {
    return absl::InvalidArgumentError(absl::StrCat("training.microBatch: ",
                                                   lanes.micro_batches,
                                                   " micro-batches of each of ",
                                                   spec.virtual_ranks,
                                                   " lanes are more than ",
                                                   kMostPrograms,
                                                   " per step"));
  }
  // Where the wire rounds, it rounds each lane's gradient.
  lanes.blocks = !RowOf(spec.strategy).gradient_between.in_flat_family() &&
                 lanes.lanes % ranks == 0 && lanes.lanes > ranks &&
                 spec.gradient_wire == WireType::kF32;
  return lanes;
}

absl::StatusOr<Mesh> DataMesh(const LaneMap& lanes) {
  std::vector<MeshAxis> axes;
  if (lanes.replicas > 1) {
    axes.push_back({.name = kReplicateAxis, .size = lanes.replicas});
  }
  axes.push_back({.name = kShardAxis, .size = lanes.width()});
  return Mesh::Create(std::move(axes));
}

absl::StatusOr<GroupRoles> RolesOf(const StrategyChoice& choice,
                                   const PlacedTensor& tensor,
                                   const LaneMap& lanes,
                                   const Mesh& mesh,
                                   bool trainable) {
  // Without gradients replicas have nothing to share.
  const StrategyChoice of_group = {.replicate = trainable ? choice.replicate : Strategy::kNoShard,
                                   .shard = choice.shard};
  ASSIGN_OR_RETURN(const RolePlacements table, PlacementsOf(of_group, tensor, {}, mesh));
  GroupRoles roles = {.stored = trainable ? table.optimizer : table.parameter,
                      .parameter = table.parameter,
                      .used = {},
                      .staged = table.gradient_staged,
                      .between = table.gradient_between,
                      .measured = CutInnermost(table.gradient_at_step, mesh),
                      .at_step = table.gradient_at_step};
  if (!lanes.blocks) {
    roles.between = CutInnermost(roles.between, mesh);
  }
  return roles;
}

bool PossibleRoles(const GroupRoles& roles,
                   const LaneMap& lanes,
                   const Mesh& mesh,
                   bool trainable) {
  const PlacedTensor any = {.name = "any", .shape = {1, 1}};
  for (const AxisStrategyRow& outer : AxisStrategyRows()) {
    for (const AxisStrategyRow& inner : AxisStrategyRows()) {
      const absl::StatusOr<GroupRoles> made = RolesOf(
          {.replicate = outer.strategy, .shard = inner.strategy}, any, lanes, mesh, trainable);
      if (made.ok() && *made == roles) {
        return true;
      }
    }
  }
  return false;
}

int64_t LayoutWidth(const GroupRoles& roles, const Mesh& mesh) {
  return CutCount(roles.measured, mesh);
}

}  // namespace ravel::plan
