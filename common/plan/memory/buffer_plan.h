#pragma once

#include <cstdint>
#include <vector>

#include "common/plan/program/step_program.h"
#include "common/status.h"

namespace ravel::plan {

// Byte offset of each buffer in the arena of its memory kind; equal on all ranks. Offsets are
// multiples of 256; the persistent flat buffers of a group (weights, moments, gradients) start at
// different 4 KiB pages modulo eight, because equal offsets modulo large powers of two slow the
// fused optimizer down several times.
struct BufferPlan {
  IdVector<BufferId, int64_t> offsets;
  int64_t private_bytes = 0;
  int64_t symmetric_bytes = 0;
  int64_t common_bytes = 0;
  int64_t offload_bytes = 0;  // not memory: in neither of the next two
  // Per memory kind the largest sum of bytes that can be alive at once, added up; where the packing
  // is not close to that, the largest found of buffers that all are alive with each other, each two
  // of them in some program. Addresses are the same in all programs, so no packing can be smaller.
  int64_t lower_bound_bytes = 0;
  int64_t packed_bytes() const { return private_bytes + symmetric_bytes + common_bytes; }
};

// Places every buffer of the programs. Temporaries share addresses where all accesses of one happen
// before the birth of the other in every program; errors are those of LifetimesOf.
absl::StatusOr<BufferPlan> PlanBuffers(const ProgramBuffers& buffers,
                                       const std::vector<StepProgram>& programs);

// The temporaries of a memory kind that are alive at its worst moment.
struct PeakCut {
  int64_t bytes = 0;
  std::vector<BufferId> buffers;
};
absl::StatusOr<PeakCut> FindPeak(const ProgramBuffers& buffers,
                                 const std::vector<StepProgram>& programs,
                                 MemoryKind memory);

// Bytes of a buffer in its arena: rounded up to 256; 0 inside another buffer.
int64_t ArenaBytes(const ProgramBuffer& buffer);

}  // namespace ravel::plan
