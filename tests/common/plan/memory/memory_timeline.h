#pragma once

// Predicted bytes of a rank while each instruction of a program runs: what a memory ledger compares
// with what it measures.

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "common/plan/sharding_plan.h"
#include "common/status.h"

namespace ravel::plan {

inline constexpr size_t kBufferKinds = static_cast<size_t>(BufferKind::kRemade) + 1;

struct MemoryMoment {
  std::array<int64_t, kBufferKinds> bytes = {};  // by BufferKind
  int64_t of(BufferKind kind) const { return bytes[static_cast<size_t>(kind)]; }
  int64_t total() const;
};

// One entry per instruction, run in list order: all persistent buffers, and the temporaries from
// their birth to their last access, after which others may have their memory. A kCommon block
// counts with this rank's share.
absl::StatusOr<std::vector<MemoryMoment>> MemoryTimeline(const ShardingPlan& plan,
                                                         Phase phase,
                                                         LanePart part = LanePart::kWhole);

}  // namespace ravel::plan
