#pragma once

// What a step program implies: which instruction happens before which, what each one touches, and
// how long buffers live. "Before" is stream order and event waits, never the order of the list.

#include <array>
#include <cstdint>
#include <vector>

#include "common/plan/step_program.h"
#include "common/status.h"

namespace ravel::plan {

// The closure of stream order and waits, as one clock per instruction. Every wait must name an
// earlier instruction.
class HappensBefore {
 public:
  explicit HappensBefore(const StepProgram& program);
  // Whether a has completed whenever b begins. An instruction is not before itself.
  bool Before(int a, int b) const;

  static constexpr size_t kStreams = 4;
  // Per stream, how many of its instructions have completed when `instruction` has.
  using Clock = std::array<int, kStreams>;
  const Clock& ClockOf(int instruction) const { return clocks_[static_cast<size_t>(instruction)]; }

 private:
  std::vector<Clock> clocks_;
  std::vector<int> stream_;    // per instruction
  std::vector<int> position_;  // per instruction, from 1, within its stream
};

// Removes waits that stream order and the other waits already imply.
void DropImpliedWaits(StepProgram& program);

// Buffer ids by role, -1 where there is none.
class BufferIndex {
 public:
  explicit BufferIndex(const std::vector<ProgramBuffer>& buffers);
  struct Key {
    BufferKind kind = BufferKind::kShared;
    int unit = -1;
    int call = 0;
    int slot = 0;
  };
  int Find(const Key& key) const;
  // All buffers of a kind that belong to a unit (kMainGrad: every call and slot), by id.
  std::vector<int> OfUnit(BufferKind kind, int unit) const;

 private:
  const std::vector<ProgramBuffer>& buffers_;
};

struct BufferAccess {
  int buffer = -1;
  bool writes = false;
};
// Every buffer that an instruction reads or writes; kFree and kEndPhase touch none.
std::vector<BufferAccess> AccessesOf(const Instruction& instruction, const BufferIndex& index);

// One use of a temporary buffer: from the instruction that brings it to life to its last access.
struct Lifetime {
  int buffer = -1;
  int begin = -1;             // instruction
  std::vector<int> accesses;  // ascending, `begin` first
  int freed = -1;             // the kFree that ends it, or -1 where the last access does
};
// Lifetimes of the temporaries of a program in the order in which they begin. Errors name the
// instruction: an access to a buffer that is not alive, a second birth, a free of a dead buffer.
absl::StatusOr<std::vector<Lifetime>> LifetimesOf(const StepProgram& program,
                                                  const std::vector<ProgramBuffer>& buffers);

// Whether every access of `a` happens before `b` begins.
bool EndsBefore(const HappensBefore& order, const Lifetime& a, const Lifetime& b);

// "program last, instruction 17 Gather layers.3": how messages name an instruction.
std::string InstructionName(const StepProgram& program, int instruction);

}  // namespace ravel::plan
