#pragma once

// What a step program implies: which instruction happens before which, what each one touches, and
// how long buffers live. "Before" is stream order and event waits, never the order of the list.

#include <array>
#include <compare>
#include <cstdint>
#include <utility>
#include <vector>

#include "common/plan/step_program.h"
#include "common/status.h"

namespace ravel::plan {

// The closure of stream order and waits, as one clock per instruction. Every wait must name an
// earlier instruction.
class HappensBefore {
 public:
  explicit HappensBefore(const StepProgram& program);
  // Whether a has completed whenever b begins. An instruction is not before itself. -1 is the start
  // of the program, before everything else.
  bool Before(int a, int b) const;

  static constexpr size_t kStreams = 5;
  // Per stream, how many of its instructions have completed when `instruction` has.
  using Clock = std::array<int, kStreams>;
  const Clock& ClockOf(int instruction) const { return clocks_[static_cast<size_t>(instruction)]; }
  // Index into clocks.
  size_t StreamOf(int instruction) const {
    return static_cast<size_t>(stream_[static_cast<size_t>(instruction)]);
  }
  // Within its stream, from 1: what the stream's clock says when the instruction has completed.
  int PositionOf(int instruction) const { return position_[static_cast<size_t>(instruction)]; }
  int InstructionsOf(size_t stream) const { return count_[stream]; }

 private:
  std::vector<Clock> clocks_;
  std::vector<int> stream_;    // per instruction
  std::vector<int> position_;  // per instruction
  std::array<int, kStreams> count_ = {};
};

// Removes waits that stream order and the other waits already imply.
void DropImpliedWaits(StepProgram& program);

// Buffer ids by role, -1 where there is none.
class BufferIndex {
 public:
  explicit BufferIndex(const std::vector<ProgramBuffer>& buffers);
  // Weights and gradients belong to a group, activations to a unit, kShared to nobody (-1).
  struct Key {
    BufferKind kind = BufferKind::kShared;
    int owner = -1;
    int call = 0;
    int slot = 0;
    auto operator<=>(const Key&) const = default;
  };
  int Find(const Key& key) const;
  // All buffers of a kind and owner: those of every call and slot, by call.
  std::vector<int> OfOwner(BufferKind kind, int owner) const;
  // Those of one call: every slot.
  std::vector<int> OfCall(BufferKind kind, int owner, int call) const;
  bool Persistent(int buffer) const { return persistent_[static_cast<size_t>(buffer)]; }

 private:
  std::vector<std::pair<Key, int>> by_key_;  // ascending
  std::vector<bool> persistent_;
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
  int begin = -1;             // instruction, or -1: alive at the start of the program
  std::vector<int> accesses;  // ascending, `begin` first; EndPhase where it is alive at the end
  int freed = -1;             // the kFree that ends it, or -1 where the last access does
};
// Lifetimes of the temporaries of a program in the order in which they begin. Errors name the
// instruction: an access to a buffer that is not alive, a second birth, a free of a dead buffer.
absl::StatusOr<std::vector<Lifetime>> LifetimesOf(const StepProgram& program,
                                                  const std::vector<ProgramBuffer>& buffers);

// The same where the index exists already.
absl::StatusOr<std::vector<Lifetime>> LifetimesOf(const StepProgram& program,
                                                  const std::vector<ProgramBuffer>& buffers,
                                                  const BufferIndex& index);

// Whether every access of `a` happens before `b` begins.
bool EndsBefore(const HappensBefore& order, const Lifetime& a, const Lifetime& b);

// Whether ranks take part in it together.
bool IsCollective(OpCode op);

// "program last, instruction 17 Gather layers.3": how messages name an instruction.
std::string InstructionName(const StepProgram& program, int instruction);

}  // namespace ravel::plan
