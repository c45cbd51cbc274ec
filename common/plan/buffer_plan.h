#pragma once

#include <cstdint>
#include <vector>

#include "common/plan/step_program.h"
#include "common/status.h"

namespace ravel::plan {

// Byte offset of each buffer in the arena of its memory kind; equal on all ranks. Offsets are
// multiples of 256; the persistent flat buffers (weights, moments, gradients) are staggered by an
// odd number of 4 KiB pages, because equal offsets modulo large powers of two slow the fused
// optimizer down several times.
struct BufferPlan {
  std::vector<int64_t> offsets;  // per ProgramBuffer
  int64_t private_bytes = 0;
  int64_t symmetric_bytes = 0;
  int64_t common_bytes = 0;
  // Largest sum of simultaneously live bytes over all cuts, all kinds: no packing can be smaller.
  int64_t lower_bound_bytes = 0;
  int64_t packed_bytes() const { return private_bytes + symmetric_bytes + common_bytes; }
};

}  // namespace ravel::plan
