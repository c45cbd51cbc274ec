#pragma once

// The optimizer of one rank: statistics of all ranks, the decision, and the fused AdamW update of
// the owned shards.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "common/plan/sharding_plan.h"
#include "kernels/stream.h"
#include "worker/optim/decide_step.h"
#include "worker/optim/norm_tree.h"
#include "worker/shard/parameter_group.h"
#include "worker/shard/unit_executor.h"

namespace ravel::optim {

// Sum and count of the token losses of one lane: tokens in order, fp64; targets of -1 do not count.
struct LaneLoss {
  double sum = 0;
  int64_t tokens = 0;
};
LaneLoss SumLaneLoss(const TensorView& losses, const TensorView& targets);

// Lane sums of all ranks ([rank][turn]) added by the fixed tree over lanes.
double TreeOverLanes(const plan::LaneMap& lanes, const std::vector<std::vector<double>>& sums);

// Used only from the thread of its rank.
class ShardedAdamW final : public shard::StepActions {
 public:
  // All outlive it. `control` is asked once per step, in the statistics exchange.
  struct Args {
    const plan::ShardingPlan& plan;
    const plan::JobSpec& spec;
    int rank = 0;
    kernels::Stream& stream;
    std::vector<shard::ParameterGroup>& groups;
    std::function<ControlWord()> control;
  };
  explicit ShardedAdamW(Args args);

  // Updates applied so far: a skipped step does not count. Part of the saved state.
  int64_t updates() const { return updates_; }
  void set_updates(int64_t updates) { updates_ = updates; }

  // `step` (0-based) decides the learning rate. Then one AddLane per turn in which this rank has a
  // lane, with the losses of its micro-batch; that of the last turn at the latest when its program
  // reaches kStatsReduce (`losses` and `targets` are read there).
  void BeginStep(int64_t step, const TensorView& losses, const TensorView& targets);
  void AddLane(int64_t turn);

  std::vector<std::byte> PackStatistics() override;
  void UnpackStatistics(std::span<const std::byte> all) override;
  void Decide() override;
  void UpdateUnit(int unit) override;

  const StepDecision& decision() const { return decision_; }
  const StepTotals& totals() const { return totals_; }
  // What the ranks agreed on in the last exchange.
  const ControlWord& control() const { return agreed_; }
  double learning_rate() const { return learning_rate_; }
  // Per tensor of the inventory, of the undivided gradient.
  const std::vector<double>& tensor_squared_norms() const { return tensor_sums_; }

 private:
  struct Header {
    int64_t non_finite = 0;
    int64_t target_tokens = 0;
    int64_t save_sequence = 0;
    int64_t stop = 0;
  };
  int64_t MessageBytes() const;
  // Row sums of the owned gradients as tree nodes.
  void MeasureGradients();

  Args args_;
  NormTree tree_;
  std::vector<double> nodes_;          // of this rank
  std::vector<LaneLoss> lane_losses_;  // by turn
  std::vector<float> row_sums_;
  std::vector<double> wide_sums_;
  TensorView losses_;
  TensorView targets_;
  int64_t step_ = 0;
  int64_t updates_ = 0;
  int64_t non_finite_ = 0;
  double learning_rate_ = 0;
  std::vector<double> tensor_sums_;
  StepTotals totals_;
  StepDecision decision_;
  ControlWord agreed_;
};

}  // namespace ravel::optim
