#pragma once

// Sharding strategies as rows of placements. The only place that knows their names: below it there
// are placements and moves.

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "common/model/job_spec.h"
#include "common/plan/layout/mesh.h"
#include "common/plan/layout/placement.h"
#include "common/plan/layout/placement_move.h"
#include "common/status.h"

namespace ravel::plan {

// The placement of each buffer on one data axis. A gradient is Partial when backward has staged it.
struct AxisStrategyRow {
  Strategy strategy = Strategy::kNoShard;
  std::string_view name;
  std::string_view alias;
  Placement parameter;
  Placement gradient_between;  // micro-batches
  Placement gradient_at_step;
  Placement optimizer;  // main weight and moments
};
std::span<const AxisStrategyRow> AxisStrategyRows();
const AxisStrategyRow& RowOf(Strategy strategy);

// One strategy per data axis; any combination that PlacementsOf accepts.
struct StrategyChoice {
  Strategy replicate = Strategy::kNoShard;
  Strategy shard = Strategy::kOptimGradsParams;
  bool sequence_parallel = false;  // gradients of tensors that `tensor` does not cut are Partial
  bool operator==(const StrategyChoice&) const = default;
};
// A strategy as users name it: the four of one axis, "hsdp" and "hfsdp".
struct NamedStrategy {
  std::string_view name;
  std::string_view alias;  // ZeRO-0 to ZeRO-3, or ""
  StrategyChoice choice;
  bool two_axes = false;  // needs the `replicate` axis
};
std::span<const NamedStrategy> NamedStrategies();
// By name or alias; case, '-' and '_' are ignored. `of_one_axis`: only those. The error lists what
// there is.
absl::StatusOr<NamedStrategy> FindStrategy(std::string_view name, bool of_one_axis = false);

// The ways in which tensor parallelism cuts a tensor; a row's dimensions are those of one expert.
enum class TensorParallelKind {
  kReplicated,
  kColumn,  // by outputs: weight and bias
  kRow,     // by inputs: weight; the bias is added once, after the sum
  kNorm,
  kNormBeforeRow,  // its channels are those that a row-parallel linear reads
  kSoftmaxOffset,  // one per head
};
struct TensorParallelRow {
  TensorParallelKind kind = TensorParallelKind::kReplicated;
  std::string_view name;
  Placement weight;
  Placement bias;
};
std::span<const TensorParallelRow> TensorParallelRows();

// Properties of a tensor on which its placements depend, beside the strategy.
struct TensorTraits {
  TensorParallelKind tensor_parallel = TensorParallelKind::kReplicated;
  bool bias = false;
  bool expert = false;            // dimension 0 counts experts; the mesh is an expert view
  bool matrix_optimizer = false;  // the optimizer needs whole matrices
  int64_t block_rows = 1;         // more than 1: shard boundaries lie between blocks
};

// Placements of one tensor's buffers, canonical.
struct RolePlacements {
  Placements parameter;
  Placements gradient_staged;   // what backward leaves: Partial
  Placements gradient_between;  // micro-batches
  Placements gradient_at_step;
  Placements optimizer;
};
// Every row of the table for one tensor. Axes that the mesh lacks are left out. Checks that the
// placements are valid and that every move of a step exists: staged -> between -> at step ->
// optimizer -> parameter -> gathered. Errors name the strategies, tensor and axis.
absl::StatusOr<RolePlacements> PlacementsOf(const StrategyChoice& choice,
                                            const PlacedTensor& tensor,
                                            const TensorTraits& traits,
                                            const Mesh& mesh);

}  // namespace ravel::plan
