#include "common/plan/program_windows.h"

#include <algorithm>
#include <cstddef>
#include <set>

#include <absl/strings/str_cat.h>

namespace ravel::plan {
namespace {

int64_t BytesOf(const ShardingPlan& plan, int buffer) {
  return plan.buffers[static_cast<size_t>(buffer)].bytes;
}

// The buffers of a window that one use cannot do without.
std::set<int> NeededBy(const WindowCheck& check, size_t use, BufferKind kind) {
  const Instruction& at = check.program.instructions[static_cast<size_t>(check.use_at[use])];
  std::set<int> needed;
  const bool weights = kind == BufferKind::kGathered;
  for (const int id : weights ? std::vector<int>{at.gathered, at.borrowed_gathered}
                              : std::vector<int>{at.staging, at.borrowed_staging}) {
    if (id >= 0) {
      needed.insert(id);
    }
  }
  return needed;
}

int64_t Sum(const WindowCheck& check, const std::set<int>& buffers) {
  int64_t sum = 0;
  for (const int id : buffers) {
    sum += BytesOf(check.plan, id);
  }
  return sum;
}

// K6. Births of one kind are all on one stream, so the most that can be alive is reached when one
// of them begins. One use that needs more than the window may have it, alone.
absl::Status CheckCap(const WindowCheck& check, BufferKind kind, int64_t cap) {
  for (size_t use = 0; use < check.use_at.size(); ++use) {
    cap = std::max(cap, Sum(check, NeededBy(check, use, kind)));
  }
  for (const Lifetime& born : check.lifetimes) {
    if (check.plan.buffers[static_cast<size_t>(born.buffer)].kind != kind) {
      continue;
    }
    int64_t live = 0;
    for (const Lifetime& other : check.lifetimes) {
      const bool before = other.begin == born.begin || check.order.Before(other.begin, born.begin);
      if (check.plan.buffers[static_cast<size_t>(other.buffer)].kind == kind && before &&
          !EndsBefore(check.order, other, born)) {
        live += BytesOf(check.plan, other.buffer);
      }
    }
    if (live > cap) {
      return absl::FailedPreconditionError(absl::StrCat("K6: ",
                                                        InstructionName(check.program, born.begin),
                                                        ": ",
                                                        live,
                                                        " bytes alive in a window of ",
                                                        cap));
    }
  }
  return absl::OkStatus();
}

// K10. What use i + 1 needs must not come into being only after use i (weights), or after the
// reduce of use i (staging), where the window holds both.
absl::Status CheckOverlap(const WindowCheck& check, BufferKind kind, int64_t cap) {
  for (size_t use = 0; use + 1 < check.use_at.size(); ++use) {
    const std::set<int> now = NeededBy(check, use, kind);
    std::set<int> both = NeededBy(check, use + 1, kind);
    const std::set<int> next = both;
    both.insert(now.begin(), now.end());
    if (now.empty() || Sum(check, both) > cap) {
      continue;
    }
    for (const Lifetime& life : check.lifetimes) {
      const bool used_next =
          std::find(life.accesses.begin(), life.accesses.end(), check.use_at[use + 1]) !=
          life.accesses.end();
      if (next.count(life.buffer) == 0 || !used_next) {
        continue;
      }
      for (const Lifetime& current : check.lifetimes) {
        const bool used_now =
            std::find(current.accesses.begin(), current.accesses.end(), check.use_at[use]) !=
            current.accesses.end();
        if (now.count(current.buffer) > 0 && used_now && life.begin != current.begin &&
            check.order.Before(
                kind == BufferKind::kGathered ? check.use_at[use] : current.accesses.back(),
                life.begin)) {
          return absl::FailedPreconditionError(
              absl::StrCat("K10: ",
                           InstructionName(check.program, life.begin),
                           ": waits for instruction ",
                           current.accesses.back(),
                           ", which it should overlap"));
        }
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckWindows(const WindowCheck& check) {
  const ProgramOptions& options = check.plan.options;
  RETURN_IF_ERROR(CheckCap(check, BufferKind::kGathered, options.gather_window_bytes));
  RETURN_IF_ERROR(CheckCap(check, BufferKind::kStaging, options.staging_window_bytes));
  if (!options.prefetch) {
    return absl::OkStatus();
  }
  RETURN_IF_ERROR(CheckOverlap(check, BufferKind::kGathered, options.gather_window_bytes));
  return CheckOverlap(check, BufferKind::kStaging, options.staging_window_bytes);
}

}  // namespace ravel::plan
