// A program of which other programs know is a vector clock: how many of its instructions each
// stream has completed. What an instruction knows is what its predecessors know, what its waits
// add, and all that was given to its own stream before. Where that is less than its operands ask
// for, it waits.

#include "common/plan/program/program_crossing.h"

#include <algorithm>
#include <array>
#include <cstdint>

namespace ravel::plan {
namespace {

using Clock = std::array<int, kStreamCount>;

void Raise(Clock& clock, const Clock& other) {
  for (size_t s = 0; s < clock.size(); ++s) {
    clock[s] = std::max(clock[s], other[s]);
  }
}

// One program's order, and what it touches last.
class ProgramOrder {
 public:
  ProgramOrder(const StepProgram& program, size_t buffers)
      : touched_(buffers, Clock{}),
        written_(buffers, Clock{}),
        before_(program.instructions.size()),
        clocks_(program.instructions.size(), Clock{}) {
    for (const InstructionId i : program.instructions.ids()) {
      if (RunsOnStream(program.instructions[i])) {
        Add(program, i);
      }
    }
  }

  // The instructions of this program that end before another one begins: the one before it on its
  // stream, and those that it waits for.
  const std::vector<InstructionId>& Before(InstructionId i) const { return before_[i]; }
  // Per stream how many instructions are complete when this one is.
  const Clock& ClockOf(InstructionId i) const { return clocks_[i]; }
  // The count on each stream of the program's last access, or last write, of a buffer.
  const Clock& Touched(BufferId buffer) const { return touched_[buffer]; }
  const Clock& Written(BufferId buffer) const { return written_[buffer]; }
  // The instruction with which a stream's count becomes `count`, from 1.
  InstructionId At(size_t stream, int count) const {
    return streams_[stream][static_cast<size_t>(count) - 1];
  }
  // The clock that is known once all work of a stream is.
  Clock AllOf(size_t stream) const {
    return streams_[stream].empty() ? Clock{} : clocks_[streams_[stream].back()];
  }

 private:
  void Add(const StepProgram& program, InstructionId i) {
    const Instruction& instruction = program.instructions[i];
    const size_t stream = StreamIndex(instruction.stream);
    if (!streams_[stream].empty()) {
      before_[i].push_back(streams_[stream].back());
    }
    for (const InstructionId wait : instruction.waits) {
      if (const InstructionId awaited = AwaitedBy(program, wait); awaited >= 0) {
        before_[i].push_back(awaited);
      }
    }
    streams_[stream].push_back(i);
    for (const InstructionId before : before_[i]) {
      Raise(clocks_[i], clocks_[before]);
    }
    const int count = static_cast<int>(streams_[stream].size());
    clocks_[i][stream] = count;
    for (const Operand& operand : instruction.operands) {
      touched_[operand.buffer][stream] = count;
      if (operand.writes()) {
        written_[operand.buffer][stream] = count;
      }
    }
  }

  IdVector<BufferId, Clock> touched_;
  IdVector<BufferId, Clock> written_;
  IdVector<InstructionId, std::vector<InstructionId>> before_;
  IdVector<InstructionId, Clock> clocks_;
  std::array<std::vector<InstructionId>, kStreamCount> streams_;
};

// Finds what the instructions of one program wait for of another one (or of its own former run).
class Crossing {
 public:
  Crossing(const StepProgram& program,
           const ProgramOrder& order,
           const ProgramOrder& earlier,
           const IdVector<BufferId, std::vector<BufferId>>& shared)
      : program_(program),
        order_(order),
        earlier_(earlier),
        shared_(shared),
        known_(program.instructions.size(), Clock{}) {}

  // In list order. Ascending by stream.
  std::vector<InstructionId> WaitsOf(InstructionId i) {
    const size_t stream = StreamIndex(program_.instructions[i].stream);
    Clock& known = known_[i];
    Raise(known, earlier_.AllOf(stream));
    for (const InstructionId before : order_.Before(i)) {
      Raise(known, known_[before]);
      if (&order_ == &earlier_) {  // what is complete in this run was so in the one before
        Raise(known, order_.ClockOf(before));
      }
    }
    const Clock needed = Needed(program_.instructions[i]);
    std::vector<InstructionId> lacking;
    for (size_t s = 0; s < needed.size(); ++s) {
      if (needed[s] > known[s]) {
        lacking.push_back(earlier_.At(s, needed[s]));
      }
    }
    std::vector<InstructionId> waits;
    for (const InstructionId one : lacking) {
      if (!Implied(one, lacking)) {
        waits.push_back(one);
      }
      Raise(known, earlier_.ClockOf(one));
    }
    return waits;
  }

 private:
  Clock Needed(const Instruction& instruction) const {
    Clock needed = {};
    for (const Operand& operand : instruction.operands) {
      for (const BufferId other : shared_[operand.buffer]) {
        Raise(needed, operand.writes() ? earlier_.Touched(other) : earlier_.Written(other));
      }
    }
    return needed;
  }
  // True if another one of `waits`, which are of different streams, comes after `one`.
  bool Implied(InstructionId one, const std::vector<InstructionId>& waits) const {
    return std::any_of(waits.begin(), waits.end(), [&](InstructionId other) {
      if (other == one) {
        return false;
      }
      const Clock& later = earlier_.ClockOf(other);
      const Clock& sooner = earlier_.ClockOf(one);
      bool covers = true;
      for (size_t s = 0; s < later.size(); ++s) {
        covers = covers && later[s] >= sooner[s];
      }
      return covers;
    });
  }

  const StepProgram& program_;
  const ProgramOrder& order_;
  const ProgramOrder& earlier_;
  const IdVector<BufferId, std::vector<BufferId>>& shared_;
  // The earlier program's clock, whenever an instruction of this one begins.
  IdVector<InstructionId, Clock> known_;
};

}  // namespace

bool RunsOnStream(const Instruction& instruction) {
  return instruction.op != OpCode::kFree && instruction.op != OpCode::kEndPhase;
}

InstructionId AwaitedBy(const StepProgram& program, InstructionId wait) {
  const Instruction& named = program.instructions[wait];
  if (RunsOnStream(named)) {
    return wait;
  }
  if (named.op != OpCode::kFree) {
    return {};
  }
  do {
    --wait;
  } while (wait >= 0 && !Touches(program.instructions[wait], named.freed));
  return wait;
}

IdVector<BufferId, std::vector<BufferId>> SharedBytes(const ProgramBuffers& buffers,
                                                      const IdVector<BufferId, int64_t>& offsets) {
  // A buffer inside another one is taken for all of that.
  const auto outermost = [&](BufferId buffer) {
    while (buffers[buffer].inside >= 0) {
      buffer = buffers[buffer].inside;
    }
    return buffer;
  };
  std::vector<BufferId> by_offset;
  for (const BufferId buffer : buffers.ids()) {
    by_offset.push_back(buffer);
  }
  const auto begin = [&](BufferId buffer) { return offsets[outermost(buffer)]; };
  std::stable_sort(by_offset.begin(), by_offset.end(), [&](BufferId a, BufferId b) {
    return begin(a) < begin(b);
  });
  IdVector<BufferId, std::vector<BufferId>> shared(buffers.size());
  for (size_t i = 0; i < by_offset.size(); ++i) {
    const BufferId a = by_offset[i];
    const ProgramBuffer& first = buffers[outermost(a)];
    shared[a].push_back(a);
    // Those that begin at or after it; the others find it.
    for (size_t j = i + 1; j < by_offset.size() && begin(by_offset[j]) < begin(a) + first.bytes;
         ++j) {
      const BufferId b = by_offset[j];
      const ProgramBuffer& second = buffers[outermost(b)];
      if (first.memory == second.memory && first.bytes > 0 && second.bytes > 0) {
        shared[a].push_back(b);
        shared[b].push_back(a);
      }
    }
  }
  return shared;
}

CrossingWaits CrossingWaitsOf(const std::vector<StepProgram>& programs,
                              const ProgramBuffers& buffers,
                              const IdVector<BufferId, int64_t>& offsets) {
  const auto shared = SharedBytes(buffers, offsets);
  std::vector<ProgramOrder> orders;
  orders.reserve(programs.size());
  for (const StepProgram& program : programs) {
    orders.emplace_back(program, buffers.size());
  }
  CrossingWaits waits;
  for (size_t at = 0; at < programs.size(); ++at) {
    const auto& list = programs[at].instructions;
    waits.emplace_back(list.size());
    for (size_t earlier = 0; earlier < programs.size(); ++earlier) {
      Crossing crossing(programs[at], orders[at], orders[earlier], shared);
      for (const InstructionId i : list.ids()) {
        if (!RunsOnStream(list[i])) {
          continue;
        }
        for (const InstructionId wait : crossing.WaitsOf(i)) {
          waits[at][i].push_back({.program = earlier, .instruction = wait});
        }
      }
    }
  }
  return waits;
}

}  // namespace ravel::plan
