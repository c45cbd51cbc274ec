#pragma once

#include <cstdint>
#include <vector>

#include "common/plan/step_program.h"
#include "common/status.h"

namespace ravel::plan {

// Byte offset of each buffer in the arena of its memory kind; equal on all ranks. Offsets are
// multiples of 256; the persistent flat buffers of a group (weights, moments, gradients) start at
// different 4 KiB pages modulo eight, because equal offsets modulo large powers of two slow the
// fused optimizer down several times.
struct BufferPlan {
  std::vector<int64_t> offsets;  // per ProgramBuffer
  int64_t private_bytes = 0;
  int64_t symmetric_bytes = 0;
  int64_t common_bytes = 0;
  // Per memory kind the largest sum of bytes that can be alive at once, added up: no packing can be
  // smaller.
  int64_t lower_bound_bytes = 0;
  int64_t packed_bytes() const { return private_bytes + symmetric_bytes + common_bytes; }
};

// Places every buffer of the programs. Temporaries share addresses where all accesses of one happen
// before the birth of the other in every program; errors are those of LifetimesOf.
absl::StatusOr<BufferPlan> PlanBuffers(const std::vector<ProgramBuffer>& buffers,
                                       const std::vector<StepProgram>& programs);

// The temporaries of a memory kind that are alive at its worst moment.
struct PeakCut {
  int64_t bytes = 0;
  std::vector<int> buffers;
};
absl::StatusOr<PeakCut> FindPeak(const std::vector<ProgramBuffer>& buffers,
                                 const std::vector<StepProgram>& programs,
                                 MemoryKind memory);

// Bytes of a buffer in its arena: rounded up to 256; 0 inside another buffer.
int64_t ArenaBytes(const ProgramBuffer& buffer);

// An interval of an abstract order and its size: what packing is about, apart from programs.
struct PackItem {
  int64_t bytes = 0;
  std::vector<int> conflicts;  // items that may not share an address with this one
};
// Offsets of the items: the best of largest first, given order, and best fit; where those end above
// `bound`, other orders are tried. Peak: the largest end.
struct Packing {
  std::vector<int64_t> offsets;
  int64_t peak = 0;
};
Packing PackItems(const std::vector<PackItem>& items, int64_t bound = 0);

}  // namespace ravel::plan
