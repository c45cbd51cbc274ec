#pragma once

// The strategies, widths, micro-batches, recompute policies and windows that must all give the same
// bits.

#include <cstdint>
#include <string>
#include <vector>

#include "common/plan/sharding_plan.h"
#include "tests/testing/training_cases.h"

namespace ravel::trainer {

inline constexpr int64_t kMatrixLanes = 16;

struct NamedStrategy {
  std::string name;  // "ZeRO2", "HSDP"
  plan::Strategy shard = plan::Strategy::kOptimGradsParams;
  plan::Strategy replicate = plan::Strategy::kNoShard;
  int64_t replicas = 1;
};
// ZeRO0 .. ZeRO3, HSDP and HFSDP with two replicas.
std::vector<NamedStrategy> MatrixStrategies();
NamedStrategy StrategyNamed(const std::string& name);

struct StrategyCase {
  std::string strategy = "ZeRO3";
  int64_t width = 1;
  int64_t micro_batches = 1;  // of each lane
  plan::RecomputePolicy recompute = plan::RecomputePolicy::kNone;
  bool small_windows = false;  // one unit at a time
  bool in_place = false;       // gathers by sharing memory, where the strategy can
  int64_t tensor = 1;          // ranks that share each layer
  bool sequence = false;       // of these each has its own tokens alone between products
  int64_t chunks = 1;          // of tokens, in which they exchange sums

  int ranks() const;
  std::string name() const;  // "HSDP_w2_k3_block_small"
};

// The case's job; `base` names its model (CaseJob). Jobs of equal micro_batches train on the same
// batches.
plan::JobSpec JobOf(const StrategyCase& tested, const std::string& base, const std::string& folder);
// Sets up a run of the case.
RecordArgs ArgsOf(const StrategyCase& tested, const plan::JobSpec& job);

// Of all that a rank executes: programs, buffers and their places, layouts, rules and lanes, but
// not of the options that led there.
std::string PlanHash(const StrategyCase& tested, const plan::JobSpec& job);

}  // namespace ravel::trainer
