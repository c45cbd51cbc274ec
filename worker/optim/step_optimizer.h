#pragma once

// The optimizer of one rank: statistics of all ranks, the decision, and the update of the owned
// shards by the job's rule.

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "common/plan/sharding_plan.h"
#include "kernels/stream.h"
#include "worker/optim/decide_step.h"
#include "worker/optim/host_updater.h"
#include "worker/optim/loss_scale.h"
#include "worker/optim/offload_chunks.h"
#include "worker/optim/offload_pipeline.h"
#include "worker/optim/piece_tables.h"
#include "worker/optim/step_messages.h"
#include "worker/optim/step_statistics.h"
#include "worker/optim/tensor_norms.h"
#include "worker/optim/update_rule.h"
#include "worker/optim/update_settings.h"
#include "worker/shard/instruction_runner.h"
#include "worker/shard/parameter_group.h"

namespace ravel::optim {

// On a host, statistics are known at once, and so is a step when its programs have run. On a device
// nothing waits: the host follows by ReadStep, and until then its answers are about the step that
// was read last. Used only from the thread of its rank, or in the order of the program's events.
class StepOptimizer final : public shard::StepActions {
 public:
  // All outlive it. `control` is asked once per step, in the statistics exchange.
  struct Args {
    const plan::ShardingPlan& plan;
    const UpdateSettings& settings;
    int rank = 0;
    shard::ParameterGroups& groups;
    std::function<ControlWord()> control;
    shard::HostAccess& memory;  // of the arena
    StepStatistics& statistics;
    const PieceTables& pieces;
    std::unique_ptr<UpdateRule> rule;
    OffloadPipeline* offload = nullptr;   // of groups outside of memory; of a host alone
    HostUpdater* host_updater = nullptr;  // of groups that a device's host updates
  };
  explicit StepOptimizer(Args args);

  // Updates applied so far: a skipped step does not count. Part of the saved state.
  int64_t updates() const { return updates_; }
  // Between steps.
  void set_updates(int64_t updates);

  // True in fp16: gradients are those of the loss times a scale. Else the scale is 1.
  bool scales_loss() const { return scales_loss_; }
  // What the next step is computed with, and what the step that was read last was. Part of the
  // saved state; a step changes it when it is decided, and on a device the host's when it is read.
  const LossScale& loss_scale() const { return loss_scale_; }
  const LossScale& last_loss_scale() const { return last_loss_scale_; }
  const plan::LossScaleSpec& loss_scale_spec() const { return args_.settings.loss_scale; }
  // Between steps.
  void set_loss_scale(const LossScale& loss_scale);

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
  void EndStep(kernels::Stream& stream) { args_.statistics.EndStep(stream); }
  // Steps that were ended and not read: at most two.
  int64_t unread() const { return args_.statistics.unread(); }
  // The oldest of them: waits for the device. Not where a step is known at once.
  absl::Status ReadStep();

  shard::StatisticsMessages Measure(kernels::Stream& stream) override;
  absl::Status Decide(kernels::Stream& stream) override;
  absl::Status UpdateGroup(kernels::Stream& stream,
                           plan::GroupId group,
                           const QuantizedUpdate& quantized) override;
  void OffloadGradient(plan::GroupId group) override;
  bool EncodesOnHost(plan::GroupId group) const override;
  absl::Status MeasureHostWeights() override;
  void AddHostAmaxes(kernels::Stream& stream, const TensorView& amaxes) override;
  void TakeScales(kernels::Stream& stream, const quant::QuantState& scales) override;
  void RefreshOnHost(plan::GroupId group) override;
  absl::Status ReadMainWeights(plan::GroupId group,
                               std::span<const quant::QuantPiece> pieces,
                               const VisitPieces& visit) override;
  void CountNonFinite(kernels::Stream& stream, const TensorView& flags) override {
    args_.statistics.CountNonFinite(stream, flags);
  }
  void DigestScales(kernels::Stream& stream,
                    const TensorView& words,
                    uint64_t first_index) override {
    args_.statistics.DigestScales(stream, words, first_index);
  }
  TensorView apply() const override { return args_.statistics.apply(); }
  const int64_t* step_number() const override { return &args_.statistics.outcome().step; }
  const float* device_loss_scale() const override;

  const StepDecision& decision() const { return decision_; }
  const StepTotals& totals() const { return facts_.totals; }
  // The agreement of the ranks in the last exchange.
  const ControlWord& control() const { return facts_.agreed; }
  double learning_rate() const { return learning_rate_; }
  // Per tensor of the inventory, of the undivided gradient; frozen tensors have 0.
  const std::vector<double>& tensor_squared_norms() const { return facts_.tensor_sums; }
  // Gradient elements that are NaN or infinite, per tensor of the inventory, on all ranks.
  const std::vector<int64_t>& tensor_non_finite() const { return facts_.tensor_non_finite; }
  // Returns the norms of the last step for which they were due (UpdateSettings::norms_every) and
  // travelled with the statistics of the step after it; empty until then. Taken once.
  std::optional<TensorNorms> TakeNorms() { return norms_.Take(); }
  // True if a step measures them.
  bool NormsDue(int64_t step) const;
  // Norms of the last step that travel with no further statistics: whether there are any (the same
  // on all ranks), this rank's message, of equal length on all ranks, and those of all.
  bool norms_pending() const { return norms_.pending(); }
  std::vector<std::byte> PackNorms() const { return norms_.Pack(); }
  void UnpackNorms(std::span<const std::byte> all);

 private:
  kernels::LossScaleRule ScaleRule() const;
  // Without tokens, for the step that begins or is under way.
  kernels::StatisticsHeader MakeHeader() const;
  double LearningRateOf(int64_t step) const;
  // Gives the updates of a quantized group's pieces to a device's stream, each with its amaxes and
  // codes; false, and nothing, where these do not lie as that needs it.
  bool UpdateWeights(kernels::Stream& stream,
                     const GroupUpdate& update,
                     const QuantizedUpdate& quantized) const;
  // Gives the update of a group to the stream, of an offloaded one part by part.
  absl::Status Apply(kernels::Stream& stream,
                     const shard::ParameterGroup& group,
                     const QuantizedUpdate& quantized);
  // Updates on a host, in parts of which visitors find the weights in the caches.
  void ApplyInParts(const shard::ParameterGroup& group,
                    const std::function<void(kernels::PieceTable)>& update);
  // The step that was begun first and not followed, by what was recorded of it.
  void Follow(const StepStatistics::Record& record);

  Args args_;
  const bool scales_loss_;
  NormRecorder norms_;
  plan::IdVector<plan::GroupId, std::vector<OffloadChunk>> parts_;  // of ApplyInParts, when used
  TensorView losses_;
  TensorView targets_;
  int64_t step_ = 0;  // begun last
  int64_t updates_ = 0;
  LossScale loss_scale_;
  LossScale last_loss_scale_;
  double learning_rate_ = 0;
  std::deque<int64_t> begun_;  // steps that were not followed
  // Set while the statistics do not know updates_ yet, or the scale; the last flag, if the step
  // begun last leaves norms to the message of the next.
  bool updates_are_new_ = true;
  bool scale_is_new_ = true;
  bool norms_left_ = false;
  StepFacts facts_;
  StepDecision decision_;
};

}  // namespace ravel::optim
