#include "worker/optim/sharded_adamw.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "common/check.h"
#include "kernels/adamw.h"
#include "kernels/row_sum.h"
#include "worker/optim/lr_schedule.h"

namespace ravel::optim {
namespace {

template <typename T>
void Append(std::vector<std::byte>& bytes, const T* values, size_t count) {
  const auto* first = reinterpret_cast<const std::byte*>(values);
  bytes.insert(bytes.end(), first, first + count * sizeof(T));
}

}  // namespace

LaneLoss SumLaneLoss(const TensorView& losses, const TensorView& targets) {
  CHECK_EQ(losses.elements(), targets.elements());
  const float* loss = losses.As<float>();
  const int32_t* target = targets.As<int32_t>();
  LaneLoss lane;
  for (int64_t i = 0; i < losses.elements(); ++i) {
    if (target[i] >= 0) {
      lane.sum += static_cast<double>(loss[i]);
      ++lane.tokens;
    }
  }
  return lane;
}

double TreeOverLanes(const plan::LaneMap& lanes, const std::vector<std::vector<double>>& sums) {
  std::vector<double> by_lane(static_cast<size_t>(lanes.lanes), 0.0);
  for (int64_t turn = 0; turn < lanes.turns(); ++turn) {
    for (int64_t rank = 0; rank < lanes.ranks; ++rank) {
      const int64_t lane = lanes.LaneOf(turn, rank);
      if (lane >= 0) {
        by_lane[static_cast<size_t>(lane)] =
            sums[static_cast<size_t>(rank)][static_cast<size_t>(turn)];
      }
    }
  }
  return kernels::TreeSumDouble(by_lane.data(), lanes.lanes);
}

ShardedAdamW::ShardedAdamW(Args args)
    : args_(std::move(args)),
      tree_(args_.plan),
      nodes_(static_cast<size_t>(tree_.longest()), 0.0),
      lane_losses_(static_cast<size_t>(args_.plan.lanes.turns())) {}

void ShardedAdamW::BeginStep(int64_t step, const TensorView& losses, const TensorView& targets) {
  step_ = step;
  losses_ = losses;
  targets_ = targets;
  std::fill(lane_losses_.begin(), lane_losses_.end(), LaneLoss{});
  decision_ = {};
}

void ShardedAdamW::AddLane(int64_t turn) {
  if (args_.plan.lanes.LaneOf(turn, args_.rank) >= 0) {
    lane_losses_[static_cast<size_t>(turn)] = SumLaneLoss(losses_, targets_);
  }
}

void ShardedAdamW::MeasureGradients() {
  non_finite_ = 0;
  const std::vector<TreeNode>& nodes = tree_.nodes(args_.rank);
  size_t next = 0;
  for (shard::ParameterGroup& group : args_.groups) {
    group.JoinCalls(args_.stream);
    for (const plan::OwnedPiece& piece : group.pieces()) {
      const Shape& shape = args_.plan.inventory.tensors[static_cast<size_t>(piece.tensor)].shape;
      const int64_t columns = StatisticsRowElements(shape);
      const int64_t elements = piece.end - piece.begin;
      const int64_t rows = elements / columns;
      const int64_t rest = elements - rows * columns;  // the short last row of a vector
      row_sums_.resize(static_cast<size_t>(rows + 1));
      float* gradient = group.main_grad() + piece.shard_offset;
      kernels::RowSumSquares(args_.stream,
                             {.x = MatrixView(gradient, rows, columns),
                              .sums = VectorView(row_sums_.data(), rows),
                              .non_finite = &non_finite_});
      if (rest > 0) {
        kernels::RowSumSquares(args_.stream,
                               {.x = MatrixView(gradient + rows * columns, 1, rest),
                                .sums = VectorView(row_sums_.data() + rows, 1),
                                .non_finite = &non_finite_});
      }
      const int64_t all_rows = rows + (rest > 0 ? 1 : 0);
      wide_sums_.assign(row_sums_.begin(), row_sums_.begin() + all_rows);
      const int64_t first = piece.begin / columns;
      for (; next < nodes.size() && nodes[next].tensor == piece.tensor; ++next) {
        const int64_t begin = nodes[next].first_row() - first;
        CHECK(begin >= 0 && begin + nodes[next].rows() <= all_rows);
        nodes_[next] = kernels::TreeSumDouble(wide_sums_.data() + begin, nodes[next].rows());
      }
    }
  }
  CHECK_EQ(next, nodes.size());
}

int64_t ShardedAdamW::MessageBytes() const {
  return static_cast<int64_t>(sizeof(Header) +
                              sizeof(double) * (lane_losses_.size() + nodes_.size()));
}

std::vector<std::byte> ShardedAdamW::PackStatistics() {
  AddLane(args_.plan.lanes.turns() - 1);
  MeasureGradients();
  const ControlWord control = args_.control ? args_.control() : ControlWord{};
  Header header = {.non_finite = non_finite_,
                   .target_tokens = 0,
                   .save_sequence = control.save_sequence,
                   .stop = control.stop};
  std::vector<double> losses;
  for (const LaneLoss& lane : lane_losses_) {
    losses.push_back(lane.sum);
    header.target_tokens += lane.tokens;
  }
  std::vector<std::byte> mine;
  Append(mine, &header, 1);
  Append(mine, losses.data(), losses.size());
  Append(mine, nodes_.data(), nodes_.size());
  CHECK_EQ(static_cast<int64_t>(mine.size()), MessageBytes());
  return mine;
}

void ShardedAdamW::UnpackStatistics(std::span<const std::byte> all) {
  const auto stride = static_cast<size_t>(MessageBytes());
  totals_ = {};
  agreed_ = {};
  std::vector<std::vector<double>> losses;
  std::vector<std::vector<double>> values;
  for (size_t rank = 0; rank < static_cast<size_t>(args_.plan.ranks); ++rank) {
    const std::byte* message = all.data() + rank * stride;
    Header header;
    std::memcpy(&header, message, sizeof(header));
    totals_.non_finite += header.non_finite;
    totals_.target_tokens += header.target_tokens;
    agreed_.save_sequence = std::max(agreed_.save_sequence, header.save_sequence);
    agreed_.stop = std::max(agreed_.stop, header.stop);
    message += sizeof(header);
    std::vector<double>& sums = losses.emplace_back(lane_losses_.size());
    std::memcpy(sums.data(), message, sums.size() * sizeof(double));
    message += sums.size() * sizeof(double);
    std::vector<double>& nodes = values.emplace_back(nodes_.size());
    std::memcpy(nodes.data(), message, nodes.size() * sizeof(double));
  }
  totals_.loss_sum = TreeOverLanes(args_.plan.lanes, losses);
  tensor_sums_ = tree_.Combine(std::vector<std::span<const double>>(values.begin(), values.end()));
  totals_.squared_norm = tree_.Total(tensor_sums_);
}

void ShardedAdamW::Decide() {
  decision_ = DecideStep(totals_, args_.spec.optimizer.clip_norm);
  learning_rate_ = LearningRate(args_.spec.optimizer, args_.spec.schedule, args_.spec.steps, step_);
  if (decision_.apply) {
    ++updates_;
  }
}

void ShardedAdamW::UpdateUnit(int unit) {
  if (!decision_.apply) {
    return;
  }
  const plan::OptimizerSpec& optimizer = args_.spec.optimizer;
  const auto scalars = [&](bool decay) {
    return kernels::MakeAdamWScalars({.beta1 = optimizer.beta1,
                                      .beta2 = optimizer.beta2,
                                      .epsilon = optimizer.eps,
                                      .weight_decay = decay ? optimizer.weight_decay : 0.0,
                                      .learning_rate = learning_rate_},
                                     updates_,
                                     decision_.gradient_scale);
  };
  const kernels::AdamWScalars with_decay = scalars(true);
  const kernels::AdamWScalars without_decay = scalars(false);
  const shard::ParameterGroup& group = args_.groups[static_cast<size_t>(unit)];
  for (const plan::OwnedPiece& piece : group.pieces()) {
    const int64_t at = piece.shard_offset;
    const int64_t elements = piece.end - piece.begin;
    const bool decay = args_.plan.inventory.tensors[static_cast<size_t>(piece.tensor)].decay;
    kernels::AdamWUpdate(args_.stream,
                         {.p = VectorView(group.main_weight() + at, elements),
                          .g = VectorView(group.main_grad() + at, elements),
                          .m = VectorView(group.exp_avg() + at, elements),
                          .v = VectorView(group.exp_avg_sq() + at, elements),
                          .scalars = decay ? with_decay : without_decay});
  }
}

}  // namespace ravel::optim
