// K6 and K10: byte windows as caps, and prefetch that overlaps.

#include "common/plan/check/program_windows.h"

#include <algorithm>
#include <cstddef>
#include <set>

#include <absl/strings/str_cat.h>

namespace ravel::plan {
namespace {

int64_t BytesOf(const ShardingPlan& plan, BufferId buffer) {
  return plan.buffers[buffer].bytes;
}

// The temporaries of a window that one use cannot do without: weights that it reads, gradients that
// it or another use before it has begun and a later one ends.
std::vector<std::set<BufferId>> NeedsOf(const ProgramFacts& facts, BufferKind kind) {
  std::vector<std::set<BufferId>> needs(facts.use_at.size());
  const auto add = [&](size_t use, BufferId buffer) {
    if (!facts.plan.buffers[buffer].persistent) {
      needs[use].insert(buffer);
    }
  };
  if (kind == BufferKind::kGathered) {
    for (size_t use = 0; use < needs.size(); ++use) {
      for (const BufferId weight : BuffersOf(facts.At(facts.use_at[use]), Role::kWeights)) {
        add(use, weight);
      }
    }
    return needs;
  }
  for (const GradientCall& call : facts.model.gradients) {
    const BufferId staging = facts.index.Find(
        {.kind = BufferKind::kStaging, .owner = call.group, .call = call.call, .slot = 0});
    for (size_t use = call.first_use; use <= call.last_use; ++use) {
      add(use, staging);
    }
  }
  return needs;
}

int64_t Sum(const ProgramFacts& facts, const std::set<BufferId>& buffers) {
  int64_t sum = 0;
  for (const BufferId id : buffers) {
    sum += BytesOf(facts.plan, id);
  }
  return sum;
}

// One kind of temporary and the bytes that it may take.
struct Window {
  const ProgramFacts& facts;
  BufferKind kind;
  int64_t cap;
  std::vector<std::set<BufferId>> needs;  // per use
  std::vector<const Lifetime*> lives;
};

Window WindowOf(const ProgramFacts& facts, BufferKind kind, int64_t cap) {
  Window window = {.facts = facts, .kind = kind, .cap = cap, .needs = {}, .lives = {}};
  window.needs = NeedsOf(facts, kind);
  for (const Lifetime& life : facts.lifetimes) {
    if (facts.plan.buffers[life.buffer].kind == kind) {
      window.lives.push_back(&life);
    }
  }
  return window;
}

// K6. Births of one kind are all on one stream, so the most that can be alive is reached when one
// of them begins. One use that needs more than the window may have it, alone.
absl::Status CheckCap(const Window& window) {
  const ProgramFacts& facts = window.facts;
  int64_t cap = window.cap;
  for (const std::set<BufferId>& needed : window.needs) {
    cap = std::max(cap, Sum(facts, needed));
  }
  std::vector<const Lifetime*> alive;
  for (const Lifetime* born : window.lives) {
    // What ended before one birth has ended before all later ones of the same stream.
    alive.erase(std::remove_if(alive.begin(),
                               alive.end(),
                               [&](const Lifetime* other) {
                                 return facts.Before(other->accesses.back(), born->begin);
                               }),
                alive.end());
    alive.push_back(born);
    int64_t live = 0;
    for (const Lifetime* other : alive) {
      live += BytesOf(facts.plan, other->buffer);
    }
    if (live > cap) {
      return facts.Fault(
          "K6", born->begin, absl::StrCat(live, " bytes alive in a window of ", cap));
    }
  }
  return absl::OkStatus();
}

bool UsedBy(const Lifetime& life, InstructionId instruction) {
  return std::binary_search(life.accesses.begin(), life.accesses.end(), instruction);
}

// K10. What use i + 1 needs must not come into being only after use i (weights), or after the
// reduce of use i (staging), where the window holds both.
absl::Status CheckOverlap(const Window& window) {
  const ProgramFacts& facts = window.facts;
  IdVector<BufferId, std::vector<const Lifetime*>> lives_of(facts.plan.buffers.size());
  for (const Lifetime* life : window.lives) {
    lives_of[life->buffer].push_back(life);
  }
  const auto life_at = [&](BufferId buffer, size_t use) -> const Lifetime* {
    for (const Lifetime* life : lives_of[buffer]) {
      if (UsedBy(*life, facts.use_at[use])) {
        return life;
      }
    }
    return nullptr;
  };
  for (size_t use = 0; use + 1 < facts.use_at.size(); ++use) {
    const std::set<BufferId>& now = window.needs[use];
    std::set<BufferId> both = window.needs[use + 1];
    both.insert(now.begin(), now.end());
    if (now.empty() || Sum(facts, both) > window.cap) {
      continue;
    }
    for (const BufferId buffer : window.needs[use + 1]) {
      const Lifetime* next = life_at(buffer, use + 1);
      for (const BufferId other : now) {
        const Lifetime* current = life_at(other, use);
        if (next == nullptr || current == nullptr || next->begin == current->begin) {
          continue;
        }
        const InstructionId last =
            window.kind == BufferKind::kGathered ? facts.use_at[use] : current->accesses.back();
        if (facts.Before(last, next->begin)) {
          return facts.Fault(
              "K10",
              next->begin,
              absl::StrCat("waits for instruction ", last.value(), ", which it should overlap"));
        }
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckWindows(const ProgramFacts& facts) {
  const ProgramOptions& options = facts.plan.options;
  const Window weights = WindowOf(facts, BufferKind::kGathered, options.gather_window_bytes);
  const Window staging = WindowOf(facts, BufferKind::kStaging, options.staging_window_bytes);
  RETURN_IF_ERROR(CheckCap(weights));
  RETURN_IF_ERROR(CheckCap(staging));
  if (!options.prefetch) {
    return absl::OkStatus();
  }
  RETURN_IF_ERROR(CheckOverlap(weights));
  return CheckOverlap(staging);
}

}  // namespace ravel::plan
