#include "worker/optim/step_messages.h"

#include <algorithm>
#include <cstring>

#include "common/check.h"
#include "common/signed_size.h"
#include "kernels/row_sum.h"
#include "kernels/step_statistics.h"

namespace ravel::optim {

double TreeOverLanes(const plan::LaneMap& lanes, const std::vector<std::vector<double>>& sums) {
  std::vector<double> by_lane(Size(lanes.lanes), 0.0);
  for (int64_t turn = 0; turn < lanes.turns(); ++turn) {
    for (int64_t rank = 0; rank < lanes.ranks; ++rank) {
      const int64_t lane = lanes.LaneOf(turn, rank);
      if (lane >= 0) {
        At(by_lane, lane) = At(At(sums, rank), turn);
      }
    }
  }
  return kernels::TreeSumDouble(by_lane.data(), lanes.lanes);
}

StepFacts ReadMessages(const plan::ShardingPlan& plan,
                       const NormTree& tree,
                       bool norms,
                       std::span<const std::byte> all) {
  StepFacts facts;
  const size_t tensors = plan.inventory.tensors.size();
  facts.tensor_non_finite.assign(tensors, 0);
  const std::byte* message = all.data();
  const auto take = [&message](auto* values, size_t count) {
    std::memcpy(static_cast<void*>(values), message, count * sizeof(*values));
    message += count * sizeof(*values);
  };
  const auto take_list = [&](RankNodes& lists, int64_t count) {
    take(lists.emplace_back(Size(count)).data(), Size(count));
  };
  RankNodes losses;  // of ranks that count their lanes
  RankNodes foreign;
  RankNodes gradients;
  std::vector<int64_t> counts(tensors);
  uint64_t scales = 0;
  for (int64_t rank = 0; rank < plan.ranks; ++rank) {
    kernels::StatisticsHeader header;
    take(&header, 1);
    scales = rank == 0 ? header.scales : scales;
    if (header.scales != scales && facts.other_scales < 0) {
      facts.other_scales = rank;
    }
    facts.totals.target_tokens += header.target_tokens;
    facts.agreed.save_sequence = std::max(facts.agreed.save_sequence, header.save_sequence);
    facts.agreed.stop = std::max(facts.agreed.stop, header.stop);
    facts.agreed.saving = std::max(facts.agreed.saving, header.saving);
    take(counts.data(), tensors);
    for (size_t tensor = 0; tensor < tensors; ++tensor) {
      facts.tensor_non_finite[tensor] += counts[tensor];
      facts.totals.non_finite += counts[tensor];
    }
    take_list(plan::CountsLane(plan, rank) ? losses : foreign, plan.lanes.turns());
    take_list(gradients, tree.longest());
    if (norms) {
      take_list(facts.weight_nodes, tree.longest());
      take_list(facts.update_nodes, tree.longest());
    }
  }
  CHECK_EQ(message, all.data() + all.size());
  facts.totals.loss_sum = TreeOverLanes(plan.lanes, losses);
  facts.tensor_sums = tree.Combine({gradients.begin(), gradients.end()});
  facts.totals.squared_norm = tree.Total(facts.tensor_sums);
  return facts;
}

}  // namespace ravel::optim
