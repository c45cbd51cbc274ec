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

// What one data axis does with each buffer, and what that costs per step on the axis, in units of
// P * (k-1)/k elements for an axis of k. A gradient is Partial when backward has staged it.
struct AxisStrategyRow {
  Strategy strategy = Strategy::kNoShard;
  std::string_view name;
  std::string_view alias;
  Placement parameter;
  Placement gradient_between;  // micro-batches
  Placement gradient_at_step;
  Placement optimizer;  // main weight and moments
  int weight_gathers_per_micro_batch = 0;
  int weight_gathers_per_step = 0;
  int reduces_per_micro_batch = 0;
  int reduces_per_step = 0;  // an all-reduce is two
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
// What users name: the four of one axis, "hsdp" and "hfsdp".
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

// How tensor parallelism cuts a tensor; a row's dimensions are those of one expert.
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

// What placements of a tensor depend on, beside the strategy.
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

// Bytes per element of each buffer.
struct ElementBytes {
  int64_t weight = 2;
  int64_t gradient = 4;
  int64_t optimizer = 12;
  int64_t wire = 4;  // of a gradient on the innermost data axis; further out it is `gradient`
};
// Resident bytes of a rank for `elements` in all, without padding, windows or activations.
struct RankBytes {
  int64_t weight = 0;
  int64_t gradient = 0;
  int64_t optimizer = 0;
  int64_t total() const { return weight + gradient + optimizer; }
};
RankBytes BytesPerRank(const RolePlacements& placements,
                       const Mesh& mesh,
                       int64_t elements,
                       const ElementBytes& bytes);

// Bytes that a rank sends on each axis per step of `micro_batches`, with a gather for forward and
// one for backward; in mesh order, one entry per axis.
struct AxisTraffic {
  std::string axis;
  int64_t bytes = 0;
  bool operator==(const AxisTraffic&) const = default;
};
// From the moves that a tensor makes.
absl::StatusOr<std::vector<AxisTraffic>> PlannedTraffic(const RolePlacements& placements,
                                                        const PlacedTensor& tensor,
                                                        const Mesh& mesh,
                                                        const ElementBytes& bytes,
                                                        int64_t micro_batches);
// From the rows alone, for the data axes and a tensor that nothing else cuts. Equal to
// PlannedTraffic where element counts divide.
std::vector<AxisTraffic> TableTraffic(const StrategyChoice& choice,
                                      const Mesh& mesh,
                                      int64_t elements,
                                      const ElementBytes& bytes,
                                      int64_t micro_batches);

}  // namespace ravel::plan
