#pragma once

// A run's needs beyond its plan: data, hyperparameters, how long and how closely it is watched.
// The plan's decisions (types, lanes, batch, wire) are read from the plan alone.

#include <cstdint>

#include "common/model/job_spec.h"
#include "worker/data/batch_loader.h"
#include "worker/optim/update_settings.h"

namespace ravel::trainer {

struct RunSettings {
  data::TokenSources data;
  double init_std = 0.02;  // of random weights
  // Keys all random numbers of the run: weights, order of samples, rounding.
  uint64_t seed = 0;
  int64_t evaluation_batches = 0;
  bool exact = true;               // equal calls give equal bits
  bool localise = false;           // a skipped step is replayed (RankEngine::Localise)
  plan::OffloadSpec offload = {};  // where to, and how; what is in the plan
  optim::UpdateSettings update;
};
RunSettings SettingsOf(const plan::JobSpec& spec);

}  // namespace ravel::trainer
