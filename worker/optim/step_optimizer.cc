#include "worker/optim/step_optimizer.h"

#include <utility>

#include <absl/strings/str_cat.h>

#include "common/check.h"
#include "worker/optim/lr_schedule.h"

namespace ravel::optim {

StepOptimizer::StepOptimizer(Args args)
    : args_(std::move(args)),
      scales_loss_(args_.plan.options.weight_type == DType::kF16),
      norms_({.plan = args_.plan,
              .tree = args_.statistics.tree(),
              .groups = args_.groups,
              .rank = args_.rank,
              .memory = args_.memory}) {
  parts_.resize(args_.groups.size());
  if (scales_loss_) {
    loss_scale_ = FirstLossScale(args_.settings.loss_scale);
  }
  if (args_.host_updater != nullptr) {
    const plan::LaneMap& lanes = args_.plan.lanes;
    args_.host_updater->UseRule(*args_.rule,
                                lanes.lanes * lanes.micro_batches *
                                    args_.plan.micro_batch.sequences *
                                    args_.plan.micro_batch.sequence_tokens);
  }
}

void StepOptimizer::set_updates(int64_t updates) {
  CHECK_MSG(begun_.empty(), "a step is under way");
  updates_ = updates;
  updates_are_new_ = true;
}

void StepOptimizer::set_loss_scale(const LossScale& loss_scale) {
  CHECK_MSG(begun_.empty(), "a step is under way");
  CHECK_MSG(scales_loss_, "no loss is scaled");
  loss_scale_ = loss_scale;
  scale_is_new_ = true;
}

const float* StepOptimizer::device_loss_scale() const {
  return scales_loss_ && !args_.statistics.known_at_once() ? &args_.statistics.outcome().loss_scale
                                                           : nullptr;
}

kernels::LossScaleRule StepOptimizer::ScaleRule() const {
  if (!scales_loss_) {
    return {};
  }
  const plan::LossScaleSpec& spec = args_.settings.loss_scale;
  return {.growth_factor = spec.growth_factor,
          .backoff_factor = spec.backoff_factor,
          .minimum = spec.minimum,
          .maximum = spec.maximum,
          .growth_interval = spec.growth_interval};
}

double StepOptimizer::LearningRateOf(int64_t step) const {
  const UpdateSettings& settings = args_.settings;
  return LearningRate(settings.lr, settings.schedule, settings.steps, step);
}

kernels::StatisticsHeader StepOptimizer::MakeHeader() const {
  const ControlWord control = args_.control ? args_.control() : ControlWord{};
  return {.target_tokens = 0,
          .save_sequence = control.save_sequence,
          .stop = control.stop,
          .saving = control.saving,
          .learning_rate = LearningRateOf(step_)};
}

void StepOptimizer::BeginStep(kernels::Stream& stream,
                              int64_t step,
                              const TensorView& losses,
                              const TensorView& targets) {
  step_ = step;
  losses_ = losses;
  targets_ = targets;
  StepStatistics::Beginning beginning = {.header = [this] { return MakeHeader(); },
                                         .step = step + 1};
  if (norms_left_) {
    beginning.weight_nodes = norms_.weight_nodes();
    beginning.update_nodes = norms_.update_nodes();
  }
  if (updates_are_new_) {
    beginning.updates = updates_;
  }
  if (scales_loss_ && scale_is_new_) {
    beginning.loss_scale = loss_scale_;
  }
  args_.statistics.BeginStep(stream, beginning);
  if (args_.host_updater != nullptr) {
    args_.host_updater->BeginStep(
        step + 1,
        LearningRateOf(step),
        beginning.updates,
        beginning.loss_scale,
        NormsDue(step) ? HostUpdater::Updates::kDecided : HostUpdater::Updates::kAsEarlyAsTheyCan);
  }
  if (args_.offload != nullptr) {
    args_.offload->BeginStep(step + 1);
  }
  updates_are_new_ = false;
  scale_is_new_ = false;
  norms_left_ = NormsDue(step);
  begun_.push_back(step);
}

void StepOptimizer::AddMicroBatch(kernels::Stream& stream, int64_t turn) {
  if (plan::CountsLane(args_.plan, args_.rank) && plan::LaneOf(args_.plan, turn, args_.rank) >= 0) {
    args_.statistics.AddMicroBatch(stream, turn, losses_, targets_);
  }
}

shard::StatisticsMessages StepOptimizer::Measure(kernels::Stream& stream) {
  AddMicroBatch(stream, args_.plan.lanes.turns() - 1);
  return args_.statistics.Measure(stream);
}

absl::Status StepOptimizer::Decide(kernels::Stream& stream) {
  args_.statistics.Decide(stream, args_.settings.clip_norm, ScaleRule(), args_.rule->hyper());
  if (args_.host_updater != nullptr) {
    args_.host_updater->Decide(static_cast<kernels::CudaStream&>(stream),
                               args_.statistics.outcome());
  }
  if (!args_.statistics.known_at_once()) {
    return absl::OkStatus();
  }
  RETURN_IF_ERROR(ReadStep());
  return args_.offload == nullptr ? absl::OkStatus() : args_.offload->Decide(decision_.apply);
}

absl::Status StepOptimizer::ReadStep() {
  ASSIGN_OR_RETURN(const StepStatistics::Record record, args_.statistics.Read());
  const int64_t step = begun_.front();
  Follow(record);
  return facts_.other_scales < 0 ? absl::OkStatus()
                                 : absl::InternalError(absl::StrCat(
                                       "step ",
                                       step,
                                       ": rank ",
                                       facts_.other_scales,
                                       " has other scales of quantized weights than rank 0"));
}

void StepOptimizer::Follow(const StepStatistics::Record& record) {
  const int64_t step = begun_.front();
  begun_.pop_front();
  const NormTree& tree = args_.statistics.tree();
  facts_ = ReadMessages(args_.plan, tree, args_.statistics.norms(), record.messages);
  norms_.Combine(facts_.weight_nodes, facts_.update_nodes);
  facts_.totals.loss_scale = loss_scale_.scale;
  decision_ = DecideStep(facts_.totals, args_.settings.clip_norm);
  last_loss_scale_ = loss_scale_;
  // A batch without targets says nothing of the scale.
  if (scales_loss_ && facts_.totals.target_tokens > 0) {
    loss_scale_ = NextLossScale(args_.settings.loss_scale, loss_scale_, decision_.apply);
  }
  learning_rate_ = LearningRateOf(step);
  updates_ += decision_.apply ? 1 : 0;
  if (NormsDue(step)) {
    norms_.Begin(step + 1, facts_);
  }
  // One rule, the same numbers: anything else is a bug of ours.
  const kernels::StepOutcome& outcome = *record.outcome;
  CHECK_MSG(outcome.apply == (decision_.apply ? 1 : 0) && outcome.updates == updates_ &&
                outcome.step == step + 1 && outcome.target_tokens == facts_.totals.target_tokens &&
                outcome.non_finite == facts_.totals.non_finite &&
                (!scales_loss_ || (outcome.loss_scale == static_cast<float>(loss_scale_.scale) &&
                                   outcome.good_steps == loss_scale_.good_steps)) &&
                (!decision_.apply || (outcome.squared_norm == facts_.totals.squared_norm &&
                                      outcome.scalars.gradient_scale == decision_.gradient_scale)),
            "the kernel has decided otherwise");
}

void StepOptimizer::ApplyInParts(const shard::ParameterGroup& group,
                                 const std::function<void(kernels::PieceTable)>& update) {
  std::vector<OffloadChunk>& parts = parts_[group.index()];
  if (parts.empty()) {
    parts = CutForCaches(group, args_.pieces.of(group.index()), plan::kOffloadChunkElements);
  }
  for (const OffloadChunk& part : parts) {
    update({.pieces = part.pieces.data(), .count = std::ssize(part.pieces)});
  }
}

bool StepOptimizer::UpdateWeights(kernels::Stream& stream,
                                  const GroupUpdate& update,
                                  const QuantizedUpdate& quantized) const {
  const std::vector<quant::QuantPiece>& pieces = update.group.quant_pieces();
  const std::span<const kernels::UpdatePiece> weights = args_.pieces.weights(update.group.index());
  if (weights.size() != pieces.size()) {
    return false;
  }
  std::vector<kernels::WeightUpdateArgs> calls;
  for (size_t i = 0; i < pieces.size(); ++i) {
    calls.push_back(
        args_.rule->WeightUpdateOf(update, weights[i], pieces[i].main_weight.columns()));
    calls.back().target.codes = pieces[i].codes;
    if (!kernels::FitsWeightUpdate(calls.back())) {
      return false;
    }
  }
  for (size_t i = 0; i < pieces.size(); ++i) {
    calls[i].target = quantized.target(pieces[i]);
    kernels::WeightUpdate(stream, calls[i]);
  }
  return true;
}

absl::Status StepOptimizer::Apply(kernels::Stream& stream,
                                  const shard::ParameterGroup& group,
                                  const QuantizedUpdate& quantized) {
  const int64_t elements = group.shard_elements();
  const bool on_host = args_.statistics.known_at_once();
  const bool visits = quantized.visit != nullptr && (!on_host || decision_.apply);
  const auto operands = [&](kernels::PieceTable pieces) -> GroupUpdate {
    return {.group = group,
            .stored = group.StoredAt(0, elements),
            .gradient = VectorView(group.optimizer_gradient(), elements),
            .pieces = pieces,
            .outcome = args_.statistics.outcome()};
  };
  const auto update = [&](kernels::PieceTable pieces) {
    args_.rule->Update(stream, operands(pieces));
    if (visits && on_host) {
      VisitPiecesOf(group, pieces, quantized.visit);
    }
  };
  if (args_.offload != nullptr && args_.offload->Offloads(group.index())) {
    return args_.offload->Update(group.index(), update);
  }
  if (args_.host_updater != nullptr && args_.host_updater->Has(group.index())) {
    args_.host_updater->Update(group.index());
    return absl::OkStatus();
  }
  if (visits && on_host) {
    ApplyInParts(group, update);
    return absl::OkStatus();
  }
  const kernels::PieceTable pieces = args_.pieces.of(group.index());
  if (visits && UpdateWeights(stream, operands(pieces), quantized)) {
    return absl::OkStatus();
  }
  update(pieces);
  if (visits) {
    for (const quant::QuantPiece& piece : group.quant_pieces()) {
      quantized.visit(piece, 0, piece.main_weight.elements());
    }
  }
  return absl::OkStatus();
}

absl::Status StepOptimizer::ReadMainWeights(plan::GroupId group,
                                            std::span<const quant::QuantPiece> pieces,
                                            const VisitPieces& visit) {
  return args_.offload == nullptr ? StepActions::ReadMainWeights(group, pieces, visit)
                                  : args_.offload->ReadMainWeights(group, pieces, visit);
}

absl::Status StepOptimizer::UpdateGroup(kernels::Stream& stream,
                                        plan::GroupId group,
                                        const QuantizedUpdate& quantized) {
  const shard::ParameterGroup& owner = args_.groups[group];
  if (!NormsDue(step_)) {
    return Apply(stream, owner, quantized);
  }
  absl::Status applied;
  RETURN_IF_ERROR(norms_.Measure(owner, [&] { applied = Apply(stream, owner, quantized); }));
  return applied;
}

bool StepOptimizer::EncodesOnHost(plan::GroupId group) const {
  return args_.host_updater != nullptr && args_.host_updater->MakesCodes(group);
}

absl::Status StepOptimizer::MeasureHostWeights() {
  return args_.host_updater == nullptr ? absl::OkStatus() : args_.host_updater->MeasureWeights();
}

void StepOptimizer::AddHostAmaxes(kernels::Stream& stream, const TensorView& amaxes) {
  if (args_.host_updater != nullptr) {
    args_.host_updater->AddAmaxes(static_cast<kernels::CudaStream&>(stream), amaxes);
  }
}

void StepOptimizer::TakeScales(kernels::Stream& stream, const quant::QuantState& scales) {
  if (args_.host_updater != nullptr) {
    args_.host_updater->TakeScales(static_cast<kernels::CudaStream&>(stream), scales);
  }
}

void StepOptimizer::RefreshOnHost(plan::GroupId group) {
  args_.host_updater->Refresh(group);
}

void StepOptimizer::OffloadGradient(plan::GroupId group) {
  CHECK_MSG(args_.host_updater != nullptr, "nothing is updated on a device's host");
  args_.host_updater->AddGradient(group);
}

bool StepOptimizer::NormsDue(int64_t step) const {
  const int64_t every = args_.settings.norms_every;
  return every > 0 && (step + 1) % every == 0;
}

void StepOptimizer::UnpackNorms(std::span<const std::byte> all) {
  norms_.Unpack(all);
  norms_left_ = false;
}

}  // namespace ravel::optim
