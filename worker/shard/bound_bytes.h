#pragma once

// How much of each planned buffer the engine makes use of: measured on the views, pointers and
// transfers that it has bound, not on the plan's sizes.

#include <cstdint>
#include <vector>

#include "common/plan/sharding_plan.h"
#include "worker/shard/bound_program.h"
#include "worker/shard/flat_buffer.h"
#include "worker/shard/parameter_group.h"

namespace ravel::shard {

// Per buffer of the plan, the end of the furthest use, in bytes from the buffer's begin.
struct BoundBytesArgs {
  const plan::ShardingPlan& plan;
  const ArenaBuffers& buffers;
  const ParameterGroups& groups;
  const std::vector<BoundProgram>& programs;
};
plan::IdVector<plan::BufferId, int64_t> BoundBytes(const BoundBytesArgs& args);

}  // namespace ravel::shard
