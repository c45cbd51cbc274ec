#pragma once

// What a rank stores of a group as the fp32 values that checkpoints have: main weights are joined
// from bf16 and remainder, and split, to the bit; bf16 moments are widened, which is exact.

#include <cstddef>
#include <cstdint>
#include <span>

#include "common/plan/save_plan.h"
#include "common/status.h"
#include "worker/shard/device_streams.h"
#include "worker/shard/parameter_group.h"

namespace ravel::optim {

// Elements from `first` of what is stored; the role is kParam, kExpAvg or kExpAvgSq. `to` is the
// memory of fp32 values, of any alignment. Moments of frozen groups are a bug.
absl::Status ReadStored(shard::HostAccess& memory,
                        const shard::ParameterGroup& group,
                        plan::StateRole role,
                        int64_t first,
                        std::span<std::byte> to);

// The reverse. Model weights that are rounded from fp32 main weights do not follow:
// RankEngine::RefreshWeights. FailedPrecondition for moments that bf16 does not have: they were
// kept as fp32.
absl::Status WriteStored(shard::HostAccess& memory,
                         const shard::ParameterGroup& group,
                         plan::StateRole role,
                         int64_t first,
                         std::span<const float> values);

}  // namespace ravel::optim
