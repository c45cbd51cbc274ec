#include "worker/optim/lr_schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "common/check.h"

namespace ravel::optim {
namespace {

// The decay of wsd takes this share of all steps.
constexpr double kWsdDecayShare = 0.2;

// Share of the steps after `first` that is done including `step`.
double Progress(int64_t first, int64_t steps, int64_t step) {
  return static_cast<double>(step + 1 - first) /
         static_cast<double>(std::max<int64_t>(1, steps - first));
}

double ShareOfPeak(const plan::ScheduleSpec& schedule, int64_t steps, int64_t step) {
  const double fall = 1.0 - schedule.min_ratio;
  switch (schedule.kind) {
    case plan::ScheduleKind::kConstant:
      return 1.0;
    case plan::ScheduleKind::kLinear:
      return 1.0 - fall * std::min(1.0, Progress(schedule.warmup_steps, steps, step));
    case plan::ScheduleKind::kCosine: {
      const double x = std::min(1.0, Progress(schedule.warmup_steps, steps, step));
      return schedule.min_ratio + fall * 0.5 * (1.0 + std::cos(std::numbers::pi * x));
    }
    case plan::ScheduleKind::kWsd: {
      const auto decay = static_cast<int64_t>(kWsdDecayShare * static_cast<double>(steps));
      const int64_t first = std::max(schedule.warmup_steps, steps - decay);
      return step < first ? 1.0 : 1.0 - fall * std::min(1.0, Progress(first, steps, step));
    }
  }
  CheckFailed(__FILE__, __LINE__, "schedule", "unknown kind");
}

}  // namespace

double LearningRate(double peak, const plan::ScheduleSpec& schedule, int64_t steps, int64_t step) {
  if (step < schedule.warmup_steps) {
    return peak * (static_cast<double>(step + 1) / static_cast<double>(schedule.warmup_steps));
  }
  return peak * ShareOfPeak(schedule, steps, step);
}

}  // namespace ravel::optim
