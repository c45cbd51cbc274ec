// Assigns addresses to all buffers. Persistent buffers lie one after another, the large ones of a
// group on different 4 KiB pages modulo eight, because the optimizer reads them in lockstep and
// equal low address bits collide in caches. Temporaries conflict if neither's last access happens
// before the other's birth in some program; packing then places them so that conflicting ones do
// not overlap. The packed size is compared with a lower bound, and a longer search is made only if
// it is more than 5 % above.

#include "common/plan/memory/buffer_plan.h"

#include <algorithm>
#include <cstddef>
#include <limits>
#include <map>
#include <set>
#include <utility>

#include "common/check.h"
#include "common/plan/memory/packing.h"
#include "common/plan/memory/peak_search.h"
#include "common/plan/program/program_order.h"

namespace ravel::plan {
namespace {

constexpr int64_t kAlignmentBytes = 256;
constexpr int64_t kPageBytes = 4096;
// Persistent buffers of one group from the first size on start at different pages modulo
// kStaggerPages; from the second on these are not even neighbours: room is spent where it does not
// count.
constexpr int64_t kStaggerFromBytes = 16 * kPageBytes;
constexpr int64_t kStaggerWideFromBytes = 256 * kPageBytes;
constexpr int64_t kStaggerPages = 8;

// Packed bytes over their bound that are close enough: 105 / 100.
constexpr std::pair<int64_t, int64_t> kMostOverBound = {105, 100};

struct ProgramLives {
  HappensBefore order;
  std::vector<Lifetime> lifetimes;
};

// The last access of a lifetime. Those before it are before it by the order, too (K2).
InstructionId LastOf(const Lifetime& life) {
  return life.accesses.back();
}

absl::StatusOr<std::vector<ProgramLives>> LivesOf(const ProgramBuffers& buffers,
                                                  const std::vector<StepProgram>& programs) {
  std::vector<ProgramLives> lives;
  for (const StepProgram& program : programs) {
    ASSIGN_OR_RETURN(std::vector<Lifetime> lifetimes, LifetimesOf(program, buffers));
    lives.push_back({.order = HappensBefore(program), .lifetimes = std::move(lifetimes)});
  }
  return lives;
}

using Pairs = std::vector<std::pair<BufferId, BufferId>>;

// Pairs of temporaries of one memory kind that are ever alive together, as far as waits and streams
// tell; ascending, each once.
Pairs Conflicts(const ProgramBuffers& buffers, const std::vector<ProgramLives>& lives) {
  Pairs conflicts;
  for (const ProgramLives& program : lives) {
    const std::vector<Lifetime>& all = program.lifetimes;  // by begin, in list order
    for (size_t i = 0; i < all.size(); ++i) {
      const MemoryKind memory = buffers[all[i].buffer].memory;
      for (size_t j = i + 1; j < all.size(); ++j) {
        const bool same_arena = buffers[all[j].buffer].memory == memory;
        if (same_arena && all[i].buffer != all[j].buffer &&
            !program.order.Before(LastOf(all[i]), all[j].begin) &&
            !program.order.Before(LastOf(all[j]), all[i].begin)) {
          conflicts.push_back(std::minmax(all[i].buffer, all[j].buffer));
        }
      }
    }
  }
  std::sort(conflicts.begin(), conflicts.end());
  conflicts.erase(std::unique(conflicts.begin(), conflicts.end()), conflicts.end());
  return conflicts;
}

PeakCut PeakOf(const ProgramBuffers& buffers,
               const std::vector<ProgramLives>& lives,
               MemoryKind memory) {
  PeakCut peak;
  for (const ProgramLives& program : lives) {
    PeakSearch(program.order, program.lifetimes, buffers, memory).Improve(peak);
  }
  return peak;
}

bool Updated(BufferKind kind) {
  return kind == BufferKind::kMainWeight || kind == BufferKind::kState ||
         kind == BufferKind::kStateScale || kind == BufferKind::kMainGrad;
}

int64_t& ArenaSize(BufferPlan& plan, MemoryKind memory) {
  switch (memory) {
    case MemoryKind::kSymmetric:
      return plan.symmetric_bytes;
    case MemoryKind::kCommon:
      return plan.common_bytes;
    case MemoryKind::kOffload:
      return plan.offload_bytes;
    case MemoryKind::kPrivate:
      break;
  }
  return plan.private_bytes;
}

// The page, modulo kStaggerPages, at or after `page` that is as far from `taken` as asked, if one
// is.
int64_t StaggeredPage(int64_t page, const std::set<int64_t>& taken, int64_t distance) {
  for (int64_t candidate = page; candidate < page + kStaggerPages; ++candidate) {
    const bool far = std::all_of(taken.begin(), taken.end(), [&](int64_t other) {
      const int64_t apart = (candidate % kStaggerPages - other + kStaggerPages) % kStaggerPages;
      return std::min(apart, kStaggerPages - apart) >= distance;
    });
    if (far) {
      return candidate;
    }
  }
  return page;
}

// Persistent buffers one after another; the large ones that the optimizer walks together, those of
// a group, on different pages.
void PlacePersistent(const ProgramBuffers& buffers, BufferPlan& plan) {
  std::map<GroupId, std::set<int64_t>> taken;
  for (const BufferId i : buffers.ids()) {
    const ProgramBuffer& buffer = buffers[i];
    if (!buffer.persistent || buffer.inside >= 0) {
      continue;
    }
    int64_t& end = ArenaSize(plan, buffer.memory);
    const bool offloaded = buffer.memory == MemoryKind::kOffload;  // comes and goes by pages
    int64_t offset = RoundUp(end, offloaded ? kPageBytes : kAlignmentBytes);
    if (Updated(buffer.kind) && buffer.bytes >= kStaggerFromBytes) {
      const int64_t distance = buffer.bytes >= kStaggerWideFromBytes ? 2 : 1;
      std::set<int64_t>& others = taken[buffer.group];
      const int64_t page = StaggeredPage(DivCeil(offset, kPageBytes), others, distance);
      offset = page * kPageBytes;
      others.insert(page % kStaggerPages);
    }
    plan.offsets[i] = offset;
    end = offset + ArenaBytes(buffer);
  }
  for (const BufferId i : buffers.ids()) {
    if (buffers[i].inside >= 0) {
      plan.offsets[i] = plan.offsets[buffers[i].inside];
    }
  }
}

// Temporaries of a memory kind: what is to be placed, and the best place so far.
struct Temporaries {
  MemoryKind memory = MemoryKind::kPrivate;
  std::vector<BufferId> ids;  // per item
  std::vector<PackItem> items;
  int64_t bound = 0;
  Packing packing;
};

Temporaries FindTemporaries(const ProgramBuffers& buffers,
                            const Pairs& conflicts,
                            MemoryKind memory) {
  Temporaries found;
  found.memory = memory;
  constexpr size_t kNoItem = std::numeric_limits<size_t>::max();
  IdVector<BufferId, size_t> item_of(buffers.size(), kNoItem);
  for (const BufferId i : buffers.ids()) {
    if (!buffers[i].persistent && buffers[i].memory == memory) {
      item_of[i] = found.ids.size();
      found.ids.push_back(i);
      found.items.push_back({.bytes = ArenaBytes(buffers[i]), .conflicts = {}});
    }
  }
  for (const auto& [a, b] : conflicts) {
    if (item_of[a] != kNoItem && item_of[b] != kNoItem) {
      found.items[item_of[a]].conflicts.push_back(item_of[b]);
      found.items[item_of[b]].conflicts.push_back(item_of[a]);
    }
  }
  return found;
}

void Place(const Temporaries& temporaries, BufferPlan& plan) {
  if (temporaries.ids.empty()) {
    return;
  }
  int64_t& end = ArenaSize(plan, temporaries.memory);
  const int64_t base = RoundUp(end, kAlignmentBytes);
  for (size_t i = 0; i < temporaries.ids.size(); ++i) {
    plan.offsets[temporaries.ids[i]] = base + temporaries.packing.offsets[i];
  }
  end = base + temporaries.packing.peak;
}

// Bytes that a plan takes more than may be taken; not above 0: few enough.
int64_t Overshoot(const BufferPlan& persistent, const std::vector<Temporaries>& kinds) {
  int64_t packed = persistent.packed_bytes();
  int64_t bound = persistent.lower_bound_bytes;
  for (const Temporaries& kind : kinds) {
    packed += kind.packing.peak;
    bound += kind.bound;
  }
  return packed - bound / kMostOverBound.second * kMostOverBound.first;
}

// Quick bounds and packings are kept where they are close. Else: what no packing of all programs
// together can go below, then closer packings.
void BringTogether(const BufferPlan& persistent, std::vector<Temporaries>& kinds) {
  for (Temporaries& kind : kinds) {
    if (Overshoot(persistent, kinds) > 0 && kind.packing.peak > kind.bound) {
      kind.bound = std::max(kind.bound, HeaviestClique(kind.items));
    }
  }
  for (Temporaries& kind : kinds) {
    const int64_t overshoot = Overshoot(persistent, kinds);
    if (overshoot > 0 && kind.packing.peak > kind.bound) {
      const int64_t enough = std::max(kind.bound, kind.packing.peak - overshoot);
      kind.packing = PackCloser(kind.items, std::move(kind.packing), enough);
    }
  }
}

}  // namespace

int64_t ArenaBytes(const ProgramBuffer& buffer) {
  return buffer.inside >= 0 ? 0 : RoundUp(buffer.bytes, kAlignmentBytes);
}

absl::StatusOr<BufferPlan> PlanBuffers(const ProgramBuffers& buffers,
                                       const std::vector<StepProgram>& programs) {
  ASSIGN_OR_RETURN(const std::vector<ProgramLives> lives, LivesOf(buffers, programs));
  BufferPlan plan;
  plan.offsets.assign(buffers.size(), 0);
  PlacePersistent(buffers, plan);
  const Pairs conflicts = Conflicts(buffers, lives);
  for (const ProgramBuffer& buffer : buffers) {
    const bool stays = buffer.persistent && buffer.memory != MemoryKind::kOffload;
    plan.lower_bound_bytes += stays ? ArenaBytes(buffer) : 0;
  }
  std::vector<Temporaries> kinds;
  for (const MemoryKind memory :
       {MemoryKind::kPrivate, MemoryKind::kSymmetric, MemoryKind::kCommon}) {
    kinds.push_back(FindTemporaries(buffers, conflicts, memory));
    kinds.back().bound = PeakOf(buffers, lives, memory).bytes;
    kinds.back().packing = PackItems(kinds.back().items, kinds.back().bound);
  }
  BringTogether(plan, kinds);
  for (const Temporaries& kind : kinds) {
    Place(kind, plan);
    plan.lower_bound_bytes += kind.bound;
  }
  return plan;
}

absl::StatusOr<PeakCut> FindPeak(const ProgramBuffers& buffers,
                                 const std::vector<StepProgram>& programs,
                                 MemoryKind memory) {
  ASSIGN_OR_RETURN(const std::vector<ProgramLives> lives, LivesOf(buffers, programs));
  return PeakOf(buffers, lives, memory);
}

}  // namespace ravel::plan
