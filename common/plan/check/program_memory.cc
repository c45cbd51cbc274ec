// K2 and K3: no two accesses race, and buffers that share addresses are never alive together.

#include "common/plan/check/program_memory.h"

#include <algorithm>
#include <cstddef>
#include <string>

#include <absl/strings/str_cat.h>

namespace ravel::plan {
namespace {

// The accesses of one piece of persistent memory so far, in list order.
struct MemoryHistory {
  InstructionId write = {};
  std::vector<InstructionId> reads;  // since then
};

// Persistent buffers, those inside another as that one: a write waits for all before it, a read for
// the last write.
absl::Status CheckPersistent(const ProgramFacts& facts) {
  const ProgramBuffers& buffers = facts.plan.buffers;
  IdVector<BufferId, MemoryHistory> histories(buffers.size());
  for (const InstructionId i : facts.program.instructions.ids()) {
    for (const Operand& operand : facts.At(i).operands) {
      BufferId id = operand.buffer;
      if (!buffers[id].persistent) {
        continue;
      }
      while (buffers[id].inside >= 0) {
        id = buffers[id].inside;
      }
      MemoryHistory& history = histories[id];
      std::vector<InstructionId> earlier;
      if (operand.writes()) {
        earlier = history.reads;
      }
      earlier.push_back(history.write);
      for (const InstructionId other : earlier) {
        if (other >= 0 && other != i && !facts.Before(other, i)) {
          return facts.Fault("K2",
                             i,
                             absl::StrCat("is not ordered after instruction ",
                                          other.value(),
                                          " on ",
                                          facts.BufferName(operand.buffer)));
        }
      }
      if (operand.writes()) {
        history = {.write = i, .reads = {}};
      } else {
        history.reads.push_back(i);
      }
    }
  }
  return absl::OkStatus();
}

bool Writes(const ProgramFacts& facts, InstructionId at, BufferId buffer) {
  const std::vector<Operand>& operands = facts.At(at).operands;
  return std::any_of(operands.begin(), operands.end(), [&](const Operand& operand) {
    return operand.buffer == buffer && operand.writes();
  });
}

// K2: a write of a lifetime is after all before it, a read after the last write, and the last
// access, whatever it does, after all others.
absl::Status CheckTemporaries(const ProgramFacts& facts) {
  for (const Lifetime& life : facts.lifetimes) {
    MemoryHistory history = {.write = life.accesses.front(), .reads = {}};
    for (size_t i = 1; i < life.accesses.size(); ++i) {
      const InstructionId at = life.accesses[i];
      const bool writes = i + 1 == life.accesses.size() || Writes(facts, at, life.buffer);
      std::vector<InstructionId> earlier = {history.write};
      if (writes) {
        earlier.insert(earlier.end(), history.reads.begin(), history.reads.end());
      }
      for (const InstructionId other : earlier) {
        if (other != at && !facts.Before(other, at)) {
          return facts.Fault("K2",
                             at,
                             absl::StrCat("is not ordered after instruction ",
                                          other.value(),
                                          " on ",
                                          facts.BufferName(life.buffer)));
        }
      }
      if (writes) {
        history = {.write = at, .reads = {}};
      } else {
        history.reads.push_back(at);
      }
    }
  }
  return absl::OkStatus();
}

// K3. The last access of a lifetime ends it (K2).
absl::Status CheckAddresses(const ProgramFacts& facts) {
  struct Place {
    MemoryKind memory;
    int64_t begin;
    int64_t end;
    const Lifetime* life;
  };
  std::vector<Place> places;
  for (const Lifetime& life : facts.lifetimes) {
    const int64_t begin = facts.plan.memory.offsets[life.buffer];
    const ProgramBuffer& buffer = facts.plan.buffers[life.buffer];
    places.push_back({buffer.memory, begin, begin + buffer.bytes, &life});
  }
  std::stable_sort(places.begin(), places.end(), [](const Place& a, const Place& b) {
    return a.memory != b.memory ? a.memory < b.memory : a.begin < b.begin;
  });
  for (size_t a = 0; a < places.size(); ++a) {
    for (size_t b = a + 1; b < places.size() && places[b].memory == places[a].memory &&
                           places[b].begin < places[a].end;
         ++b) {
      const bool in_order = places[a].life->begin <= places[b].life->begin;
      const Lifetime& first = in_order ? *places[a].life : *places[b].life;
      const Lifetime& second = in_order ? *places[b].life : *places[a].life;
      if (places[b].begin < places[b].end && !facts.Before(first.accesses.back(), second.begin)) {
        return facts.Fault("K3",
                           second.begin,
                           absl::StrCat(facts.BufferName(second.buffer),
                                        " may overwrite ",
                                        facts.BufferName(first.buffer)));
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckMemory(const ProgramFacts& facts) {
  RETURN_IF_ERROR(CheckTemporaries(facts));
  RETURN_IF_ERROR(CheckPersistent(facts));
  return CheckAddresses(facts);
}

}  // namespace ravel::plan
