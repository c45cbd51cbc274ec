#include "common/plan/buffer_plan.h"

#include <algorithm>
#include <cstddef>
#include <limits>
#include <numeric>
#include <set>

#include "common/check.h"
#include "common/plan/program_order.h"

namespace ravel::plan {
namespace {

constexpr int64_t kAlignmentBytes = 256;
constexpr int64_t kPageBytes = 4096;
// Persistent buffers from this size on start at different pages modulo kStaggerPages.
constexpr int64_t kStaggerFromBytes = 16 * kPageBytes;
constexpr int64_t kStaggerPages = 8;
constexpr int64_t kStaggerStep = 3;  // odd, so that eight neighbours all differ

struct ProgramLives {
  HappensBefore order;
  std::vector<Lifetime> lifetimes;
};

absl::StatusOr<std::vector<ProgramLives>> LivesOf(const std::vector<ProgramBuffer>& buffers,
                                                  const std::vector<StepProgram>& programs) {
  std::vector<ProgramLives> lives;
  for (const StepProgram& program : programs) {
    ASSIGN_OR_RETURN(std::vector<Lifetime> lifetimes, LifetimesOf(program, buffers));
    lives.push_back({.order = HappensBefore(program), .lifetimes = std::move(lifetimes)});
  }
  return lives;
}

// Pairs of temporaries of one memory kind that are ever alive together, as far as waits and streams
// tell.
std::set<std::pair<int, int>> Conflicts(const std::vector<ProgramBuffer>& buffers,
                                        const std::vector<ProgramLives>& lives) {
  std::set<std::pair<int, int>> conflicts;
  for (const ProgramLives& program : lives) {
    for (const Lifetime& a : program.lifetimes) {
      for (const Lifetime& b : program.lifetimes) {
        const bool same_arena = buffers[static_cast<size_t>(a.buffer)].memory ==
                                buffers[static_cast<size_t>(b.buffer)].memory;
        if (a.buffer < b.buffer && same_arena && !EndsBefore(program.order, a, b) &&
            !EndsBefore(program.order, b, a)) {
          conflicts.emplace(a.buffer, b.buffer);
        }
      }
    }
  }
  return conflicts;
}

struct Placed {
  int64_t begin = 0;
  int64_t end = 0;
};

enum class Fit { kLowest, kTightest };

// Where an item goes among the placed ones that it conflicts with.
int64_t FindOffset(std::vector<Placed> taken, int64_t bytes, Fit fit) {
  std::sort(taken.begin(), taken.end(), [](const Placed& a, const Placed& b) {
    return a.begin < b.begin;
  });
  int64_t cursor = 0;
  int64_t best = -1;
  int64_t best_gap = std::numeric_limits<int64_t>::max();
  for (const Placed& other : taken) {
    const int64_t gap = other.begin - cursor;
    if (gap >= bytes && gap < best_gap) {
      if (fit == Fit::kLowest) {
        return cursor;
      }
      best = cursor;
      best_gap = gap;
    }
    cursor = std::max(cursor, other.end);
  }
  return best >= 0 ? best : cursor;
}

Packing PackInOrder(const std::vector<PackItem>& items, const std::vector<size_t>& order, Fit fit) {
  Packing packing = {.offsets = std::vector<int64_t>(items.size(), -1), .peak = 0};
  for (const size_t item : order) {
    std::vector<Placed> taken;
    for (const int other : items[item].conflicts) {
      const auto id = static_cast<size_t>(other);
      if (packing.offsets[id] >= 0) {
        taken.push_back(
            {.begin = packing.offsets[id], .end = packing.offsets[id] + items[id].bytes});
      }
    }
    packing.offsets[item] = FindOffset(std::move(taken), items[item].bytes, fit);
    packing.peak = std::max(packing.peak, packing.offsets[item] + items[item].bytes);
  }
  return packing;
}

// A moment of a program: the running instructions, at most one a stream, none before another.
class Moment {
 public:
  explicit Moment(const ProgramLives& lives) : lives_(lives) {}

  bool Start(int instruction) {
    for (const int other : running_) {
      if (lives_.order.Before(instruction, other) || lives_.order.Before(other, instruction)) {
        return false;
      }
    }
    running_.push_back(instruction);
    return true;
  }
  void Stop() { running_.pop_back(); }

  // Buffers of the memory kind that are alive: born, with an access that may still be running or to
  // come.
  std::vector<int> Alive(const std::vector<ProgramBuffer>& buffers, MemoryKind memory) const {
    std::vector<int> alive;
    for (const Lifetime& life : lives_.lifetimes) {
      if (buffers[static_cast<size_t>(life.buffer)].memory == memory && Born(life.begin) &&
          !std::all_of(
              life.accesses.begin(), life.accesses.end(), [&](int at) { return Done(at); })) {
        alive.push_back(life.buffer);
      }
    }
    return alive;
  }

 private:
  bool Done(int instruction) const {
    return std::any_of(running_.begin(), running_.end(), [&](int running) {
      return lives_.order.Before(instruction, running);
    });
  }
  bool Born(int instruction) const {
    return Done(instruction) ||
           std::find(running_.begin(), running_.end(), instruction) != running_.end();
  }

  const ProgramLives& lives_;
  std::vector<int> running_;
};

int64_t SumBytes(const std::vector<ProgramBuffer>& buffers, const std::vector<int>& ids) {
  int64_t sum = 0;
  for (const int id : ids) {
    sum += ArenaBytes(buffers[static_cast<size_t>(id)]);
  }
  return sum;
}

// From each instruction on, lets every other stream run as far as makes things worst.
void SearchPeak(const StepProgram& program,
                const ProgramLives& lives,
                const std::vector<ProgramBuffer>& buffers,
                MemoryKind memory,
                PeakCut& peak) {
  constexpr StreamId kWorkers[] = {
      StreamId::kCompute, StreamId::kGather, StreamId::kReduce, StreamId::kOuter};
  const int count = static_cast<int>(program.instructions.size());
  for (int first = 0; first < count; ++first) {
    Moment moment(lives);
    moment.Start(first);
    std::vector<int> alive = moment.Alive(buffers, memory);
    int64_t bytes = SumBytes(buffers, alive);
    for (const StreamId stream : kWorkers) {
      int chosen = -1;
      for (int other = 0; other < count; ++other) {
        if (program.instructions[static_cast<size_t>(other)].stream != stream || other == first ||
            !moment.Start(other)) {
          continue;
        }
        std::vector<int> more = moment.Alive(buffers, memory);
        const int64_t more_bytes = SumBytes(buffers, more);
        moment.Stop();
        if (more_bytes > bytes) {
          bytes = more_bytes;
          alive = std::move(more);
          chosen = other;
        }
      }
      if (chosen >= 0) {
        moment.Start(chosen);
      }
    }
    if (bytes > peak.bytes) {
      peak = {.bytes = bytes, .buffers = alive};
    }
  }
}

PeakCut PeakOf(const std::vector<ProgramBuffer>& buffers,
               const std::vector<StepProgram>& programs,
               const std::vector<ProgramLives>& lives,
               MemoryKind memory) {
  PeakCut peak;
  for (size_t p = 0; p < programs.size(); ++p) {
    SearchPeak(programs[p], lives[p], buffers, memory, peak);
  }
  return peak;
}

bool Updated(BufferKind kind) {
  return kind == BufferKind::kMainWeight || kind == BufferKind::kExpAvg ||
         kind == BufferKind::kExpAvgSq || kind == BufferKind::kMainGrad;
}

int64_t& ArenaSize(BufferPlan& plan, MemoryKind memory) {
  switch (memory) {
    case MemoryKind::kSymmetric:
      return plan.symmetric_bytes;
    case MemoryKind::kCommon:
      return plan.common_bytes;
    case MemoryKind::kPrivate:
      break;
  }
  return plan.private_bytes;
}

// Persistent buffers one after another; the large ones that the optimizer walks together on
// different pages.
void PlacePersistent(const std::vector<ProgramBuffer>& buffers, BufferPlan& plan) {
  int64_t walked = 0;
  for (size_t i = 0; i < buffers.size(); ++i) {
    const ProgramBuffer& buffer = buffers[i];
    if (!buffer.persistent || buffer.inside >= 0) {
      continue;
    }
    int64_t& end = ArenaSize(plan, buffer.memory);
    int64_t offset = RoundUp(end, kAlignmentBytes);
    if (Updated(buffer.kind) && buffer.bytes >= kStaggerFromBytes) {
      offset = RoundUp(offset, kPageBytes);
      while (offset / kPageBytes % kStaggerPages != walked * kStaggerStep % kStaggerPages) {
        offset += kPageBytes;
      }
      ++walked;
    }
    plan.offsets[i] = offset;
    end = offset + ArenaBytes(buffer);
  }
  for (size_t i = 0; i < buffers.size(); ++i) {
    if (buffers[i].inside >= 0) {
      plan.offsets[i] = plan.offsets[static_cast<size_t>(buffers[i].inside)];
    }
  }
}

void PlaceTemporaries(const std::vector<ProgramBuffer>& buffers,
                      const std::set<std::pair<int, int>>& conflicts,
                      MemoryKind memory,
                      BufferPlan& plan) {
  std::vector<int> ids;
  std::vector<int> item_of(buffers.size(), -1);
  for (size_t i = 0; i < buffers.size(); ++i) {
    if (!buffers[i].persistent && buffers[i].memory == memory) {
      item_of[i] = static_cast<int>(ids.size());
      ids.push_back(static_cast<int>(i));
    }
  }
  if (ids.empty()) {
    return;
  }
  std::vector<PackItem> items;
  for (const int id : ids) {
    items.push_back({.bytes = ArenaBytes(buffers[static_cast<size_t>(id)]), .conflicts = {}});
  }
  for (const auto& [a, b] : conflicts) {
    const int item_a = item_of[static_cast<size_t>(a)];
    const int item_b = item_of[static_cast<size_t>(b)];
    if (item_a >= 0 && item_b >= 0) {
      items[static_cast<size_t>(item_a)].conflicts.push_back(item_b);
      items[static_cast<size_t>(item_b)].conflicts.push_back(item_a);
    }
  }
  const Packing packing = PackItems(items);
  int64_t& end = ArenaSize(plan, memory);
  const int64_t base = RoundUp(end, kAlignmentBytes);
  for (size_t i = 0; i < ids.size(); ++i) {
    plan.offsets[static_cast<size_t>(ids[i])] = base + packing.offsets[i];
  }
  end = base + packing.peak;
}

}  // namespace

int64_t ArenaBytes(const ProgramBuffer& buffer) {
  return buffer.inside >= 0 ? 0 : RoundUp(buffer.bytes, kAlignmentBytes);
}

Packing PackItems(const std::vector<PackItem>& items) {
  std::vector<size_t> given(items.size());
  std::iota(given.begin(), given.end(), size_t{0});
  std::vector<size_t> by_size = given;
  std::stable_sort(by_size.begin(), by_size.end(), [&](size_t a, size_t b) {
    return items[a].bytes > items[b].bytes;
  });
  Packing best = PackInOrder(items, by_size, Fit::kLowest);
  for (const Packing& other : {PackInOrder(items, by_size, Fit::kTightest),
                               PackInOrder(items, given, Fit::kLowest),
                               PackInOrder(items, given, Fit::kTightest)}) {
    if (other.peak < best.peak) {
      best = other;
    }
  }
  return best;
}

absl::StatusOr<BufferPlan> PlanBuffers(const std::vector<ProgramBuffer>& buffers,
                                       const std::vector<StepProgram>& programs) {
  ASSIGN_OR_RETURN(const std::vector<ProgramLives> lives, LivesOf(buffers, programs));
  BufferPlan plan;
  plan.offsets.assign(buffers.size(), 0);
  PlacePersistent(buffers, plan);
  const std::set<std::pair<int, int>> conflicts = Conflicts(buffers, lives);
  for (const ProgramBuffer& buffer : buffers) {
    plan.lower_bound_bytes += buffer.persistent ? ArenaBytes(buffer) : 0;
  }
  for (const MemoryKind memory :
       {MemoryKind::kPrivate, MemoryKind::kSymmetric, MemoryKind::kCommon}) {
    PlaceTemporaries(buffers, conflicts, memory, plan);
    plan.lower_bound_bytes += PeakOf(buffers, programs, lives, memory).bytes;
  }
  return plan;
}

absl::StatusOr<PeakCut> FindPeak(const std::vector<ProgramBuffer>& buffers,
                                 const std::vector<StepProgram>& programs,
                                 MemoryKind memory) {
  ASSIGN_OR_RETURN(const std::vector<ProgramLives> lives, LivesOf(buffers, programs));
  return PeakOf(buffers, programs, lives, memory);
}

}  // namespace ravel::plan
