#include "worker/optim/host_statistics.h"

#include <algorithm>
#include <cstring>

#include "common/signed_size.h"

namespace ravel::optim {

HostStatistics::HostStatistics(const Args& args) : StepStatistics(args) {
  memory_.assign(Size(Place(nullptr)), std::byte{0});
  Place(memory_.data());
  std::copy(tables().nodes.begin(), tables().nodes.end(), nodes_);
  std::copy(tables().sums.steps.begin(), tables().sums.steps.end(), steps_);
  std::copy(tables().sums.level_ends.begin(), tables().sums.level_ends.end(), level_ends_);
  *outcome_ = {};
}

void HostStatistics::BeginStep(kernels::Stream&, const Beginning& beginning) {
  header_ = beginning.header;
  std::fill_n(message_, nodes_word(), 0);
  auto* lists = reinterpret_cast<double*>(message_ + nodes_word() + longest());
  std::copy(beginning.weight_nodes.begin(), beginning.weight_nodes.end(), lists);
  std::copy(beginning.update_nodes.begin(), beginning.update_nodes.end(), lists + longest());
  outcome_->step = beginning.step;
  outcome_->updates = beginning.updates.value_or(outcome_->updates);
  if (beginning.loss_scale.has_value()) {
    outcome_->loss_scale = static_cast<float>(beginning.loss_scale->scale);
    outcome_->good_steps = beginning.loss_scale->good_steps;
  }
}

shard::StatisticsMessages HostStatistics::Measure(kernels::Stream& stream) {
  kernels::StatisticsHeader header = header_();
  header.target_tokens = message_[0];
  std::memcpy(message_, &header, sizeof(header));
  return StepStatistics::Measure(stream);
}

absl::StatusOr<StepStatistics::Record> HostStatistics::Read() {
  return Record{.messages = {reinterpret_cast<const std::byte*>(gathered_), Size(gathered_bytes())},
                .outcome = outcome_};
}

void HostStatistics::BeginEvaluation(kernels::Stream&) {
  std::fill_n(evaluation_, args_.plan.lanes.turns(), LaneLoss{});
}

}  // namespace ravel::optim
