#pragma once

// Memory of a rank by what it is for: what the plan sets aside, beside what an engine has bound.

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "common/plan/sharding_plan.h"
#include "common/status.h"

namespace ravel::plan {

enum class MemoryUse {
  kWeights,      // main and model weights, gathered ones that stay
  kGradients,    // sums over lanes, staging that stays
  kOptimizer,    // moments
  kActivations,  // saved, recomputed, shared
  kGathered,
  kStaging,  // with what is received
  kWorkspace,
  kOffload,  // of the optimizer's state what lies outside of memory
};
inline constexpr size_t kMemoryUses = static_cast<size_t>(MemoryUse::kOffload) + 1;
const char* MemoryUseName(MemoryUse use);
MemoryUse UseOf(const ProgramBuffer& buffer);

using BytesByUse = std::array<int64_t, kMemoryUses>;

// Per use the most bytes that are alive at once at any instruction of any program, run in list
// order; the worst moments of two uses may differ. Every size is rounded up to the arena's
// granularity. A kCommon block counts with this rank's share, a buffer inside another not at all.
absl::StatusOr<BytesByUse> MostAlive(const ShardingPlan& plan);

}  // namespace ravel::plan
