#include "worker/optim/tensor_norms.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "common/check.h"
#include "common/plan/plan_pieces.h"
#include "common/signed_size.h"
#include "worker/optim/stored_state.h"

namespace ravel::optim {

NormRecorder::NormRecorder(const Args& args)
    : args_(args), weight_nodes_(Size(args.tree.longest()), 0.0), update_nodes_(weight_nodes_) {
  const std::vector<TreeNode>& nodes = args_.tree.nodes(args_.rank);
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

absl::Status NormRecorder::Measure(const shard::ParameterGroup& group,
                                   const std::function<void()>& update) {
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
  kernels::CpuStream host;
  const auto measure = [&](const float* base, std::vector<double>& out) {
    MeasureNodes(host,
                 {.inventory = args_.plan.inventory,
                  .pieces = pieces,
                  .base = base,
                  .nodes = args_.tree.nodes(args_.rank),
                  .out = out},
                 first_node_[group.index()]);
  };
  RETURN_IF_ERROR(read(change));
  measure(change.data(), weight_nodes_);
  update();
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

void NormRecorder::Begin(int64_t step, const StepFacts& facts) {
  pending_ = TensorNorms{.step = step, .gradient = {}, .weight = {}, .update = {}};
  const double denominator = static_cast<double>(std::max<int64_t>(1, facts.totals.target_tokens)) *
                             facts.totals.loss_scale;
  for (const double sum : facts.tensor_sums) {
    pending_->gradient.push_back(std::sqrt(sum) / denominator);
  }
}

void NormRecorder::Combine(const RankNodes& weights, const RankNodes& updates) {
  if (!pending_.has_value()) {
    return;
  }
  const auto roots = [&](const RankNodes& values) {
    std::vector<double> norms = args_.tree.Combine({values.begin(), values.end()});
    for (double& norm : norms) {
      norm = std::sqrt(norm);
    }
    return norms;
  };
  complete_ = std::exchange(pending_, std::nullopt);
  complete_->weight = roots(weights);
  complete_->update = roots(updates);
}

std::vector<std::byte> NormRecorder::Pack() const {
  std::vector<std::byte> mine;
  for (const std::vector<double>* nodes : {&weight_nodes_, &update_nodes_}) {
    const auto bytes = std::as_bytes(std::span<const double>(*nodes));
    mine.insert(mine.end(), bytes.begin(), bytes.end());
  }
  return mine;
}

void NormRecorder::Unpack(std::span<const std::byte> all) {
  CHECK(pending_.has_value());
  const size_t nodes = weight_nodes_.size();
  const size_t list_bytes = nodes * sizeof(double);
  CHECK_EQ(all.size(), Size(args_.plan.ranks) * 2 * list_bytes);
  RankNodes lists[2];
  for (size_t at = 0; at < all.size(); at += list_bytes) {
    std::vector<double>& list = lists[at / list_bytes % 2].emplace_back(nodes);
    std::memcpy(list.data(), all.data() + at, list_bytes);
  }
  Combine(lists[0], lists[1]);
}

std::optional<TensorNorms> NormRecorder::Take() {
  return std::exchange(complete_, std::nullopt);
}

}  // namespace ravel::optim
