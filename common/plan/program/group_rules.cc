#include "common/plan/program/group_rules.h"

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

bool IsFlat(const Placement& placement) {
  return placement.kind == PlacementKind::kFlat;
}

// Replicas keep their own weights and sum gradients once per step, and cut an optimizer only where
// the shard axis does.
bool CanExecute(const AxisStrategyRow& outer, const AxisStrategyRow& inner) {
  return !IsFlat(outer.parameter) && !IsFlat(outer.gradient_between) &&
         (!IsFlat(outer.optimizer) || IsFlat(inner.optimizer));
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

absl::Status CheckExecutable(const StrategyChoice& choice,
                             const ModelInventory& inventory,
                             const Mesh& mesh) {
  const AxisStrategyRow& outer = RowOf(choice.replicate);
  const AxisStrategyRow& inner = RowOf(choice.shard);
  const auto refuse = [&](const char* why) {
    return absl::InvalidArgumentError(absl::StrCat("parallelism.strategy: ",
                                                   std::string(inner.name),
                                                   " with replicas of ",
                                                   std::string(outer.name),
                                                   ": ",
                                                   why));
  };
  if (IsFlat(outer.parameter) || IsFlat(outer.gradient_between)) {
    return refuse(
        "replicas sum gradients once per step and keep their weights: expected "
        "no_shard or optim");
  }
  if (!CanExecute(outer, inner)) {
    return refuse(
        "replicas cut what the shard axis has cut: expected an inner strategy that "
        "shards the optimizer, or replicas of no_shard");
  }
  for (const TensorSpec& tensor : inventory.tensors) {
    const absl::Status status =
        PlacementsOf(choice, {.name = tensor.name, .shape = tensor.shape}, {}, mesh).status();
    if (!status.ok()) {
      return Annotate(status, "parallelism.strategy");
    }
    break;  // without tensor parallelism all tensors are placed alike
  }
  return absl::OkStatus();
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
  lanes.blocks = !IsFlat(RowOf(spec.strategy).gradient_between) && lanes.lanes % ranks == 0 &&
                 lanes.lanes > ranks && spec.gradient_wire == WireType::kF32;
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

GroupRules RulesOf(const StrategyChoice& choice, const LaneMap& lanes, bool trainable) {
  const AxisStrategyRow& outer = RowOf(choice.replicate);
  const AxisStrategyRow& inner = RowOf(choice.shard);
  return {
      .trainable = trainable,
      .weights_sharded = IsFlat(inner.parameter),
      .reduces_each_turn = !lanes.blocks,
      .gradient_sharded = IsFlat(inner.gradient_at_step),
      .optimizer_sharded = IsFlat(trainable ? inner.optimizer : inner.parameter),
      .outer_gradient_sharded = trainable && lanes.replicas > 1 && IsFlat(outer.gradient_at_step)};
}

bool PossibleRules(const GroupRules& rules, const LaneMap& lanes) {
  for (const AxisStrategyRow& outer : AxisStrategyRows()) {
    for (const AxisStrategyRow& inner : AxisStrategyRows()) {
      if (CanExecute(outer, inner) &&
          RulesOf({.replicate = outer.strategy, .shard = inner.strategy}, lanes, rules.trainable) ==
              rules) {
        return true;
      }
    }
  }
  return false;
}

int64_t LayoutWidth(const StrategyChoice& choice, const LaneMap& lanes) {
  const bool cut_by_replicas = RulesOf(choice, lanes, true).outer_gradient_sharded;
  return lanes.width() * (cut_by_replicas ? lanes.replicas : 1);
}

}  // namespace ravel::plan
