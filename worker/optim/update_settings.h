#pragma once

#include <cstdint>

#include "common/model/job_spec.h"

namespace ravel::optim {

// Hyperparameters of updates, as the fields of OptimizerSpec with these names; the optimizer itself
// is the plan's.
struct UpdateSettings {
  double lr = 0;
  double beta1 = 0.9;
  double beta2 = 0.95;
  double eps = 1e-8;
  double weight_decay = 0.1;
  double clip_norm = 1.0;          // 0: off
  plan::LossScaleSpec loss_scale;  // of a plan in fp16
  plan::ScheduleSpec schedule;
  int64_t steps = 0;        // of the whole run
  int64_t norms_every = 0;  // per-tensor norms every so many steps; 0: never
};

}  // namespace ravel::optim
