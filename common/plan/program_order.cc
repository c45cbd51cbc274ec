#include "common/plan/program_order.h"

#include <algorithm>
#include <cstddef>
#include <set>
#include <string>
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
    for (const Instruction& at : program.instructions) {
      if (at.op == OpCode::kBackward) {
        backward_.insert({at.unit, at.call});
      }
      if (at.op == OpCode::kRecompute) {
        recomputed_.insert({at.unit, at.call});
      }
    }
  }

  bool Ends(const Instruction& at, BufferKind kind) const {
    const std::pair<int, int> call = {at.unit, at.call};
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
  std::set<std::pair<int, int>> backward_;  // (unit, call)
  std::set<std::pair<int, int>> recomputed_;
};

// Follows which lifetime of each buffer is open.
class LifetimeScan {
 public:
  LifetimeScan(const StepProgram& program, const std::vector<ProgramBuffer>& buffers)
      : program_(program), buffers_(buffers), last_(program), open_(buffers.size(), -1) {}

  absl::Status Start() {
    for (const int buffer : program_.live_at_start) {
      if (!MayStay(buffer) || open_[static_cast<size_t>(buffer)] >= 0) {
        return Fault(-1, "K8: starts with what cannot be alive: ", buffer);
      }
      open_[static_cast<size_t>(buffer)] = static_cast<int>(lifetimes_.size());
      lifetimes_.push_back({.buffer = buffer, .begin = -1, .accesses = {-1}, .freed = -1});
    }
    return absl::OkStatus();
  }

  absl::Status Touch(int at, const Operand& operand) {
    const int buffer = operand.buffer;
    const auto id = static_cast<size_t>(buffer);
    const BufferKind kind = buffers_[id].kind;
    const Instruction& instruction = program_.instructions[static_cast<size_t>(at)];
    if (Begins(instruction, operand)) {
      if (open_[id] >= 0) {
        return Fault(at, "brings to life what is alive: ", buffer);
      }
      open_[id] = static_cast<int>(lifetimes_.size());
      lifetimes_.push_back({.buffer = buffer, .begin = at, .accesses = {}, .freed = -1});
    }
    if (open_[id] < 0) {
      return Fault(at, "uses a buffer that is not alive: ", buffer);
    }
    lifetimes_[static_cast<size_t>(open_[id])].accesses.push_back(at);
    if (last_.Ends(instruction, kind)) {
      open_[id] = -1;
    }
    return absl::OkStatus();
  }

  absl::Status Free(int at, int buffer) {
    if (buffer < 0 || static_cast<size_t>(buffer) >= buffers_.size() ||
        !EndsByFree(buffers_[static_cast<size_t>(buffer)].kind)) {
      return Fault(at, "frees what is not alive: buffer ", buffer);
    }
    if (buffers_[static_cast<size_t>(buffer)].persistent) {
      return absl::OkStatus();
    }
    if (open_[static_cast<size_t>(buffer)] < 0) {
      return Fault(at, "frees what is not alive: buffer ", buffer);
    }
    int& open = open_[static_cast<size_t>(buffer)];
    lifetimes_[static_cast<size_t>(open)].freed = at;
    open = -1;
    return absl::OkStatus();
  }

  absl::Status End(int at) {
    for (const int buffer : program_.live_at_end) {
      if (!MayStay(buffer) || open_[static_cast<size_t>(buffer)] < 0) {
        return Fault(at, "K8: does not leave alive: ", buffer);
      }
      int& open = open_[static_cast<size_t>(buffer)];
      lifetimes_[static_cast<size_t>(open)].accesses.push_back(at);
      open = -1;
    }
    for (size_t buffer = 0; buffer < open_.size(); ++buffer) {
      if (open_[buffer] >= 0) {
        return Fault(
            at, "K8: ends the program while a buffer is alive: ", static_cast<int>(buffer));
      }
    }
    return absl::OkStatus();
  }

  std::vector<Lifetime> Take() { return std::move(lifetimes_); }

 private:
  // Weights of a group may stay gathered from one program of a step to the next.
  bool MayStay(int buffer) const {
    return buffer >= 0 && static_cast<size_t>(buffer) < buffers_.size() &&
           buffers_[static_cast<size_t>(buffer)].kind == BufferKind::kGathered &&
           !buffers_[static_cast<size_t>(buffer)].persistent;
  }
  absl::Status Fault(int at, const char* what, int buffer) const {
    const bool named = buffer >= 0 && static_cast<size_t>(buffer) < buffers_.size();
    return absl::FailedPreconditionError(
        absl::StrCat(InstructionName(program_, at),
                     " ",
                     what,
                     named ? buffers_[static_cast<size_t>(buffer)].name : absl::StrCat(buffer)));
  }

  const StepProgram& program_;
  const std::vector<ProgramBuffer>& buffers_;
  const LastAccesses last_;
  std::vector<int> open_;  // per buffer: index into lifetimes_, or -1
  std::vector<Lifetime> lifetimes_;
};

}  // namespace

HappensBefore::HappensBefore(const StepProgram& program) {
  std::array<int, kStreamCount> last;
  last.fill(-1);
  for (size_t i = 0; i < program.instructions.size(); ++i) {
    const Instruction& instruction = program.instructions[i];
    const size_t stream = StreamIndex(instruction.stream);
    CHECK_LT(stream, kStreamCount);
    Clock clock = {};
    if (last[stream] >= 0) {
      clock = clocks_[static_cast<size_t>(last[stream])];
    }
    for (const int wait : instruction.waits) {
      CHECK(wait >= 0 && static_cast<size_t>(wait) < i);
      Join(clock, clocks_[static_cast<size_t>(wait)]);
    }
    clock[stream] = ++count_[stream];
    last[stream] = static_cast<int>(i);
    clocks_.push_back(clock);
    stream_.push_back(static_cast<int>(stream));
    position_.push_back(count_[stream]);
  }
}

bool HappensBefore::Before(int a, int b) const {
  if (a < 0 || b < 0) {
    return a < 0 && b >= 0;
  }
  const auto stream = static_cast<size_t>(stream_[static_cast<size_t>(a)]);
  return a != b && ClockOf(b)[stream] >= position_[static_cast<size_t>(a)];
}

void DropImpliedWaits(StepProgram& program) {
  const HappensBefore order(program);
  std::array<int, kStreamCount> last;
  last.fill(-1);
  for (size_t i = 0; i < program.instructions.size(); ++i) {
    Instruction& instruction = program.instructions[i];
    std::vector<int> waits = instruction.waits;
    std::sort(waits.begin(), waits.end());
    waits.erase(std::unique(waits.begin(), waits.end()), waits.end());
    for (size_t w = 0; w < waits.size();) {
      HappensBefore::Clock others = {};
      const int previous = last[StreamIndex(instruction.stream)];
      if (previous >= 0) {
        others = order.ClockOf(previous);
      }
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
    last[StreamIndex(instruction.stream)] = static_cast<int>(i);
  }
}

absl::StatusOr<std::vector<Lifetime>> LifetimesOf(const StepProgram& program,
                                                  const std::vector<ProgramBuffer>& buffers) {
  LifetimeScan scan(program, buffers);
  RETURN_IF_ERROR(scan.Start());
  for (size_t i = 0; i < program.instructions.size(); ++i) {
    const Instruction& instruction = program.instructions[i];
    const int at = static_cast<int>(i);
    if (instruction.op == OpCode::kFree) {
      RETURN_IF_ERROR(scan.Free(at, instruction.freed));
      continue;
    }
    for (const Operand& operand : instruction.operands) {
      if (!buffers[static_cast<size_t>(operand.buffer)].persistent) {
        RETURN_IF_ERROR(scan.Touch(at, operand));
      }
    }
  }
  RETURN_IF_ERROR(scan.End(static_cast<int>(program.instructions.size()) - 1));
  return scan.Take();
}

bool IsCollective(OpCode op) {
  return op == OpCode::kGather || op == OpCode::kReduceScatter || op == OpCode::kOuterReduce ||
         op == OpCode::kOuterGather || op == OpCode::kGatherGradient || op == OpCode::kStatsReduce;
}

bool EndsBefore(const HappensBefore& order, const Lifetime& a, const Lifetime& b) {
  return std::all_of(a.accesses.begin(), a.accesses.end(), [&](int access) {
    return order.Before(access, b.begin);
  });
}

std::string InstructionName(const StepProgram& program, int instruction) {
  if (instruction < 0) {
    return absl::StrCat("program ", PhaseName(program.phase), ", start");
  }
  const Instruction& at = program.instructions[static_cast<size_t>(instruction)];
  const char* part = program.part == LanePart::kWhole ? "" : LanePartName(program.part);
  return absl::StrCat("program ",
                      PhaseName(program.phase),
                      *part == 0 ? "" : " ",
                      part,
                      ", instruction ",
                      instruction,
                      " ",
                      OpName(at.op),
                      at.unit >= 0 ? absl::StrCat(" of unit ", at.unit) : "",
                      at.group >= 0 ? absl::StrCat(" group ", at.group) : "",
                      at.call > 0 ? absl::StrCat(" call ", at.call) : "");
}

}  // namespace ravel::plan
