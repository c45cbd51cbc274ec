#pragma once

// Waits between programs that follow each other on the same streams, where no stream is drained
// between them. Derived from operands alone: an instruction comes after the last instructions of
// earlier programs that touch bytes of its operands, where one of the two writes. Order of a
// stream, and what other waits imply, need no wait of their own.

#include <cstddef>
#include <vector>

#include "common/plan/program/step_program.h"

namespace ravel::plan {

// The completion of an instruction in the run of its program that was last before this one. Nothing
// to wait for where that program has not run yet.
struct CrossingWait {
  size_t program = 0;  // of the programs below
  InstructionId instruction = {};
  bool operator==(const CrossingWait&) const = default;
};

// By program and instruction. Programs may follow each other in any order, and any number of times;
// `offsets` are the buffers' in their arena. Time and memory: the square of the number of programs,
// times instructions.
using CrossingWaits = std::vector<IdVector<InstructionId, std::vector<CrossingWait>>>;
CrossingWaits CrossingWaitsOf(const std::vector<StepProgram>& programs,
                              const ProgramBuffers& buffers,
                              const IdVector<BufferId, int64_t>& offsets);

// True if an instruction is work of a stream: all but kFree and kEndPhase.
bool RunsOnStream(const Instruction& instruction);
// The instruction of a stream that a wait of `program` is for: where it names a kFree, the last one
// before that which touches the buffer. None: there is no such instruction.
InstructionId AwaitedBy(const StepProgram& program, InstructionId wait);
// For each buffer those that share bytes with it, itself included.
IdVector<BufferId, std::vector<BufferId>> SharedBytes(const ProgramBuffers& buffers,
                                                      const IdVector<BufferId, int64_t>& offsets);

}  // namespace ravel::plan
