#include "common/plan/layout/strategy_table.h"

#include <algorithm>
#include <cctype>
#include <cstddef>

#include <absl/strings/str_cat.h>

#include "common/check.h"
#include "common/signed_size.h"

namespace ravel::plan {
namespace {

constexpr Placement kR = Placement::Replicate();
constexpr Placement kP = Placement::Partial();
constexpr Placement kF = Placement::Flat();

std::string Folded(std::string_view name) {
  std::string folded;
  for (const char c : name) {
    if (c != '-' && c != '_') {
      folded += static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
    }
  }
  return folded;
}

// Appends the placements of the data axes: inner axis first.
class PlacementsBuilder {
 public:
  PlacementsBuilder(const StrategyChoice& choice, const TensorTraits& traits, const Mesh& mesh)
      : choice_(choice), traits_(traits), mesh_(mesh) {}

  Placements With(Placement AxisStrategyRow::*role) const {
    Placements placements = cuts_;
    Add(kShardAxis, WithBlocks(RowOf(choice_.shard).*role), &placements);
    Add(kReplicateAxis, WithBlocks(RowOf(choice_.replicate).*role), &placements);
    return placements;
  }
  Placements Staged() const {
    Placements placements = cuts_;
    Add(kShardAxis, kP, &placements);
    Add(kReplicateAxis, kP, &placements);
    return placements;
  }
  void AddCut(const char* axis, const Placement& placement) { Add(axis, placement, &cuts_); }

 private:
  Placement WithBlocks(const Placement& placement) const {
    const bool blocks = placement.kind == PlacementKind::kFlat && traits_.block_rows > 1;
    return blocks ? Placement::BlockAtomic(traits_.block_rows) : placement;
  }
  void Add(const char* axis, const Placement& placement, Placements* placements) const {
    if (mesh_.AxisIndex(axis) >= 0) {
      placements->push_back({axis, placement});
    }
  }

  const StrategyChoice& choice_;
  const TensorTraits& traits_;
  const Mesh& mesh_;
  Placements cuts_;  // Shard entries: experts, then tensor parallelism
};

Placement TensorParallelPlacement(const TensorTraits& traits) {
  for (const TensorParallelRow& row : TensorParallelRows()) {
    if (row.kind == traits.tensor_parallel) {
      Placement placement = traits.bias ? row.bias : row.weight;
      const bool below_experts = traits.expert && placement.kind == PlacementKind::kShard;
      placement.dim += below_experts ? 1 : 0;
      return placement;
    }
  }
  return kR;
}

// What the optimizer needs whole is not cut between rows.
Placements WithWholeTensors(Placements placements) {
  for (AxisPlacement& entry : placements) {
    if (entry.placement.in_flat_family()) {
      entry.placement = Placement::TensorAtomic();
    }
  }
  return placements;
}

// Buffers that the gather of a parameter leaves: its Shard entries alone.
Placements Gathered(const Placements& parameter) {
  Placements gathered;
  for (const AxisPlacement& entry : parameter) {
    if (entry.placement.kind == PlacementKind::kShard) {
      gathered.push_back(entry);
    }
  }
  return gathered;
}

// One transition of a step, `times` per step.
struct Transition {
  const Placements& from;
  const Placements& to;
  int64_t times = 1;
  bool gradient = false;
};
std::vector<Transition> TransitionsOf(const RolePlacements& roles,
                                      const Placements& gathered,
                                      int64_t micro_batches) {
  return {{roles.gradient_staged, roles.gradient_between, micro_batches, true},
          {roles.gradient_between, roles.gradient_at_step, 1, true},
          {roles.gradient_at_step, roles.optimizer, 1, true},
          {roles.optimizer, roles.parameter, 1, false},
          {roles.parameter, gathered, 2 * micro_batches, false}};
}

absl::Status CheckRoles(const RolePlacements& roles, const PlacedTensor& tensor, const Mesh& mesh) {
  RETURN_IF_ERROR(ValidatePlacements(tensor, mesh, roles.parameter, BufferUse::kValues));
  RETURN_IF_ERROR(ValidatePlacements(tensor, mesh, roles.optimizer, BufferUse::kValues));
  const Placements gathered = Gathered(roles.parameter);
  for (const Transition& transition : TransitionsOf(roles, gathered, 1)) {
    RETURN_IF_ERROR(PlanMoves(tensor, mesh, transition.from, transition.to).status());
  }
  return absl::OkStatus();
}

// The data axis whose reduce comes first and carries wire-format gradients.
const char* InnermostDataAxis(const Mesh& mesh) {
  return mesh.AxisIndex(kShardAxis) >= 0 ? kShardAxis : kReplicateAxis;
}

}  // namespace

std::span<const AxisStrategyRow> AxisStrategyRows() {
  // Columns: parameter, gradient between micro-batches, at the step, optimizer; then the four
  // counts of traffic in the order of the struct.
  static constexpr AxisStrategyRow kRows[] = {
      {Strategy::kNoShard, "no_shard", "ZeRO-0", kR, kP, kR, kR, 0, 0, 0, 2},
      {Strategy::kOptim, "optim", "ZeRO-1", kR, kP, kF, kF, 0, 1, 0, 1},
      {Strategy::kOptimGrads, "optim_grads", "ZeRO-2", kR, kF, kF, kF, 0, 1, 1, 0},
      {Strategy::kOptimGradsParams, "optim_grads_params", "ZeRO-3", kF, kF, kF, kF, 2, 0, 1, 0},
  };
  return kRows;
}

const AxisStrategyRow& RowOf(Strategy strategy) {
  const std::span<const AxisStrategyRow> rows = AxisStrategyRows();
  const auto row = std::find_if(rows.begin(), rows.end(), [&](const AxisStrategyRow& candidate) {
    return candidate.strategy == strategy;
  });
  CHECK_MSG(row != rows.end(), "every strategy has a row");
  return *row;
}

std::span<const NamedStrategy> NamedStrategies() {
  constexpr Strategy kNo = Strategy::kNoShard;
  constexpr Strategy kAll = Strategy::kOptimGradsParams;
  static constexpr NamedStrategy kNamed[] = {
      {"no_shard", "ZeRO-0", {kNo, Strategy::kNoShard}, false},
      {"optim", "ZeRO-1", {kNo, Strategy::kOptim}, false},
      {"optim_grads", "ZeRO-2", {kNo, Strategy::kOptimGrads}, false},
      {"optim_grads_params", "ZeRO-3", {kNo, kAll}, false},
      {"hsdp", "", {kNo, kAll}, true},
      {"hfsdp", "", {Strategy::kOptim, kAll}, true},
  };
  return kNamed;
}

absl::StatusOr<NamedStrategy> FindStrategy(std::string_view name, bool of_one_axis) {
  const std::string folded = Folded(name);
  std::string known;
  for (const NamedStrategy& strategy : NamedStrategies()) {
    if (of_one_axis && strategy.two_axes) {
      continue;
    }
    if (!folded.empty() && (Folded(strategy.name) == folded || Folded(strategy.alias) == folded)) {
      return strategy;
    }
    absl::StrAppend(&known, known.empty() ? "" : ", ", std::string(strategy.name));
    if (!strategy.alias.empty()) {
      absl::StrAppend(&known, " (", std::string(strategy.alias), ")");
    }
  }
  return absl::InvalidArgumentError(
      absl::StrCat("strategy \"", std::string(name), "\": expected one of ", known));
}

std::span<const TensorParallelRow> TensorParallelRows() {
  static constexpr TensorParallelRow kRows[] = {
      {TensorParallelKind::kReplicated, "replicated", kR, kR},
      {TensorParallelKind::kColumn, "column", Placement::Shard(0), Placement::Shard(0)},
      {TensorParallelKind::kRow, "row", Placement::Shard(1), kR},
      {TensorParallelKind::kNorm, "norm", kR, kR},
      {TensorParallelKind::kNormBeforeRow,
       "norm_before_row",
       Placement::Shard(0),
       Placement::Shard(0)},
      {TensorParallelKind::kSoftmaxOffset,
       "softmax_offset",
       Placement::Shard(0),
       Placement::Shard(0)},
  };
  return kRows;
}

absl::StatusOr<RolePlacements> PlacementsOf(const StrategyChoice& choice,
                                            const PlacedTensor& tensor,
                                            const TensorTraits& traits,
                                            const Mesh& mesh) {
  if (traits.expert && mesh.AxisIndex(kExpertAxis) < 0) {
    return absl::InvalidArgumentError(absl::StrCat("tensor ",
                                                   tensor.name,
                                                   ": axis ",
                                                   kExpertAxis,
                                                   ": an expert's mesh is an expert view; ",
                                                   "it is ",
                                                   mesh.Text()));
  }
  PlacementsBuilder builder(choice, traits, mesh);
  if (traits.expert) {
    builder.AddCut(kExpertAxis, Placement::Shard(0));
  }
  const Placement tensor_cut = TensorParallelPlacement(traits);
  builder.AddCut(kTensorAxis, tensor_cut);
  RolePlacements roles = {.parameter = builder.With(&AxisStrategyRow::parameter),
                          .gradient_staged = builder.Staged(),
                          .gradient_between = builder.With(&AxisStrategyRow::gradient_between),
                          .gradient_at_step = builder.With(&AxisStrategyRow::gradient_at_step),
                          .optimizer = builder.With(&AxisStrategyRow::optimizer)};
  if (traits.matrix_optimizer) {
    roles.optimizer = WithWholeTensors(roles.optimizer);
  }
  const bool addends = choice.sequence_parallel && mesh.AxisIndex(kTensorAxis) >= 0 &&
                       tensor_cut.kind == PlacementKind::kReplicate;
  for (Placements* gradient : {&roles.gradient_staged, &roles.gradient_between}) {
    for (AxisPlacement& entry : *gradient) {
      if (addends && entry.axis == kTensorAxis) {
        entry.placement = kP;
      }
    }
  }
  for (Placements* role : {&roles.parameter,
                           &roles.gradient_staged,
                           &roles.gradient_between,
                           &roles.gradient_at_step,
                           &roles.optimizer}) {
    *role = Canonical(*role, mesh);
  }
  const std::string what = absl::StrCat("replicate ",
                                        std::string(RowOf(choice.replicate).name),
                                        " with shard ",
                                        std::string(RowOf(choice.shard).name));
  RETURN_IF_ERROR(Annotate(CheckRoles(roles, tensor, mesh), what));
  return roles;
}

RankBytes BytesPerRank(const RolePlacements& placements,
                       const Mesh& mesh,
                       int64_t elements,
                       const ElementBytes& bytes) {
  const auto share = [&](const Placements& role) {
    return DivCeil(elements, CutCount(role, mesh));
  };
  return {.weight = share(placements.parameter) * bytes.weight,
          .gradient = share(placements.gradient_between) * bytes.gradient,
          .optimizer = share(placements.optimizer) * bytes.optimizer};
}

absl::StatusOr<std::vector<AxisTraffic>> PlannedTraffic(const RolePlacements& placements,
                                                        const PlacedTensor& tensor,
                                                        const Mesh& mesh,
                                                        const ElementBytes& bytes,
                                                        int64_t micro_batches) {
  std::vector<AxisTraffic> traffic;
  for (const MeshAxis& axis : mesh.axes()) {
    traffic.push_back({axis.name, 0});
  }
  const int64_t elements = ElementCount(tensor.shape);
  const std::string wire_axis = InnermostDataAxis(mesh);
  const Placements gathered = Gathered(placements.parameter);
  for (const Transition& transition : TransitionsOf(placements, gathered, micro_batches)) {
    ASSIGN_OR_RETURN(const std::vector<Move> moves,
                     PlanMoves(tensor, mesh, transition.from, transition.to));
    for (const Move& move : moves) {
      const bool on_wire = move.axis == wire_axis && move.from == kP;
      const int64_t gradient_bytes = on_wire ? bytes.wire : bytes.gradient;
      const int64_t element_bytes = transition.gradient ? gradient_bytes : bytes.weight;
      At(traffic, mesh.AxisIndex(move.axis)).bytes +=
          transition.times * MoveBytes(move, mesh, elements, element_bytes);
    }
  }
  return traffic;
}

std::vector<AxisTraffic> TableTraffic(const StrategyChoice& choice,
                                      const Mesh& mesh,
                                      int64_t elements,
                                      const ElementBytes& bytes,
                                      int64_t micro_batches) {
  std::vector<AxisTraffic> traffic;
  for (const MeshAxis& axis : mesh.axes()) {
    const bool inner = axis.name == kShardAxis;
    if (!inner && axis.name != kReplicateAxis) {
      traffic.push_back({axis.name, 0});
      continue;
    }
    const AxisStrategyRow& row = RowOf(inner ? choice.shard : choice.replicate);
    const int64_t gathers =
        micro_batches * row.weight_gathers_per_micro_batch + row.weight_gathers_per_step;
    const int64_t reduces = micro_batches * row.reduces_per_micro_batch + row.reduces_per_step;
    // The outer axis works on what the inner one has cut; the inner one, where it cuts nothing
    // itself, on what the outer one has cut after each micro-batch.
    int64_t cuts = 1;
    if (!inner && choice.shard != Strategy::kNoShard) {
      cuts = mesh.AxisSize(kShardAxis);
    }
    if (inner && choice.shard == Strategy::kNoShard &&
        RowOf(choice.replicate).gradient_between == kF) {
      cuts = mesh.AxisSize(kReplicateAxis);
    }
    const int64_t local = elements / cuts;
    const int64_t reduce_bytes = axis.name == InnermostDataAxis(mesh) ? bytes.wire : bytes.gradient;
    traffic.push_back(
        {axis.name,
         local * (axis.size - 1) / axis.size * (gathers * bytes.weight + reduces * reduce_bytes)});
  }
  return traffic;
}

}  // namespace ravel::plan
