#pragma once

// What a step program implies: which instruction happens before which, what each one touches, and
// how long buffers live. "Before" is stream order and event waits, never the order of the list.

#include <array>
#include <cstdint>
#include <vector>

#include "common/plan/program/step_program.h"
#include "common/status.h"

namespace ravel::plan {

// The closure of stream order and waits, as one clock per instruction. Every wait must name an
// earlier instruction.
class HappensBefore {
 public:
  explicit HappensBefore(const StepProgram& program);
  // True if a has completed whenever b begins. An instruction is not before itself. None is the
  // start of the program, before everything else.
  bool Before(InstructionId a, InstructionId b) const;

  // Per stream, how many of its instructions have completed when `instruction` has.
  using Clock = std::array<int, kStreamCount>;
  const Clock& ClockOf(InstructionId instruction) const { return clocks_[instruction]; }
  // Index into clocks.
  size_t StreamOf(InstructionId instruction) const { return stream_[instruction]; }
  // Within its stream, from 1: what the stream's clock says when the instruction has completed.
  int PositionOf(InstructionId instruction) const { return position_[instruction]; }
  int InstructionsOf(size_t stream) const { return count_[stream]; }

 private:
  IdVector<InstructionId, Clock> clocks_;
  IdVector<InstructionId, size_t> stream_;
  IdVector<InstructionId, int> position_;
  std::array<int, kStreamCount> count_ = {};
};

// Removes waits that stream order and the other waits already imply.
void DropImpliedWaits(StepProgram& program);

// One use of a temporary buffer: from the instruction that brings it to life to its last access.
struct Lifetime {
  BufferId buffer = {};
  InstructionId begin = {};             // or none: alive at the start of the program
  std::vector<InstructionId> accesses;  // ascending, `begin` first; EndPhase where it stays alive
  InstructionId freed = {};  // the kFree that ends it, or none where the last access does
};
// Lifetimes of the temporaries of a program in the order in which they begin. Errors name the
// instruction: an access to a buffer that is not alive, a second birth, a free of a dead buffer.
absl::StatusOr<std::vector<Lifetime>> LifetimesOf(const StepProgram& program,
                                                  const ProgramBuffers& buffers);

// True if every access of `a` happens before `b` begins.
bool EndsBefore(const HappensBefore& order, const Lifetime& a, const Lifetime& b);

// "program last, instruction 17 Gather layers.3": how messages name an instruction.
std::string InstructionName(const StepProgram& program, InstructionId instruction);

}  // namespace ravel::plan
