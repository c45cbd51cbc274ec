#pragma once

// Converts a rank's stored state of a group to fp32 values, and to the bytes that checkpoints have:
// main weights are joined from bf16 and remainder, and split, to the bit; bf16 states are widened
// for the first, which is exact, and left as they are for the second.

#include <cstddef>
#include <cstdint>
#include <span>

#include "common/plan/save/save_plan.h"
#include "common/status.h"
#include "worker/quant/quant_state.h"
#include "worker/shard/host_access.h"
#include "worker/shard/parameter_group.h"

namespace ravel::optim {

// Elements from `first` of what is stored; the role is kParam or that of a state with buffers.
// `to` is the memory of fp32 values, of any alignment. States of frozen groups are a bug.
absl::Status ReadStored(shard::HostAccess& memory,
                        const shard::ParameterGroup& group,
                        plan::StateRole role,
                        int64_t first,
                        std::span<std::byte> to);

// Type of what is stored; of kParam that of main weights, where they are not remainders.
DType StoredType(const shard::ParameterGroup& group, plan::StateRole role);
// Returns state that is stored as fp32, [shard_elements]; nullptr where it is in another form.
float* StoredFloats(const shard::ParameterGroup& group, plan::StateRole role);

// The same as it is saved: `to` is the memory of values of plan::SavedType. The role may be that of
// scales, and `first` counts among those of the rank.
absl::Status ReadSaved(shard::HostAccess& memory,
                       const shard::ParameterGroup& group,
                       plan::StateRole role,
                       int64_t first,
                       std::span<std::byte> to);

// Fills an fp8 state: codes [shard_elements] and the scales of the rank, by their values, in the
// order of scale_pieces(); FirstNotScale has found none.
absl::Status WriteCodes(shard::HostAccess& memory,
                        const shard::ParameterGroup& group,
                        plan::StateRole role,
                        std::span<const std::byte> codes,
                        std::span<const float> scales);
// The first that is no scale of an fp8 state, or scales.size(): they are powers of two from 2^-127.
size_t FirstNotScale(std::span<const float> scales);
// The first code of an fp8 state that its format has for NaN, which no update writes, or
// codes.size(). `square`: the codes are those of averages of squares.
size_t FirstNanCode(std::span<const std::byte> codes, bool square);

// The first of `values` that bf16 does not have, or values.size(). NaNs count as any other bits.
size_t FirstNotBf16(std::span<const float> values);

// The reverse of ReadStored. Model weights that are rounded from fp32 main weights do not follow:
// RankEngine::RefreshWeights. States that live as bf16 and are given values that it does not have
// are a bug.
absl::Status WriteStored(shard::HostAccess& memory,
                         const shard::ParameterGroup& group,
                         plan::StateRole role,
                         int64_t first,
                         std::span<const float> values);

// Delayed scales, which all ranks have: elements of a role from `first` (QuantState::StateOf).
// Whoever writes them refreshes weights afterwards: the scales of next casts follow then.
absl::Status ReadScales(shard::HostAccess& memory,
                        const quant::QuantState& quant,
                        plan::StateRole role,
                        int64_t first,
                        std::span<float> to);
absl::Status WriteScales(shard::HostAccess& memory,
                         const quant::QuantState& quant,
                         plan::StateRole role,
                         int64_t first,
                         std::span<const float> from);

// Model weights follow main weights, which the host keeps in fp32: their bf16, rounded half away
// from zero, or the nearest fp16.
absl::Status RoundStored(shard::HostAccess& memory, const shard::ParameterGroup& group);

}  // namespace ravel::optim
