#include "coordinator/fleet/outbox.h"

#include <algorithm>
#include <cmath>

namespace ravel::coordinator {
namespace {

constexpr int64_t kLeastHorizonSteps = 1000;

}  // namespace

int64_t HorizonStep(int64_t step, double step_seconds, int64_t horizon_ms, int64_t last_step) {
  double steps = static_cast<double>(kLeastHorizonSteps);
  if (step_seconds > 0) {
    steps = std::max(steps, static_cast<double>(horizon_ms) / 1000 / step_seconds);
  }
  const double left = static_cast<double>(std::max<int64_t>(0, last_step - step));
  return step + static_cast<int64_t>(std::min(steps, left));
}

bool HorizonNeedsRenewal(int64_t step, int64_t granted_at, int64_t until_step, int64_t last_step) {
  return until_step < last_step && step - granted_at >= (until_step - granted_at) / 2;
}

std::vector<decltype(TrainerCommand::frame)> Missing(
    const Wanted& wanted, const std::map<std::string, CommRecordSet>& sets, const TrainerHas& has) {
  std::vector<decltype(TrainerCommand::frame)> frames;
  if (has.until_step < 0) {  // a rank that trains has met its peers
    for (const auto& [group, set] : sets) {
      if (std::find(has.groups.begin(), has.groups.end(), group) == has.groups.end()) {
        frames.emplace_back(set);
      }
    }
  }
  // The save first: a rank that begins with the last step allowed would otherwise pass it by.
  if (has.save_sequence < wanted.save_sequence || (wanted.then_stop && !has.then_stop)) {
    frames.emplace_back(SaveTrainer{wanted.save_sequence, wanted.then_stop});
  }
  if (has.until_step < wanted.until_step) {
    frames.emplace_back(RunTrainer{wanted.until_step, wanted.save_every_ms});
  }
  return frames;
}

}  // namespace ravel::coordinator
