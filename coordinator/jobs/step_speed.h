#pragma once

// The pure calculations behind the speed metrics of a job.

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "common/model/job_spec.h"

namespace ravel::coordinator {

// Counts step times in fixed buckets that reach from small models on CPUs to steps of minutes.
// Thread-compatible.
struct StepSeconds {
  static constexpr std::array<double, 21> kBounds = {
      0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3, 5, 7, 10, 15, 20, 30, 60, 120, 300};
  // Number of steps up to each bound and above the one before; the last: above all bounds.
  std::array<int64_t, kBounds.size() + 1> counts = {};
  double sum = 0;

  // A negative time, or NaN, counts as 0.
  void Add(double seconds);
};

// The factors that turn tokens per second into FLOP/s and MFU. They hold for one epoch of a job.
struct SpeedScale {
  int64_t epoch = -1;          // the epoch they were computed for; -1: not computed yet
  double flops_per_token = 0;  // plan::TrainingFlopsPerToken; 0: some tensors are not trained
  double peak_flops = 0;       // dense bf16 peak per device; 0: not known, or devices differ
};

// `models`: the device name of each rank, as its node reports it. A call builds an inventory of the
// model, so callers keep the result for the epoch.
SpeedScale SpeedScaleOf(const plan::JobSpec& spec,
                        int64_t epoch,
                        const std::vector<std::string>& models);

}  // namespace ravel::coordinator
