// Strategies as rows of placements, and what follows from a row: placements of every buffer of a
// tensor, the moves of a step, resident bytes and traffic. A step makes the transitions
//   staged gradient -> between micro-batches -> at step -> optimizer -> parameter -> gathered
// and a combination of rows is valid if each of them is a sequence of legal moves. Costs are
// derived from the same moves, so the table and the planner cannot disagree.

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

// Placements of a tensor that the optimizer needs whole: it is not cut between rows.
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

absl::Status CheckRoles(const RolePlacements& roles, const PlacedTensor& tensor, const Mesh& mesh) {
  RETURN_IF_ERROR(ValidatePlacements(tensor, mesh, roles.parameter, BufferUse::kValues));
  RETURN_IF_ERROR(ValidatePlacements(tensor, mesh, roles.optimizer, BufferUse::kValues));
  const Placements gathered = Gathered(roles.parameter);
  const Placements* const places[] = {&roles.gradient_staged,
                                      &roles.gradient_between,
                                      &roles.gradient_at_step,
                                      &roles.optimizer,
                                      &roles.parameter,
                                      &gathered};
  for (size_t i = 1; i < std::size(places); ++i) {
    RETURN_IF_ERROR(PlanMoves(tensor, mesh, *places[i - 1], *places[i]).status());
  }
  return absl::OkStatus();
}

}  // namespace

std::span<const AxisStrategyRow> AxisStrategyRows() {
  // Columns: parameter, gradient between micro-batches, at the step, optimizer.
  static constexpr AxisStrategyRow kRows[] = {
      {Strategy::kNoShard, "no_shard", "ZeRO-0", kR, kP, kR, kR},
      {Strategy::kOptim, "optim", "ZeRO-1", kR, kP, kF, kF},
      {Strategy::kOptimGrads, "optim_grads", "ZeRO-2", kR, kF, kF, kF},
      {Strategy::kOptimGradsParams, "optim_grads_params", "ZeRO-3", kF, kF, kF, kF},
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

}  // namespace ravel::plan
