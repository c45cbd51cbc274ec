#pragma once

// The optimizer of one rank: statistics of all ranks, the decision, and the fused AdamW update of
// the owned shards.

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "common/plan/sharding_plan.h"
#include "kernels/stream.h"
#include "worker/optim/decide_step.h"
#include "worker/optim/device_statistics.h"
#include "worker/optim/norm_tree.h"
#include "worker/shard/parameter_group.h"
#include "worker/shard/unit_executor.h"

namespace ravel::optim {

void AddLosses(const TensorView& losses, const TensorView& targets, LaneLoss& lane);

// Lane sums of all ranks ([rank][turn]) added by the fixed tree over lanes.
double TreeOverLanes(const plan::LaneMap& lanes, const std::vector<std::vector<double>>& sums);

// Norms of every tensor in one step, by index in the inventory.
struct TensorNorms {
  int64_t step = 0;              // finished steps, that one included
  std::vector<double> gradient;  // of the divided gradient, before clipping
  std::vector<double> weight;    // before the update
  std::vector<double> update;    // of what the update changed: 0 in a skipped step
};

// On a host a step is known when its programs have run. On a device nothing waits: the host follows
// by ReadStep, and what it says of a step until then is of the one that was read last. Used only
// from the thread of its rank, or in the order of the program's events.
class ShardedAdamW final : public shard::StepActions {
 public:
  // All outlive it. `control` is asked once per step, in the statistics exchange.
  struct Args {
    const plan::ShardingPlan& plan;
    const plan::JobSpec& spec;
    int rank = 0;
    shard::ParameterGroups& groups;
    std::function<ControlWord()> control;
    shard::HostAccess& memory;           // of the arena
    DeviceStatistics* device = nullptr;  // where that is on one
  };
  explicit ShardedAdamW(Args args);

  // Updates applied so far: a skipped step does not count. Part of the saved state.
  int64_t updates() const { return updates_; }
  // Between steps.
  void set_updates(int64_t updates);

  // `step` (0-based) decides the learning rate. Then one AddMicroBatch per micro-batch of this
  // rank's lanes, in the order of the step's programs, on a stream that has computed it; that of
  // the last program is added when the program reaches kStatsReduce. `losses` and `targets` are in
  // the arena, and are read where the stream reaches the call.
  void BeginStep(kernels::Stream& stream,
                 int64_t step,
                 const TensorView& losses,
                 const TensorView& targets);
  void AddMicroBatch(kernels::Stream& stream, int64_t turn);
  // After the last program.
  void EndStep(kernels::Stream& stream);
  // Steps that were ended and not read: on a device at most two, on a host none.
  int64_t unread() const { return args_.device == nullptr ? 0 : args_.device->unread(); }
  // The oldest of them: waits for the device.
  absl::Status ReadStep();

  absl::StatusOr<std::vector<std::byte>> PackStatistics(kernels::Stream& stream) override;
  void UnpackStatistics(std::span<const std::byte> all) override;
  void Decide() override;
  shard::DeviceMessages MeasureOnDevice(kernels::Stream& stream) override;
  void DecideOnDevice(kernels::Stream& stream) override;
  absl::Status UpdateGroup(kernels::Stream& stream, plan::GroupId group) override;

  const StepDecision& decision() const { return decision_; }
  const StepTotals& totals() const { return totals_; }
  // What the ranks agreed on in the last exchange.
  const ControlWord& control() const { return agreed_; }
  double learning_rate() const { return learning_rate_; }
  // Per tensor of the inventory, of the undivided gradient; frozen tensors have 0.
  const std::vector<double>& tensor_squared_norms() const { return tensor_sums_; }
  // Gradient elements that are NaN or infinite, per tensor of the inventory, on all ranks.
  const std::vector<int64_t>& tensor_non_finite() const { return tensor_non_finite_; }
  // Of the last step whose norms were due (JobSpec::norms_every) and travelled with the statistics
  // of the step after it; empty until then. Taken once.
  std::optional<TensorNorms> TakeNorms();
  // Whether a step measures them.
  bool NormsDue(int64_t step) const;
  // Norms of the last step that travel with no further statistics: whether there are any (the same
  // on all ranks), this rank's message, of equal length on all ranks, and those of all.
  bool norms_pending() const { return pending_.has_value(); }
  std::vector<std::byte> PackNorms() const;
  void UnpackNorms(std::span<const std::byte> all);

 private:
  using Header = kernels::StatisticsHeader;
  // Without tokens, for the step that begins or is under way.
  Header MakeHeader() const;
  size_t MessageBytes() const;
  void MeasureGradients(kernels::Stream& stream);
  // Messages of all ranks, with lists of weight and update nodes or without.
  void Unpack(std::span<const std::byte> all, bool has_norms);
  void FollowDecision(int64_t step);
  void AdamW(kernels::Stream& stream, const shard::ParameterGroup& group);
  kernels::AdamWHyper HyperWith(double weight_decay) const;
  // The update of a group, with the norms of what it changes: on a device the host waits and
  // measures, since only some steps do this.
  absl::Status MeasuredUpdate(kernels::Stream& stream, const shard::ParameterGroup& group);
  void CombineNorms(const std::vector<std::vector<double>>& weights,
                    const std::vector<std::vector<double>>& updates);

  Args args_;
  NormTree tree_;
  // Of this rank: sums of squares per node, of gradients, weights before the update, and updates.
  std::vector<double> gradient_nodes_;
  std::vector<double> weight_nodes_;
  std::vector<double> update_nodes_;
  plan::IdVector<plan::TensorId, int64_t> non_finite_;
  std::vector<LaneLoss> lane_losses_;  // by turn
  TensorView losses_;
  TensorView targets_;
  int64_t step_ = 0;  // begun last
  int64_t updates_ = 0;
  double learning_rate_ = 0;
  // Of a device: steps that were begun and not read, whether it does not know updates_ yet, and
  // whether the step begun last leaves norms to the message of the next.
  std::deque<int64_t> begun_;
  bool updates_are_new_ = true;
  bool norms_left_ = false;
  std::vector<double> tensor_sums_;
  std::vector<int64_t> tensor_non_finite_;
  StepTotals totals_;
  StepDecision decision_;
  ControlWord agreed_;
  plan::IdVector<plan::GroupId, size_t> first_node_;
  std::optional<TensorNorms> pending_;  // weight and update norms are still on each rank
  std::optional<TensorNorms> norms_;
};

}  // namespace ravel::optim
