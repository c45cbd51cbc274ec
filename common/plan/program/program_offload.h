#pragma once

// Which part of the optimizer's state leaves memory between updates.

#include <cstdint>
#include <vector>

#include "common/plan/program/program_request.h"

namespace ravel::plan {

// Elements of a group that are in memory at a time while it is updated. The next ones are fetched
// and the last ones written back meanwhile, so up to kOffloadChunksAlive times as many are.
inline constexpr int64_t kOffloadChunkElements = int64_t{1} << 20;
inline constexpr int64_t kOffloadChunksAlive = 3;

// True of state that only updates touch: moments, their scales, and main weights where model
// weights are of another type. Where both are fp32, gathers take main weights from where they lie,
// so they stay. Weights of frozen groups stay, too.
bool MayOffload(const ProgramBuffer& buffer, const GroupLayouts& groups, DType weight_type);

// Makes whole groups kOffload: from the end of the forward order each one whose bytes still fit
// into ProgramOptions::offload_fraction of the bytes that one rank may offload. Never more; the
// same on all ranks, since shards are of equal size.
void OffloadState(const ProgramRequest& request, ProgramBuffers& buffers);

// Bytes of one rank, and the groups in forward order.
struct OffloadFacts {
  int64_t optimizer_bytes = 0;  // that may be offloaded
  int64_t offloaded_bytes = 0;
  int64_t window_bytes = 0;  // most that are in memory at a time
  std::vector<GroupId> groups;
};
OffloadFacts OffloadOf(const ProgramBuffers& buffers,
                       const GroupLayouts& groups,
                       const ProgramOptions& options);

}  // namespace ravel::plan
