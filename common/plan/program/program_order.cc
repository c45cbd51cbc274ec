// Happens-before of one program from stream order and waits, as one vector clock per instruction:
// "a before b" is one comparison. The lifetimes of buffers are first and last accesses in it.

#include "common/plan/program/program_order.h"

#include <algorithm>
#include <cstddef>
#include <limits>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <utility>

#include <absl/strings/str_cat.h>

#include "common/check.h"

namespace ravel::plan {
namespace {

void Join(HappensBefore::Clock& clock, const HappensBefore::Clock& other) {
  for (size_t s = 0; s < clock.size(); ++s) {
    clock[s] = std::max(clock[s], other[s]);
  }
}

bool Covers(const HappensBefore::Clock& clock, const HappensBefore::Clock& other) {
  for (size_t s = 0; s < clock.size(); ++s) {
    if (clock[s] < other[s]) {
      return false;
    }
  }
  return true;
}

// Returns true if an operand begins the life of a temporary buffer: its earlier content is unused.
// A gradient that a compute instruction writes does not: its staging was opened before.
bool Begins(const Instruction& instruction, const Operand& operand) {
  return operand.access == Access::kWrite &&
         !(IsCompute(instruction.op) && operand.role == Role::kGradient);
}

bool EndsByFree(BufferKind kind) {
  return kind == BufferKind::kGathered || kind == BufferKind::kStaging;
}

// Finds the last access of each temporary buffer that no kFree ends.
class LastAccesses {
 public:
  explicit LastAccesses(const StepProgram& program) {
    for (const InstructionId id : program.instructions.ids()) {
      const Instruction& at = program.instructions[id];
      if (IsCompute(at.op)) {
        last_step_[{at.op, at.unit, at.call}] = id;
      }
      if (at.op == OpCode::kBackward) {
        backward_.insert({at.unit, at.call});
      }
      if (at.op == OpCode::kRecompute) {
        recomputed_.insert({at.unit, at.call});
      }
    }
  }

  // Steps of a pass share its buffers; the last one may end their lives.
  bool Ends(InstructionId id, const Instruction& at, BufferKind kind) const {
    if (IsCompute(at.op) && last_step_.at({at.op, at.unit, at.call}) != id) {
      return false;
    }
    const std::pair<UnitId, int> call = {at.unit, at.call};
    switch (kind) {
      case BufferKind::kGathered:
      case BufferKind::kStaging:
        return false;
      case BufferKind::kSaved:
        return at.op == OpCode::kBackward || backward_.count(call) == 0;
      case BufferKind::kRemade:
        return at.op == OpCode::kBackward || backward_.count(call) == 0 ||
               (at.op == OpCode::kForward && recomputed_.count(call) > 0);
      case BufferKind::kFullGrad:
        return at.op == OpCode::kOptimizerStep;
      default:
        return true;
    }
  }

 private:
  std::map<std::tuple<OpCode, UnitId, int>, InstructionId> last_step_;  // of each pass
  std::set<std::pair<UnitId, int>> backward_;                           // calls
  std::set<std::pair<UnitId, int>> recomputed_;
};

// Follows which lifetime of each buffer is open.
class LifetimeScan {
 public:
  LifetimeScan(const StepProgram& program, const ProgramBuffers& buffers)
      : program_(program), buffers_(buffers), last_(program), open_(buffers.size(), kClosed) {}

  absl::Status Start() {
    for (const BufferId buffer : program_.live_at_start) {
      if (!MayStay(buffer) || open_[buffer] != kClosed) {
        return Fault({}, "K8: starts with what cannot be alive: ", buffer);
      }
      Open({.buffer = buffer, .begin = {}, .accesses = {InstructionId()}, .freed = {}});
    }
    return absl::OkStatus();
  }

  absl::Status Touch(InstructionId at, const Operand& operand) {
    const BufferId buffer = operand.buffer;
    const Instruction& instruction = program_.instructions[at];
    if (Begins(instruction, operand)) {
      if (open_[buffer] != kClosed) {
        return Fault(at, "brings to life what is alive: ", buffer);
      }
      Open({.buffer = buffer, .begin = at, .accesses = {}, .freed = {}});
    }
    if (open_[buffer] == kClosed) {
      return Fault(at, "uses a buffer that is not alive: ", buffer);
    }
    lifetimes_[open_[buffer]].accesses.push_back(at);
    if (last_.Ends(at, instruction, buffers_[buffer].kind)) {
      open_[buffer] = kClosed;
    }
    return absl::OkStatus();
  }

  absl::Status Free(InstructionId at, BufferId buffer) {
    if (!buffers_.Has(buffer) || !EndsByFree(buffers_[buffer].kind)) {
      return Fault(at, "frees what is not alive: buffer ", buffer);
    }
    if (buffers_[buffer].persistent) {
      return absl::OkStatus();
    }
    if (open_[buffer] == kClosed) {
      return Fault(at, "frees what is not alive: buffer ", buffer);
    }
    lifetimes_[std::exchange(open_[buffer], kClosed)].freed = at;
    return absl::OkStatus();
  }

  absl::Status End(InstructionId at) {
    for (const BufferId buffer : program_.live_at_end) {
      if (!MayStay(buffer) || open_[buffer] == kClosed) {
        return Fault(at, "K8: does not leave alive: ", buffer);
      }
      lifetimes_[std::exchange(open_[buffer], kClosed)].accesses.push_back(at);
    }
    for (const BufferId buffer : open_.ids()) {
      if (open_[buffer] != kClosed) {
        return Fault(at, "K8: ends the program while a buffer is alive: ", buffer);
      }
    }
    return absl::OkStatus();
  }

  std::vector<Lifetime> Take() { return std::move(lifetimes_); }

 private:
  static constexpr size_t kClosed = std::numeric_limits<size_t>::max();

  void Open(Lifetime life) {
    open_[life.buffer] = lifetimes_.size();
    lifetimes_.push_back(std::move(life));
  }
  // Weights of a group may stay gathered from one program of a step to the next.
  bool MayStay(BufferId buffer) const {
    return buffers_.Has(buffer) && buffers_[buffer].kind == BufferKind::kGathered &&
           !buffers_[buffer].persistent;
  }
  absl::Status Fault(InstructionId at, const char* what, BufferId buffer) const {
    return absl::FailedPreconditionError(
        absl::StrCat(InstructionName(program_, at),
                     " ",
                     what,
                     buffers_.Has(buffer) ? buffers_[buffer].name : absl::StrCat(buffer.value())));
  }

  const StepProgram& program_;
  const ProgramBuffers& buffers_;
  const LastAccesses last_;
  IdVector<BufferId, size_t> open_;  // position in lifetimes_, or kClosed
  std::vector<Lifetime> lifetimes_;
};

}  // namespace

HappensBefore::HappensBefore(const StepProgram& program) {
  std::array<Clock, kStreamCount> last = {};
  for (const Instruction& instruction : program.instructions) {
    const size_t stream = StreamIndex(instruction.stream);
    CHECK_LT(stream, kStreamCount);
    Clock clock = last[stream];
    for (const InstructionId wait : instruction.waits) {
      CHECK(clocks_.Has(wait));
      Join(clock, clocks_[wait]);
    }
    clock[stream] = ++count_[stream];
    last[stream] = clock;
    clocks_.push_back(clock);
    stream_.push_back(stream);
    position_.push_back(count_[stream]);
  }
}

bool HappensBefore::Before(InstructionId a, InstructionId b) const {
  if (a < 0 || b < 0) {
    return a < 0 && b >= 0;
  }
  return a != b && ClockOf(b)[stream_[a]] >= position_[a];
}

void DropImpliedWaits(StepProgram& program) {
  const HappensBefore order(program);
  std::array<HappensBefore::Clock, kStreamCount> last = {};  // of each stream's last instruction
  for (const InstructionId id : program.instructions.ids()) {
    Instruction& instruction = program.instructions[id];
    std::vector<InstructionId> waits = instruction.waits;
    std::sort(waits.begin(), waits.end());
    waits.erase(std::unique(waits.begin(), waits.end()), waits.end());
    for (size_t w = 0; w < waits.size();) {
      HappensBefore::Clock others = last[StreamIndex(instruction.stream)];
      for (size_t other = 0; other < waits.size(); ++other) {
        if (other != w) {
          Join(others, order.ClockOf(waits[other]));
        }
      }
      if (Covers(others, order.ClockOf(waits[w]))) {
        waits.erase(waits.begin() + static_cast<std::ptrdiff_t>(w));
      } else {
        ++w;
      }
    }
    instruction.waits = std::move(waits);
    last[StreamIndex(instruction.stream)] = order.ClockOf(id);
  }
}

absl::StatusOr<std::vector<Lifetime>> LifetimesOf(const StepProgram& program,
                                                  const ProgramBuffers& buffers) {
  LifetimeScan scan(program, buffers);
  RETURN_IF_ERROR(scan.Start());
  for (const InstructionId at : program.instructions.ids()) {
    const Instruction& instruction = program.instructions[at];
    if (instruction.op == OpCode::kFree) {
      RETURN_IF_ERROR(scan.Free(at, instruction.freed));
      continue;
    }
    for (const Operand& operand : instruction.operands) {
      if (!buffers[operand.buffer].persistent) {
        RETURN_IF_ERROR(scan.Touch(at, operand));
      }
    }
  }
  RETURN_IF_ERROR(scan.End(program.instructions.last_id()));
  return scan.Take();
}

bool EndsBefore(const HappensBefore& order, const Lifetime& a, const Lifetime& b) {
  return std::all_of(a.accesses.begin(), a.accesses.end(), [&](InstructionId access) {
    return order.Before(access, b.begin);
  });
}

std::string InstructionName(const StepProgram& program, InstructionId instruction) {
  if (instruction < 0) {
    return absl::StrCat("program ", PhaseName(program.phase), ", start");
  }
  const Instruction& at = program.instructions[instruction];
  const char* part = program.part == LanePart::kWhole ? "" : LanePartName(program.part);
  return absl::StrCat("program ",
                      PhaseName(program.phase),
                      *part == 0 ? "" : " ",
                      part,
                      ", instruction ",
                      instruction.value(),
                      " ",
                      OpName(static_cast<OpLabel>(at.op)),
                      at.unit >= 0 ? absl::StrCat(" of unit ", at.unit.value()) : "",
                      at.group >= 0 ? absl::StrCat(" group ", at.group.value()) : "",
                      at.call > 0 ? absl::StrCat(" call ", at.call) : "",
                      at.segment >= 0 ? absl::StrCat(" segment ", at.segment.value()) : "");
}

}  // namespace ravel::plan
