#pragma once

#include <cstdint>

#include "common/model/job_spec.h"

namespace ravel::optim {

// Learning rate of step `step` (0-based) of `steps`: a pure function, so that a restart needs no
// state. Warm-up rises linearly and reaches the peak in step warmup_steps - 1; then, with r =
// min_ratio and x = the share of the remaining steps that is done including this one: constant 1;
// linear 1 - (1-r)x; cosine r + (1-r)(1 + cos(pi x))/2; wsd stays at 1 until the last fifth of all
// steps, in which it falls linearly to r. The last step has the final rate.
double LearningRate(double peak, const plan::ScheduleSpec& schedule, int64_t steps, int64_t step);

}  // namespace ravel::optim
