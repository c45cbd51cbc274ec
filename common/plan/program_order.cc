#include "common/plan/program_order.h"

#include <algorithm>
#include <cstddef>
#include <string>
#include <utility>

#include <absl/strings/str_cat.h>

#include "common/check.h"

namespace ravel::plan {
namespace {

size_t StreamIndex(const Instruction& instruction) {
  return static_cast<size_t>(instruction.stream) - 1;
}

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

// The instruction that brings a temporary buffer of this kind to life.
bool Begins(const Instruction& instruction, BufferKind kind) {
  switch (kind) {
    case BufferKind::kGathered:
      return instruction.op == OpCode::kGather;
    case BufferKind::kStaging:
      return instruction.op == OpCode::kAllocStaging;
    case BufferKind::kSaved:
      return instruction.op == OpCode::kForward;
    default:  // lives during one instruction
      return true;
  }
}

bool LastsOneInstruction(BufferKind kind) {
  return kind == BufferKind::kWorkspace || kind == BufferKind::kReceive;
}

bool EndsByFree(BufferKind kind) {
  return kind == BufferKind::kGathered || kind == BufferKind::kStaging;
}

// Follows which lifetime of each buffer is open.
class LifetimeScan {
 public:
  LifetimeScan(const StepProgram& program, const std::vector<ProgramBuffer>& buffers)
      : program_(program), buffers_(buffers), open_(buffers.size(), -1) {}

  absl::Status Access(int at, int buffer) {
    const auto id = static_cast<size_t>(buffer);
    const BufferKind kind = buffers_[id].kind;
    const Instruction& instruction = program_.instructions[static_cast<size_t>(at)];
    if (Begins(instruction, kind)) {
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
    const bool saved_ends = kind == BufferKind::kSaved &&
                            (instruction.op == OpCode::kBackward || program_.phase == Phase::kEval);
    if (LastsOneInstruction(kind) || saved_ends) {
      open_[id] = -1;
    }
    return absl::OkStatus();
  }

  absl::Status Free(int at, int buffer) {
    if (buffer < 0 || static_cast<size_t>(buffer) >= buffers_.size() ||
        !EndsByFree(buffers_[static_cast<size_t>(buffer)].kind) ||
        open_[static_cast<size_t>(buffer)] < 0) {
      return Fault(at, "frees what is not alive: buffer ", buffer);
    }
    int& open = open_[static_cast<size_t>(buffer)];
    lifetimes_[static_cast<size_t>(open)].freed = at;
    open = -1;
    return absl::OkStatus();
  }

  absl::Status End(int at) {
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
  std::vector<int> open_;  // per buffer: index into lifetimes_, or -1
  std::vector<Lifetime> lifetimes_;
};

}  // namespace

HappensBefore::HappensBefore(const StepProgram& program) {
  std::array<int, kStreams> count = {};
  std::array<int, kStreams> last = {-1, -1, -1, -1};
  for (size_t i = 0; i < program.instructions.size(); ++i) {
    const Instruction& instruction = program.instructions[i];
    const size_t stream = StreamIndex(instruction);
    CHECK_LT(stream, kStreams);
    Clock clock = {};
    if (last[stream] >= 0) {
      clock = clocks_[static_cast<size_t>(last[stream])];
    }
    for (const int wait : instruction.waits) {
      CHECK(wait >= 0 && static_cast<size_t>(wait) < i);
      Join(clock, clocks_[static_cast<size_t>(wait)]);
    }
    clock[stream] = ++count[stream];
    last[stream] = static_cast<int>(i);
    clocks_.push_back(clock);
    stream_.push_back(static_cast<int>(stream));
    position_.push_back(count[stream]);
  }
}

bool HappensBefore::Before(int a, int b) const {
  const auto stream = static_cast<size_t>(stream_[static_cast<size_t>(a)]);
  return a != b && ClockOf(b)[stream] >= position_[static_cast<size_t>(a)];
}

void DropImpliedWaits(StepProgram& program) {
  const HappensBefore order(program);
  std::array<int, HappensBefore::kStreams> last = {-1, -1, -1, -1};
  for (size_t i = 0; i < program.instructions.size(); ++i) {
    Instruction& instruction = program.instructions[i];
    std::vector<int> waits = instruction.waits;
    std::sort(waits.begin(), waits.end());
    waits.erase(std::unique(waits.begin(), waits.end()), waits.end());
    for (size_t w = 0; w < waits.size();) {
      HappensBefore::Clock others = {};
      const int previous = last[StreamIndex(instruction)];
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
    last[StreamIndex(instruction)] = static_cast<int>(i);
  }
}

BufferIndex::BufferIndex(const std::vector<ProgramBuffer>& buffers) : buffers_(buffers) {}

int BufferIndex::Find(const Key& key) const {
  for (size_t i = 0; i < buffers_.size(); ++i) {
    const ProgramBuffer& buffer = buffers_[i];
    if (buffer.kind == key.kind && buffer.unit == key.unit && buffer.call == key.call &&
        buffer.slot == key.slot) {
      return static_cast<int>(i);
    }
  }
  return -1;
}

std::vector<int> BufferIndex::OfUnit(BufferKind kind, int unit) const {
  std::vector<int> found;
  for (size_t i = 0; i < buffers_.size(); ++i) {
    if (buffers_[i].kind == kind && buffers_[i].unit == unit) {
      found.push_back(static_cast<int>(i));
    }
  }
  return found;
}

std::vector<BufferAccess> AccessesOf(const Instruction& instruction, const BufferIndex& index) {
  std::vector<BufferAccess> accesses;
  const auto reads = [&](int buffer) {
    if (buffer >= 0) {
      accesses.push_back({.buffer = buffer, .writes = false});
    }
  };
  const auto writes = [&](int buffer) {
    if (buffer >= 0) {
      accesses.push_back({.buffer = buffer, .writes = true});
    }
  };
  const int shared = index.Find({.kind = BufferKind::kShared, .unit = -1});
  switch (instruction.op) {
    case OpCode::kGather:
      reads(index.Find({.kind = BufferKind::kMainWeight, .unit = instruction.unit}));
      writes(instruction.gathered);
      break;
    case OpCode::kForward:
    case OpCode::kBackward:
      reads(instruction.gathered);
      reads(instruction.borrowed_gathered);
      if (instruction.op == OpCode::kBackward) {
        reads(instruction.saved);
      } else {
        writes(instruction.saved);
      }
      writes(instruction.workspace);
      writes(instruction.staging);
      writes(instruction.borrowed_staging);
      writes(shared);
      break;
    case OpCode::kAllocStaging:
      writes(instruction.staging);
      break;
    case OpCode::kReduceScatter:
      reads(instruction.staging);
      writes(instruction.receive);
      for (const int grad : index.OfUnit(BufferKind::kMainGrad, instruction.unit)) {
        writes(grad);
      }
      break;
    case OpCode::kStatsReduce:
      reads(shared);
      break;
    case OpCode::kOptimizerStep:
      for (const int grad : index.OfUnit(BufferKind::kMainGrad, instruction.unit)) {
        reads(grad);
      }
      writes(index.Find({.kind = BufferKind::kMainWeight, .unit = instruction.unit}));
      writes(index.Find({.kind = BufferKind::kExpAvg, .unit = instruction.unit}));
      writes(index.Find({.kind = BufferKind::kExpAvgSq, .unit = instruction.unit}));
      break;
    case OpCode::kFree:
    case OpCode::kDecideStep:
    case OpCode::kEndPhase:
    case OpCode::kRecompute:
    case OpCode::kAccumulateGrad:
    case OpCode::kOuterReduce:
    case OpCode::kOuterGather:
    case OpCode::kJoinGradients:
    case OpCode::kGatherGradient:
      break;
  }
  return accesses;
}

absl::StatusOr<std::vector<Lifetime>> LifetimesOf(const StepProgram& program,
                                                  const std::vector<ProgramBuffer>& buffers) {
  const BufferIndex index(buffers);
  LifetimeScan scan(program, buffers);
  for (size_t i = 0; i < program.instructions.size(); ++i) {
    const Instruction& instruction = program.instructions[i];
    const int at = static_cast<int>(i);
    if (instruction.op == OpCode::kFree) {
      RETURN_IF_ERROR(scan.Free(at, instruction.freed));
      continue;
    }
    for (const BufferAccess& access : AccessesOf(instruction, index)) {
      if (!buffers[static_cast<size_t>(access.buffer)].persistent) {
        RETURN_IF_ERROR(scan.Access(at, access.buffer));
      }
    }
  }
  RETURN_IF_ERROR(scan.End(static_cast<int>(program.instructions.size()) - 1));
  return scan.Take();
}

bool EndsBefore(const HappensBefore& order, const Lifetime& a, const Lifetime& b) {
  return std::all_of(a.accesses.begin(), a.accesses.end(), [&](int access) {
    return order.Before(access, b.begin);
  });
}

std::string InstructionName(const StepProgram& program, int instruction) {
  const Instruction& at = program.instructions[static_cast<size_t>(instruction)];
  return absl::StrCat("program ",
                      PhaseName(program.phase),
                      ", instruction ",
                      instruction,
                      " ",
                      OpName(at.op),
                      at.unit >= 0 ? absl::StrCat(" of unit ", at.unit) : "");
}

}  // namespace ravel::plan
