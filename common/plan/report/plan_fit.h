#pragma once

// Decides whether a plan fits its devices, and finds what would make it fit.

#include <cstdint>
#include <string>
#include <vector>

#include "common/plan/sharding_plan.h"

namespace ravel::plan {

// Plans a job. Where its offload is automatic, with the least fraction with which a rank fits
// OffloadSpec::device_bytes, with everything offloaded where none does, and with nothing where they
// are not known. Takes for granted that a rank never needs more memory where more leaves. The same
// request gives the same plan everywhere.
absl::StatusOr<ShardingPlan> BuildFittingPlan(const PlanRequest& request);

// One change of the job that was planned.
struct Remedy {
  std::string change;       // "parallelism.recompute: block"
  absl::Status status;      // why it cannot be planned, or OK
  int64_t peak_bytes = 0;   // per rank, where it can
  int64_t saved_bytes = 0;  // of the peak without the change; negative where it takes more
  bool fits = false;
};

// Plans every remedy, in the order in which they should be considered: main weights in another form
// (the same bits), a wider shard axis (fewer replicas), more devices, a strategy that shards more,
// recompute, a smaller micro-batch, more lanes, smaller windows, state on a disk (of hosts), and
// what rounds: bf16 moments, bf16 weights and activations; and, where none of them fits alone, all
// of them together, one added after the other. `request` itself can be planned. Costs one plan per
// remedy.
std::vector<Remedy> TryRemedies(const PlanRequest& request, int64_t usable_bytes);

// The refusal: what is needed, the largest category, and the remedies that fit, in their order,
// each with its peak and what it saves.
absl::Status DoesNotFit(const ShardingPlan& plan,
                        int64_t usable_bytes,
                        const std::vector<Remedy>& remedies);

}  // namespace ravel::plan
