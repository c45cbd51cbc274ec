#include "worker/optim/sharded_adamw.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "common/check.h"
#include "common/plan/plan_pieces.h"
#include "common/signed_size.h"
#include "kernels/adamw.h"
#include "kernels/mixed_adamw.h"
#include "kernels/row_sum.h"
#include "kernels/step_statistics.h"
#include "worker/optim/lr_schedule.h"
#include "worker/optim/stored_state.h"

namespace ravel::optim {
namespace {

template <typename T>
void Append(std::vector<std::byte>& bytes, const T* values, size_t count) {
  const auto* first = reinterpret_cast<const std::byte*>(values);
  bytes.insert(bytes.end(), first, first + count * sizeof(T));
}

}  // namespace

void AddLosses(const TensorView& losses, const TensorView& targets, LaneLoss& lane) {
  kernels::CpuStream host;
  kernels::SumLoss(
      host, {.losses = losses, .targets = targets, .sum = &lane.sum, .tokens = &lane.tokens});
}

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

ShardedAdamW::ShardedAdamW(Args args)
    : args_(std::move(args)),
      tree_(args_.plan),
      gradient_nodes_(Size(tree_.longest()), 0.0),
      weight_nodes_(gradient_nodes_),
      update_nodes_(gradient_nodes_),
      non_finite_(args_.plan.inventory.tensors.size(), 0),
      lane_losses_(Size(args_.plan.lanes.turns())) {
  const std::vector<TreeNode>& nodes = tree_.nodes(args_.rank);
  size_t next = 0;
  for (const shard::ParameterGroup& group : args_.groups) {
    first_node_.push_back(next);
    for (const plan::OwnedPiece& piece : group.measured_pieces()) {
      while (next < nodes.size() && nodes[next].tensor == piece.tensor) {
        ++next;
      }
    }
  }
  CHECK_EQ(next, nodes.size());
}

void ShardedAdamW::set_updates(int64_t updates) {
  CHECK_MSG(begun_.empty(), "a step is under way");
  updates_ = updates;
  updates_are_new_ = true;
}

ShardedAdamW::Header ShardedAdamW::MakeHeader() const {
  const ControlWord control = args_.control ? args_.control() : ControlWord{};
  return {.target_tokens = 0,
          .save_sequence = control.save_sequence,
          .stop = control.stop,
          .saving = control.saving,
          .learning_rate =
              LearningRate(args_.spec.optimizer, args_.spec.schedule, args_.spec.steps, step_)};
}

void ShardedAdamW::BeginStep(kernels::Stream& stream,
                             int64_t step,
                             const TensorView& losses,
                             const TensorView& targets) {
  step_ = step;
  losses_ = losses;
  targets_ = targets;
  std::fill(lane_losses_.begin(), lane_losses_.end(), LaneLoss{});
  if (args_.device == nullptr) {
    decision_ = {};
    return;
  }
  DeviceStatistics::Beginning beginning = {.header = MakeHeader(), .step = step + 1};
  if (norms_left_) {
    beginning.weight_nodes = weight_nodes_;
    beginning.update_nodes = update_nodes_;
  }
  if (updates_are_new_) {
    beginning.updates = updates_;
  }
  args_.device->BeginStep(stream, beginning);
  updates_are_new_ = false;
  norms_left_ = NormsDue(step);
  begun_.push_back(step);
}

void ShardedAdamW::AddMicroBatch(kernels::Stream& stream, int64_t turn) {
  if (args_.plan.lanes.LaneOf(turn, args_.rank) < 0) {
    return;
  }
  if (args_.device != nullptr) {
    args_.device->AddMicroBatch(stream, turn, losses_, targets_);
  } else {
    AddLosses(losses_, targets_, At(lane_losses_, turn));
  }
}

void ShardedAdamW::EndStep(kernels::Stream& stream) {
  if (args_.device != nullptr) {
    args_.device->EndStep(stream);
  }
}

bool ShardedAdamW::NormsDue(int64_t step) const {
  const int64_t every = args_.spec.norms_every;
  return every > 0 && (step + 1) % every == 0;
}

void ShardedAdamW::MeasureGradients(kernels::Stream& stream) {
  std::fill(non_finite_.begin(), non_finite_.end(), 0);
  const std::vector<TreeNode>& nodes = tree_.nodes(args_.rank);
  size_t next = 0;
  for (const shard::ParameterGroup& group : args_.groups) {
    if (!group.measured_pieces().empty()) {
      next = MeasureNodes(stream,
                          {.inventory = args_.plan.inventory,
                           .pieces = group.measured_pieces(),
                           .base = group.reduced(0),
                           .nodes = nodes,
                           .out = gradient_nodes_,
                           .non_finite = &non_finite_},
                          next);
    }
  }
  CHECK_EQ(next, nodes.size());
}

size_t ShardedAdamW::MessageBytes() const {
  const size_t node_lists = pending_.has_value() ? 3 : 1;
  return sizeof(Header) + sizeof(int64_t) * non_finite_.size() +
         sizeof(double) * (lane_losses_.size() + node_lists * gradient_nodes_.size());
}

absl::StatusOr<std::vector<std::byte>> ShardedAdamW::PackStatistics(kernels::Stream& stream) {
  AddMicroBatch(stream, args_.plan.lanes.turns() - 1);
  MeasureGradients(stream);
  Header header = MakeHeader();
  std::vector<double> losses;
  for (const LaneLoss& lane : lane_losses_) {
    losses.push_back(lane.sum);
    header.target_tokens += lane.tokens;
  }
  std::vector<std::byte> mine;
  Append(mine, &header, 1);
  Append(mine, non_finite_.data(), non_finite_.size());
  Append(mine, losses.data(), losses.size());
  Append(mine, gradient_nodes_.data(), gradient_nodes_.size());
  if (pending_.has_value()) {
    Append(mine, weight_nodes_.data(), weight_nodes_.size());
    Append(mine, update_nodes_.data(), update_nodes_.size());
  }
  CHECK_EQ(mine.size(), MessageBytes());
  return mine;
}

void ShardedAdamW::UnpackStatistics(std::span<const std::byte> all) {
  Unpack(all, pending_.has_value());
}

shard::DeviceMessages ShardedAdamW::MeasureOnDevice(kernels::Stream& stream) {
  AddMicroBatch(stream, args_.plan.lanes.turns() - 1);
  args_.device->MeasureGradients(stream);
  return args_.device->messages();
}

void ShardedAdamW::DecideOnDevice(kernels::Stream& stream) {
  kernels::AdamWHyper hyper = HyperWith(args_.spec.optimizer.weight_decay);
  hyper.learning_rate = 0;  // the messages say
  args_.device->Decide(stream, args_.spec.optimizer.clip_norm, hyper);
}

absl::Status ShardedAdamW::ReadStep() {
  ASSIGN_OR_RETURN(const DeviceStatistics::Record record, args_.device->Read());
  const int64_t step = begun_.front();
  begun_.pop_front();
  Unpack(record.messages, args_.spec.norms_every > 0);
  FollowDecision(step);
  // One rule, the same numbers: anything else is a bug of ours.
  CHECK_MSG(record.outcome->apply == (decision_.apply ? 1 : 0) &&
                record.outcome->updates == updates_ && record.outcome->step == step + 1 &&
                record.outcome->target_tokens == totals_.target_tokens &&
                record.outcome->non_finite == totals_.non_finite &&
                (!decision_.apply ||
                 (record.outcome->squared_norm == totals_.squared_norm &&
                  record.outcome->with_decay.gradient_scale == decision_.gradient_scale)),
            "the device has decided otherwise");
  return absl::OkStatus();
}

void ShardedAdamW::Unpack(std::span<const std::byte> all, bool has_norms) {
  totals_ = {};
  agreed_ = {};
  tensor_non_finite_.assign(non_finite_.size(), 0);
  std::vector<std::vector<double>> losses;
  std::vector<std::vector<double>> gradients;
  std::vector<std::vector<double>> weights;
  std::vector<std::vector<double>> updates;
  const std::byte* message = all.data();
  const auto take = [&message](auto* values, size_t count) {
    std::memcpy(static_cast<void*>(values), message, count * sizeof(*values));
    message += count * sizeof(*values);
  };
  std::vector<int64_t> counts(non_finite_.size());
  for (int64_t rank = 0; rank < args_.plan.ranks; ++rank) {
    Header header;
    take(&header, 1);
    totals_.target_tokens += header.target_tokens;
    agreed_.save_sequence = std::max(agreed_.save_sequence, header.save_sequence);
    agreed_.stop = std::max(agreed_.stop, header.stop);
    agreed_.saving = std::max(agreed_.saving, header.saving);
    take(counts.data(), counts.size());
    for (size_t tensor = 0; tensor < counts.size(); ++tensor) {
      tensor_non_finite_[tensor] += counts[tensor];
      totals_.non_finite += counts[tensor];
    }
    take(losses.emplace_back(lane_losses_.size()).data(), lane_losses_.size());
    take(gradients.emplace_back(gradient_nodes_.size()).data(), gradient_nodes_.size());
    if (has_norms) {
      take(weights.emplace_back(weight_nodes_.size()).data(), weight_nodes_.size());
      take(updates.emplace_back(update_nodes_.size()).data(), update_nodes_.size());
    }
  }
  CHECK_EQ(message, all.data() + all.size());
  totals_.loss_sum = TreeOverLanes(args_.plan.lanes, losses);
  tensor_sums_ =
      tree_.Combine(std::vector<std::span<const double>>(gradients.begin(), gradients.end()));
  totals_.squared_norm = tree_.Total(tensor_sums_);
  if (pending_.has_value()) {
    CombineNorms(weights, updates);
  }
}

void ShardedAdamW::CombineNorms(const std::vector<std::vector<double>>& weights,
                                const std::vector<std::vector<double>>& updates) {
  const auto roots = [&](const std::vector<std::vector<double>>& values) {
    std::vector<double> norms =
        tree_.Combine(std::vector<std::span<const double>>(values.begin(), values.end()));
    for (double& norm : norms) {
      norm = std::sqrt(norm);
    }
    return norms;
  };
  norms_ = std::move(pending_);
  pending_.reset();
  norms_->weight = roots(weights);
  norms_->update = roots(updates);
}

std::vector<std::byte> ShardedAdamW::PackNorms() const {
  std::vector<std::byte> mine;
  Append(mine, weight_nodes_.data(), weight_nodes_.size());
  Append(mine, update_nodes_.data(), update_nodes_.size());
  return mine;
}

void ShardedAdamW::UnpackNorms(std::span<const std::byte> all) {
  CHECK(pending_.has_value());
  const size_t nodes = weight_nodes_.size();
  const size_t list_bytes = nodes * sizeof(double);
  CHECK_EQ(all.size(), Size(args_.plan.ranks) * 2 * list_bytes);
  std::vector<std::vector<double>> lists[2];
  for (size_t at = 0; at < all.size(); at += list_bytes) {
    std::vector<double>& list = lists[at / list_bytes % 2].emplace_back(nodes);
    std::memcpy(list.data(), all.data() + at, list_bytes);
  }
  CombineNorms(lists[0], lists[1]);
  norms_left_ = false;
}

std::optional<TensorNorms> ShardedAdamW::TakeNorms() {
  return std::exchange(norms_, std::nullopt);
}

void ShardedAdamW::Decide() {
  FollowDecision(step_);
}

void ShardedAdamW::FollowDecision(int64_t step) {
  decision_ = DecideStep(totals_, args_.spec.optimizer.clip_norm);
  learning_rate_ = LearningRate(args_.spec.optimizer, args_.spec.schedule, args_.spec.steps, step);
  if (decision_.apply) {
    ++updates_;
  }
  if (NormsDue(step)) {
    pending_ = TensorNorms{.step = step + 1, .gradient = {}, .weight = {}, .update = {}};
    for (const double sum : tensor_sums_) {
      pending_->gradient.push_back(
          std::sqrt(sum) / static_cast<double>(std::max<int64_t>(1, totals_.target_tokens)));
    }
  }
}

absl::Status ShardedAdamW::UpdateGroup(kernels::Stream& stream, plan::GroupId group) {
  const shard::ParameterGroup& owner = args_.groups[group];
  if (NormsDue(step_)) {
    return MeasuredUpdate(stream, owner);
  }
  AdamW(stream, owner);
  return absl::OkStatus();
}

absl::Status ShardedAdamW::MeasuredUpdate(kernels::Stream& stream,
                                          const shard::ParameterGroup& group) {
  // The same elements as the measured pieces, found in the stored weights.
  const std::vector<plan::OwnedPiece> pieces =
      plan::SavedPieces(args_.plan, group.index(), args_.rank);
  std::vector<float> change(Size(group.shard_elements()));
  std::vector<float> after(change.size());
  const auto read = [&](std::vector<float>& to) {
    return ReadStored(args_.memory,
                      group,
                      plan::StateRole::kParam,
                      0,
                      std::as_writable_bytes(std::span<float>(to)));
  };
  RETURN_IF_ERROR(read(change));
  kernels::CpuStream host;
  const auto measure = [&](const float* base, std::vector<double>& out) {
    MeasureNodes(host,
                 {.inventory = args_.plan.inventory,
                  .pieces = pieces,
                  .base = base,
                  .nodes = tree_.nodes(args_.rank),
                  .out = out},
                 first_node_[group.index()]);
  };
  measure(change.data(), weight_nodes_);
  AdamW(stream, group);
  RETURN_IF_ERROR(read(after));
  for (const plan::OwnedPiece& piece : pieces) {
    const size_t begin = Size(piece.shard_offset);
    for (size_t at = begin; at < begin + Size(piece.elements()); ++at) {
      change[at] = after[at] - change[at];
    }
  }
  measure(change.data(), update_nodes_);
  return absl::OkStatus();
}

kernels::AdamWHyper ShardedAdamW::HyperWith(double weight_decay) const {
  const plan::OptimizerSpec& optimizer = args_.spec.optimizer;
  return {.beta1 = optimizer.beta1,
          .beta2 = optimizer.beta2,
          .epsilon = optimizer.eps,
          .weight_decay = weight_decay,
          .learning_rate = learning_rate_};
}

void ShardedAdamW::AdamW(kernels::Stream& stream, const shard::ParameterGroup& group) {
  // What a device has decided, or what the host has.
  const kernels::StepOutcome* outcome = args_.device != nullptr ? args_.device->outcome() : nullptr;
  if (outcome == nullptr && !decision_.apply) {
    return;
  }
  kernels::AdamWScalars with_decay, without_decay;
  if (outcome == nullptr) {
    const auto scalars = [&](double weight_decay) {
      return kernels::MakeAdamWScalars(HyperWith(weight_decay), updates_, decision_.gradient_scale);
    };
    with_decay = scalars(args_.spec.optimizer.weight_decay);
    without_decay = scalars(0.0);
  }
  const auto update = [&](const plan::TensorSpec& tensor, const plan::OwnedRun& run) {
    const int64_t at = run.offset;
    const int64_t elements = run.elements;
    const bool decay = tensor.decay;
    const shard::ParameterGroup::Stored stored = group.StoredAt(at, elements);
    kernels::MixedAdamWArgs args = {.main_weight = stored.main_weight,
                                    .weight = stored.model_weight,
                                    .remainder = stored.remainder,
                                    .g = VectorView(group.optimizer_gradient() + at, elements),
                                    .m = stored.exp_avg,
                                    .v = stored.exp_avg_sq,
                                    .seed = args_.spec.seed,
                                    .site = tensor.site,
                                    .first_index = run.first,
                                    .scalars = decay ? with_decay : without_decay};
    if (outcome == nullptr) {
      args.step = static_cast<uint32_t>(step_ + 1);
    } else {
      // In memory, so that the call is the same in every step, as graphs want it.
      args.device_step = &outcome->step;
      args.device_scalars = decay ? &outcome->with_decay : &outcome->without_decay;
      args.apply = &outcome->apply;
    }
    if (group.rounds_weights()) {
      kernels::MixedAdamWUpdate(stream, args);
      return;
    }
    kernels::AdamWUpdate(stream,
                         {.p = args.main_weight,
                          .g = args.g,
                          .m = args.m,
                          .v = args.v,
                          .scalars = args.scalars,
                          .device_scalars = args.device_scalars,
                          .apply = args.apply});
  };
  for (const plan::OwnedPiece& piece : group.pieces()) {
    const plan::TensorSpec& tensor = args_.plan.inventory.tensors[piece.tensor];
    piece.VisitRuns(tensor.shape, [&](const plan::OwnedRun& run) { update(tensor, run); });
  }
}

}  // namespace ravel::optim
