// Job fields become strategies of units, and these become placements of each group's buffers. After
// this nothing below knows a strategy's name. What is refused here names the field of the job.

#include "common/plan/program/group_roles.h"

#include <algorithm>
#include <bit>
#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include <absl/strings/str_cat.h>

#include "common/field_error.h"
#include "common/model/freeze.h"
#include "common/plan/layout/placement.h"

namespace ravel::plan {
namespace {

// A replica's part of a shard is whole elements: shards are multiples of 256.
constexpr int64_t kMostReplicas = 256;
// Micro-batches of all lanes.
constexpr int64_t kMostPrograms = int64_t{1} << 22;

// The same placements with the innermost data axis Flat.
Placements CutInnermost(const Placements& placements, const Mesh& mesh) {
  const std::string& innermost = InnermostDataAxis(mesh);
  Placements cut = {{innermost, Placement::Flat()}};
  for (const AxisPlacement& entry : placements) {
    if (entry.axis != innermost) {
      cut.push_back(entry);
    }
  }
  return Canonical(cut, mesh);
}

// The strategy of the replicate axis where sums are made once per step.
Strategy OncePerStep(Strategy outer) {
  return outer == Strategy::kOptimGrads ? Strategy::kOptim : outer;
}

// `path`: of the two fields.
UnitChoice ChoiceOf(const JobSpec& spec,
                    Strategy shard,
                    Strategy replicate,
                    const std::string& path) {
  const bool two_axes = spec.replicas > 1 && replicate != Strategy::kNoShard;
  return {.strategies = {.replicate = two_axes ? replicate : Strategy::kNoShard, .shard = shard},
          .field = absl::StrCat(path, two_axes ? ".replicateStrategy" : ".strategy")};
}

UnitChoice ChoiceOfEntry(const JobSpec& spec, size_t entry) {
  const UnitStrategy& unit = spec.units[entry];
  const std::string path = absl::StrCat("parallelism.units[", entry, "]");
  UnitChoice choice =
      ChoiceOf(spec, unit.strategy, unit.replicate.value_or(spec.replicate_strategy), path);
  if (!unit.replicate.has_value()) {
    choice.field = path + ".strategy";
  }
  return choice;
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

absl::StatusOr<UnitChoices> ChoicesOf(const JobSpec& spec, const ModelInventory& inventory) {
  const UnitChoice of_job = ChoiceOf(spec, spec.strategy, spec.replicate_strategy, "parallelism");
  UnitChoices choices;
  std::vector<bool> matches(spec.units.size(), false);
  std::vector<bool> chosen(spec.units.size(), false);
  for (const UnitSpec& unit : inventory.units) {
    choices.push_back(of_job);
    bool open = true;
    for (size_t i = 0; i < spec.units.size() && !unit.tensors.empty(); ++i) {
      const UnitStrategy& entry = spec.units[i];
      if (!MatchesGlob(entry.match, unit.name)) {
        continue;
      }
      matches[i] = true;
      if (open) {
        chosen[i] = true;
        choices.back() = ChoiceOfEntry(spec, i);
      }
      open = false;
    }
  }
  for (size_t i = 0; i < spec.units.size(); ++i) {
    if (!chosen[i]) {
      return FieldRefusal(absl::StrCat("parallelism.units[", i, "].match"),
                          matches[i]
                              ? "a pattern that matches a unit which no entry before it matches"
                              : absl::StrCat("a pattern that matches a unit, such as ",
                                             inventory.units.front().name),
                          absl::StrCat("'", spec.units[i].match, "'"));
    }
  }
  return choices;
}

std::string ChoiceText(const StrategyChoice& choice, const LaneMap& lanes) {
  std::string text(RowOf(choice.shard).name);
  if (lanes.replicas > 1) {
    absl::StrAppend(&text, ", replicate ", std::string(RowOf(choice.replicate).name));
  }
  return text;
}

absl::StatusOr<LaneMap> LanesOf(const JobSpec& spec, int64_t devices) {
  if (devices % spec.tensor != 0) {
    return FieldRefusal("devices.count",
                        absl::StrCat("a multiple of parallelism.tensor ", spec.tensor),
                        absl::StrCat(devices));
  }
  const int64_t ranks = devices / spec.tensor;
  if (ranks < 1 || ranks > spec.virtual_ranks) {
    const std::string times = spec.tensor > 1 ? " times parallelism.tensor" : "";
    return FieldRefusal("devices.count",
                        absl::StrCat("1 to determinism.virtualRanks ", spec.virtual_ranks, times),
                        absl::StrCat(devices));
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
  return lanes;
}

bool Trains(const ModelInventory& inventory, UnitId unit) {
  const std::vector<TensorId>& tensors = inventory.units[unit].tensors;
  return std::any_of(tensors.begin(), tensors.end(), [&](TensorId tensor) {
    return inventory.tensors[tensor].trainable;
  });
}

bool InBlocks(const LaneMap& lanes,
              WireType wire,
              const ModelInventory& inventory,
              const UnitChoices& choices) {
  for (const UnitId unit : choices.ids()) {
    const Strategy strategy = choices[unit].strategies.shard;
    if (Trains(inventory, unit) && RowOf(strategy).gradient_between.in_flat_family()) {
      return false;
    }
  }
  // A wire that rounds does so to each lane's gradient. A rank that is a replica alone has nothing
  // to wait with: both ways add its lanes in one counter, and blocks would copy the sum.
  if (wire != WireType::kF32 || lanes.width() == 1) {
    return false;
  }
  return lanes.lanes % lanes.ranks == 0 && lanes.lanes > lanes.ranks;
}

absl::StatusOr<Mesh> MeshOf(const LaneMap& lanes, int64_t tensor_ranks) {
  std::vector<MeshAxis> axes;
  if (lanes.replicas > 1) {
    axes.push_back({.name = kReplicateAxis, .size = lanes.replicas});
  }
  axes.push_back({.name = kShardAxis, .size = lanes.width()});
  if (tensor_ranks > 1) {
    axes.push_back({.name = kTensorAxis, .size = tensor_ranks});
  }
  return Mesh::Create(std::move(axes));
}

absl::StatusOr<GroupRoles> RolesOf(const StrategyChoice& choice,
                                   const PlacedTensor& tensor,
                                   const LaneMap& lanes,
                                   const Mesh& mesh,
                                   bool trainable) {
  // Without gradients replicas have nothing to share.
  const StrategyChoice of_group = {
      .replicate = trainable ? OncePerStep(choice.replicate) : Strategy::kNoShard,
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

absl::Status CheckChoice(const StrategyChoice& choice,
                         const PlacedTensor& tensor,
                         const LaneMap& lanes,
                         const Mesh& mesh) {
  ASSIGN_OR_RETURN(GroupRoles of_tensor, RolesOf(choice, tensor, lanes, mesh, true));
  ModelInventory inventory;
  inventory.tensors.push_back({.name = tensor.name, .shape = tensor.shape, .cut = {}});
  GroupLayouts groups(1);
  groups[0].tensors = {0};
  RolesOfGroups roles;
  roles.push_back(std::move(of_tensor));
  return MovesOf({.inventory = inventory,
                  .groups = groups,
                  .roles = roles,
                  .mesh = mesh,
                  .options = ProgramOptions()})
      .status();
}

bool PossibleRoles(const GroupRoles& roles,
                   const LaneMap& lanes,
                   const Mesh& mesh,
                   bool trainable) {
  if (trainable && (roles.between == roles.staged) != lanes.blocks) {
    return false;  // lanes in blocks are summed before any exchange, others are not
  }
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
