#include "tests/common/plan/layout/strategy_costs.h"

#include "common/shape.h"
#include "common/signed_size.h"

namespace ravel::plan {
namespace {

constexpr Placement kP = Placement::Partial();
constexpr Placement kF = Placement::Flat();

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

// The data axis whose reduce comes first and carries wire-format gradients.
const char* WireAxis(const Mesh& mesh) {
  return mesh.AxisIndex(kShardAxis) >= 0 ? kShardAxis : kReplicateAxis;
}

// Traffic of one data axis in units of P * (k-1)/k elements for an axis of k.
struct AxisCounts {
  int gathers_per_micro_batch = 0;  // of weights
  int gathers_per_step = 0;
  int reduces_per_micro_batch = 0;  // of gradients; an all-reduce is two
  int reduces_per_step = 0;
};

AxisCounts CountsOf(Strategy strategy) {
  switch (strategy) {
    case Strategy::kNoShard:
      return {0, 0, 0, 2};
    case Strategy::kOptim:
      return {0, 1, 0, 1};
    case Strategy::kOptimGrads:
      return {0, 1, 1, 0};
    default:
      return {2, 0, 1, 0};
  }
}

}  // namespace

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
  const std::string wire_axis = WireAxis(mesh);
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
    const AxisCounts row = CountsOf(inner ? choice.shard : choice.replicate);
    const int64_t gathers = micro_batches * row.gathers_per_micro_batch + row.gathers_per_step;
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
    const int64_t reduce_bytes = axis.name == WireAxis(mesh) ? bytes.wire : bytes.gradient;
    traffic.push_back(
        {axis.name,
         local * (axis.size - 1) / axis.size * (gathers * bytes.weight + reduces * reduce_bytes)});
  }
  return traffic;
}

}  // namespace ravel::plan
