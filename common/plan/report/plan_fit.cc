// Decides whether a plan fits, and plans the job again with each change that saves memory: first
// those that keep the numbers, then those that round. Costs a whole plan per change, so each kind
// ends at the first change that fits, or that no longer helps.

#include "common/plan/report/plan_fit.h"

#include <algorithm>
#include <bit>
#include <utility>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_format.h>

#include "common/plan/layout/strategy_table.h"
#include "common/plan/program/program_offload.h"
#include "common/plan/report/plan_printer.h"
#include "common/plan/report/plan_report.h"

namespace ravel::plan {
namespace {

constexpr int64_t kMostDevices = 4096;

// A request and what was changed to get to it.
struct Changed {
  std::string change;
  PlanRequest request;
};

void SetRanks(int64_t ranks, PlanRequest& request) {
  request.ranks = ranks;
  request.spec.device_count = ranks;
  request.spec.elastic.sizes = {ranks};
}

// Memory of one rank.
struct Limits {
  int64_t needed_bytes = 0;  // without a change
  int64_t usable_bytes = 0;
};

Remedy Try(const Changed& changed, const Limits& limits) {
  Remedy remedy = {.change = changed.change, .status = absl::OkStatus()};
  const absl::StatusOr<ShardingPlan> plan = BuildFittingPlan(changed.request);
  remedy.status = plan.status();
  if (plan.ok()) {
    remedy.peak_bytes = PeakBytes(*plan);
    remedy.saved_bytes = limits.needed_bytes - remedy.peak_bytes;
    remedy.fits = remedy.peak_bytes <= limits.usable_bytes;
  }
  return remedy;
}

// The number forms of a job that may be narrower; what is narrow already stays.
struct Narrow {
  bool compute = false;
  bool main_weights = false;
  StateTypes moments = kF32States;
};

// Adds the job with these forms, unless it has them.
void AddNarrow(const PlanRequest& request, const Narrow& narrow, std::vector<Changed>& made) {
  Changed changed = {"", request};
  JobSpec& spec = changed.request.spec;
  const auto set = [&](bool asked, auto& field, auto value, const char* change) {
    if (asked && field != value) {
      field = value;
      absl::StrAppend(&changed.change, changed.change.empty() ? "" : ", ", change);
    }
  };
  set(narrow.compute, spec.compute, ComputeType::kBF16, "precision.compute: bf16");
  set(narrow.main_weights,
      spec.optimizer.main_weights,
      MainWeightForm::kBF16Remainder,
      "training.optimizer.mainWeights: bf16_remainder");
  const std::string moments =
      absl::StrCat("training.optimizer.stateDtype: ", StateTypesText(narrow.moments));
  set(narrow.moments != kF32States && HasChosenType(spec.optimizer.kind),
      spec.optimizer.state_types,
      narrow.moments,
      moments.c_str());
  const bool known = std::any_of(made.begin(), made.end(), [&](const Changed& other) {
    return other.change == changed.change;
  });
  if (!changed.change.empty() && !known) {
    made.push_back(std::move(changed));
  }
}

// A bf16 model weight and the 16 bits that it lacks of the fp32 main weight.
std::vector<Changed> Remainders(const PlanRequest& request) {
  std::vector<Changed> made;
  if (request.spec.compute == ComputeType::kBF16) {
    AddNarrow(request, {.main_weights = true}, made);
  }
  return made;
}

// Ascending in what they round.
std::vector<Changed> NarrowerForms(const PlanRequest& request) {
  std::vector<Changed> made;
  if (request.spec.compute == ComputeType::kF16) {
    if (request.spec.optimizer.state_types == kF32States) {
      AddNarrow(request, {.moments = kBf16States}, made);
    }
    AddNarrow(request, {.moments = kFp8States}, made);
  } else if (request.spec.compute == ComputeType::kBF16) {
    if (request.spec.optimizer.state_types == kF32States) {
      AddNarrow(request, {.moments = kBf16States}, made);
      AddNarrow(request, {.main_weights = true, .moments = kBf16States}, made);
    }
    AddNarrow(request, {.main_weights = true, .moments = kFp8States}, made);
  } else {
    AddNarrow(request, {.compute = true}, made);
    AddNarrow(request, {.compute = true, .main_weights = true}, made);
    AddNarrow(request, {.compute = true, .main_weights = true, .moments = kBf16States}, made);
    AddNarrow(request, {.compute = true, .main_weights = true, .moments = kFp8States}, made);
  }
  return made;
}

std::vector<Changed> WiderShards(const PlanRequest& request) {
  std::vector<Changed> made;
  for (int64_t replicas = request.spec.replicas / 2; replicas >= 1; replicas /= 2) {
    Changed changed = {absl::StrCat("parallelism.replicas: ", replicas), request};
    changed.request.spec.replicas = replicas;
    made.push_back(std::move(changed));
  }
  return made;
}

// Lanes stay as many as they are, or become as many as devices.
std::vector<Changed> MoreDevices(const PlanRequest& request) {
  std::vector<Changed> made;
  for (int64_t ranks = request.ranks * 2; ranks <= kMostDevices; ranks *= 2) {
    Changed changed = {absl::StrCat("devices.count: ", ranks), request};
    SetRanks(ranks, changed.request);
    const auto lanes = static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(ranks)));
    JobSpec& spec = changed.request.spec;
    if (spec.virtual_ranks > 0 && lanes > spec.virtual_ranks) {
      absl::StrAppend(&changed.change, ", determinism.virtualRanks: ", lanes);
      spec.virtual_ranks = lanes;
      const int64_t per_lane = spec.global_batch / lanes;
      spec.micro_batch = std::min(spec.micro_batch, per_lane);
    }
    made.push_back(std::move(changed));
  }
  return made;
}

// Proposes, for jobs whose units have their own strategies, one for all, which shards more than
// that of some.
void AddOneStrategy(const PlanRequest& request, std::vector<Changed>& made) {
  const std::vector<UnitStrategy>& units = request.spec.units;
  const auto least = std::min_element(
      units.begin(), units.end(), [](const UnitStrategy& a, const UnitStrategy& b) {
        return a.strategy < b.strategy;
      });
  for (const AxisStrategyRow& row : AxisStrategyRows()) {
    if (least != units.end() && row.strategy > least->strategy &&
        row.strategy >= request.spec.strategy) {
      Changed changed = {
          absl::StrCat("parallelism.strategy: ", std::string(row.name), " without units"), request};
      changed.request.spec.strategy = row.strategy;
      changed.request.spec.units.clear();
      made.push_back(std::move(changed));
    }
  }
}

std::vector<Changed> HigherStrategies(const PlanRequest& request) {
  std::vector<Changed> made;
  for (const AxisStrategyRow& row : AxisStrategyRows()) {
    if (row.strategy > request.spec.strategy) {
      Changed changed = {absl::StrCat("parallelism.strategy: ", std::string(row.name)), request};
      changed.request.spec.strategy = row.strategy;
      made.push_back(std::move(changed));
    }
  }
  AddOneStrategy(request, made);
  if (request.spec.replicas > 1 && request.spec.replicate_strategy == Strategy::kNoShard) {
    Changed changed = {"parallelism.replicateStrategy: optim", request};
    changed.request.spec.replicate_strategy = Strategy::kOptim;
    made.push_back(std::move(changed));
  }
  return made;
}

std::vector<Changed> MoreRecompute(const PlanRequest& request) {
  constexpr std::pair<RecomputePolicy, const char*> kPolicies[] = {
      {RecomputePolicy::kNorm, "norm"},
      {RecomputePolicy::kMlp, "mlp"},
      {RecomputePolicy::kBlock, "block"}};
  std::vector<Changed> made;
  for (const auto& [policy, name] : kPolicies) {
    if (policy > request.spec.recompute) {
      Changed changed = {absl::StrCat("parallelism.recompute: ", name), request};
      changed.request.spec.recompute = policy;
      made.push_back(std::move(changed));
    }
  }
  return made;
}

// Divisors, each at most half of the one before.
std::vector<Changed> SmallerMicroBatches(const PlanRequest& request) {
  std::vector<Changed> made;
  const int64_t now = request.spec.micro_batch;
  int64_t last = now;
  for (int64_t size = now / 2; size >= 1; --size) {
    if (now % size == 0 && size <= last / 2) {
      Changed changed = {absl::StrCat("training.microBatch: ", size), request};
      changed.request.spec.micro_batch = size;
      made.push_back(std::move(changed));
      last = size;
    }
  }
  return made;
}

// More lanes of fewer sequences: no gradient of a lane is kept between its micro-batches.
std::vector<Changed> MoreLanes(const PlanRequest& request) {
  std::vector<Changed> made;
  const int64_t per_lane = request.spec.global_batch / request.spec.virtual_ranks;
  for (int64_t times = 2; per_lane % times == 0; times *= 2) {
    const int64_t lanes = request.spec.virtual_ranks * times;
    Changed changed = {absl::StrCat("determinism.virtualRanks: ", lanes), request};
    changed.request.spec.virtual_ranks = lanes;
    changed.request.spec.micro_batch = std::min(request.spec.micro_batch, per_lane / times);
    made.push_back(std::move(changed));
  }
  return made;
}

// One unit at a time: a cap below every unit lets one be alive alone.
std::vector<Changed> SmallerWindows(const PlanRequest& request) {
  if (request.spec.gather_window_bytes == 1 && request.spec.staging_window_bytes == 1) {
    return {};
  }
  Changed changed = {"parallelism.gatherWindow and stagingWindow: 1B (one unit at a time)",
                     request};
  changed.request.spec.gather_window_bytes = 1;
  changed.request.spec.staging_window_bytes = 1;
  return {changed};
}

// State of the optimizer on a disk, whose folder the job must name, or in memory of the host.
std::vector<Changed> MoreOffload(const PlanRequest& request) {
  std::vector<Changed> made;
  for (const double fraction : {0.5, 1.0}) {
    if (!request.spec.optimizer.offload.automatic &&
        fraction > request.spec.optimizer.offload.fraction) {
      Changed changed = {absl::StrCat("training.optimizer.offload.fraction: ", fraction), request};
      if (request.spec.cpu_devices && request.spec.optimizer.offload.path.empty()) {
        absl::StrAppend(&changed.change, ", with offload.path");
      }
      changed.request.spec.optimizer.offload.fraction = fraction;
      made.push_back(std::move(changed));
    }
  }
  return made;
}

using Changes = std::vector<Changed> (*)(const PlanRequest&);

// The changes of one kind until one fits; `until_flat`: or until they no longer help.
void TryEach(const std::vector<Changed>& changes,
             bool until_flat,
             const Limits& limits,
             std::vector<Remedy>& tried) {
  int64_t last = 0;
  for (const Changed& changed : changes) {
    tried.push_back(Try(changed, limits));
    const Remedy& remedy = tried.back();
    const bool flat = last > 0 && (!remedy.status.ok() || remedy.peak_bytes > last / 100 * 99);
    if (remedy.fits || (until_flat && flat)) {
      return;
    }
    last = remedy.status.ok() ? remedy.peak_bytes : last;
  }
}

bool AnyFits(const std::vector<Remedy>& tried) {
  return std::any_of(tried.begin(), tried.end(), [](const Remedy& remedy) { return remedy.fits; });
}

bool Tried(const std::vector<Remedy>& tried, const std::string& change) {
  return std::any_of(
      tried.begin(), tried.end(), [&](const Remedy& remedy) { return remedy.change == change; });
}

// The strongest change of each kind on top of those before, where it helps there, until all fit;
// what costs no devices first.
void TryTogether(const PlanRequest& base, const Limits& limits, std::vector<Remedy>& tried) {
  Changed all = {"", base};
  int64_t saved_bytes = 0;
  const auto on_top = [&](Changed next) {
    next.change = absl::StrCat(all.change, all.change.empty() ? "" : "; ", next.change);
    return next;
  };
  constexpr Changes kTogether[] = {Remainders,
                                   HigherStrategies,
                                   MoreRecompute,
                                   SmallerMicroBatches,
                                   MoreLanes,
                                   SmallerWindows,
                                   MoreOffload,
                                   WiderShards,
                                   NarrowerForms};
  for (const Changes changes : kTogether) {
    const std::vector<Changed> made = changes(all.request);
    if (AnyFits(tried) || made.empty()) {
      continue;
    }
    Changed next = on_top(made.back());
    Remedy remedy = Try(next, limits);
    if (remedy.status.ok() && remedy.saved_bytes > saved_bytes) {
      saved_bytes = remedy.saved_bytes;
      all = std::move(next);
      if (!Tried(tried, all.change)) {  // alone
        tried.push_back(std::move(remedy));
      }
    }
  }
  std::vector<Changed> devices;
  std::vector<Changed> more = MoreDevices(all.request);
  for (Changed& changed : more) {
    devices.push_back(on_top(std::move(changed)));
  }
  if (!AnyFits(tried)) {
    TryEach(devices, true, limits, tried);
  }
}

}  // namespace

// Halves the bytes between what does not fit and what does. Two budgets by which the same groups
// leave are one plan, so it ends after about log2 of the different choices, not of the bytes.
absl::StatusOr<ShardingPlan> BuildFittingPlan(const PlanRequest& request) {
  const OffloadSpec& offload = request.spec.optimizer.offload;
  if (!offload.automatic) {
    return BuildShardingPlan(request);
  }
  PlanRequest changed = request;
  const auto plan_with = [&](double fraction) {
    changed.spec.optimizer.offload.fraction = fraction;
    return BuildShardingPlan(changed);
  };
  const auto fits = [&](const ShardingPlan& plan) {
    return offload.device_bytes == 0 || PeakBytes(plan) <= offload.device_bytes;
  };
  ASSIGN_OR_RETURN(ShardingPlan best, plan_with(0));
  const OffloadSizes sizes = OffloadSizesOf(best.buffers, best.groups, best.options);
  if (fits(best) || sizes.total == 0) {
    return best;
  }
  ASSIGN_OR_RETURN(best, plan_with(1));
  int64_t low = 0;                              // does not fit
  int64_t high = fits(best) ? sizes.total : 0;  // fits: `best`
  while (low + 1 < high) {
    const int64_t middle = low + (high - low) / 2;
    const int64_t leaving = sizes.BytesWithin(middle);
    if (leaving > low) {
      ASSIGN_OR_RETURN(ShardingPlan plan, plan_with(sizes.FractionOf(leaving)));
      if (fits(plan)) {
        best = std::move(plan);
        high = leaving;
        continue;
      }
    }
    low = middle;
  }
  return best;
}

std::vector<Remedy> TryRemedies(const PlanRequest& request, int64_t usable_bytes) {
  PlanRequest base = request;
  const absl::StatusOr<JobSpec> resolved = ResolveBatch(request.spec);
  if (resolved.ok()) {
    base.spec = *resolved;
  }
  Limits limits = {.usable_bytes = usable_bytes};
  const absl::StatusOr<ShardingPlan> unchanged = BuildFittingPlan(base);
  if (unchanged.ok()) {
    limits.needed_bytes = PeakBytes(*unchanged);
  }
  std::vector<Remedy> tried;
  TryEach(Remainders(base), false, limits, tried);
  TryEach(WiderShards(base), false, limits, tried);
  TryEach(MoreDevices(base), true, limits, tried);
  TryEach(HigherStrategies(base), false, limits, tried);
  TryEach(MoreRecompute(base), false, limits, tried);
  TryEach(SmallerMicroBatches(base), false, limits, tried);
  TryEach(MoreLanes(base), false, limits, tried);
  TryEach(SmallerWindows(base), false, limits, tried);
  TryEach(MoreOffload(base), false, limits, tried);
  TryEach(NarrowerForms(base), false, limits, tried);
  if (!AnyFits(tried)) {
    TryTogether(base, limits, tried);
  }
  return tried;
}

absl::Status DoesNotFit(const ShardingPlan& plan,
                        int64_t usable_bytes,
                        const std::vector<Remedy>& remedies) {
  const MemoryReport report = ReportMemory(plan);
  const auto largest = std::max_element(
      report.lines.begin(),
      report.lines.end(),
      [](const MemoryReport::Line& a, const MemoryReport::Line& b) { return a.bytes < b.bytes; });
  std::string text = absl::StrCat("does not fit: needs ",
                                  BytesText(report.total_bytes),
                                  " of ",
                                  BytesText(usable_bytes),
                                  " at size ",
                                  plan.ranks,
                                  "; most of it is ",
                                  largest->what,
                                  ", ",
                                  BytesText(largest->bytes));
  const char* separator = "; fits with ";
  for (const Remedy& remedy : remedies) {
    if (remedy.fits) {
      absl::StrAppend(&text,
                      separator,
                      remedy.change,
                      " (",
                      BytesText(remedy.peak_bytes),
                      ", ",
                      BytesText(remedy.saved_bytes),
                      " less)");
      separator = ", or ";
    }
  }
  if (!AnyFits(remedies)) {
    absl::StrAppend(&text, "; none of ", remedies.size(), " changes that were planned fits");
  }
  return absl::FailedPreconditionError(text);
}

}  // namespace ravel::plan
