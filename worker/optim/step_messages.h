#pragma once

// Reads the facts of a step from the messages of all ranks (layout: step_statistics.h). Pure.

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "common/plan/sharding_plan.h"
#include "worker/optim/decide_step.h"
#include "worker/optim/norm_tree.h"

namespace ravel::optim {

// Values of NormTree's nodes, by rank.
using RankNodes = std::vector<std::vector<double>>;

struct StepFacts {
  StepTotals totals;
  ControlWord agreed;  // by all ranks
  // Per tensor of the inventory: sum of squares of the undivided gradient, 0 where it is frozen,
  // and elements that are NaN or infinite, on all ranks.
  std::vector<double> tensor_sums;
  std::vector<int64_t> tensor_non_finite;
  // The first rank whose scales of quantized weights are not those of rank 0; -1: none.
  int64_t other_scales = -1;
  // Norms of the step before, where the messages carry them.
  RankNodes weight_nodes;
  RankNodes update_nodes;
};

StepFacts ReadMessages(const plan::ShardingPlan& plan,
                       const NormTree& tree,
                       bool norms,
                       std::span<const std::byte> all);

// Lane sums of all ranks that count a lane ([rank][turn]) added by the fixed tree over lanes.
double TreeOverLanes(const plan::LaneMap& lanes, const std::vector<std::vector<double>>& sums);

}  // namespace ravel::optim
