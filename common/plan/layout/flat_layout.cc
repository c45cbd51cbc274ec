// Finds the smallest equal shard size S for which all items can be placed in width * S elements. An
// item may be cut by a shard boundary only at a multiple of its atom, measured from the item's
// start. For each candidate S, ascending, a greedy placer takes the item with the smallest gap
// next; the first S that works is used. Candidates are the smallest possible sizes and multiples of
// combinations of atoms, since legal sizes cluster there. The LCM baseline, which always works, is
// kept as an upper bound. Cost: candidates times items squared.

#include "common/plan/layout/flat_layout.h"

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <optional>

#include "common/check.h"

namespace ravel::plan {
namespace {

// Larger alignments than this are not worth a candidate; also keeps products inside 64 bits.
constexpr int64_t kMostAlignment = int64_t{1} << 40;
constexpr size_t kMostAtoms = 8;
constexpr int kSmallSteps = 64;
constexpr int kCandidatesPerAtomSet = 4;

// The least common multiple, or kMostAlignment + 1 when that is larger.
int64_t BoundedLcm(int64_t a, int64_t b) {
  if (a > kMostAlignment || b > kMostAlignment) {
    return kMostAlignment + 1;
  }
  const int64_t reduced = a / std::gcd(a, b);
  return reduced > kMostAlignment / b ? kMostAlignment + 1 : reduced * b;
}

// One search for places: the cursor moves right, every gap it leaves is padding.
class Placer {
 public:
  Placer(const std::vector<LayoutItem>& items, const FlatLayoutOptions& options, int64_t shard)
      : items_(items), options_(options), shard_(shard), total_(shard * options.width) {}

  // Offsets by item, or nothing when the greedy order does not fit.
  std::optional<std::vector<int64_t>> Place() {
    std::vector<int64_t> offsets(items_.size(), 0);
    std::vector<size_t> left(items_.size());
    std::iota(left.begin(), left.end(), size_t{0});
    int64_t cursor = 0;
    while (!left.empty()) {
      size_t best = 0;
      int64_t best_offset = -1;
      for (size_t i = 0; i < left.size(); ++i) {
        const int64_t offset = FirstLegal(items_[left[i]], cursor);
        if (offset >= 0 && (best_offset < 0 || Before(left[i], offset, left[best], best_offset))) {
          best = i;
          best_offset = offset;
        }
      }
      if (best_offset < 0) {
        return std::nullopt;
      }
      offsets[left[best]] = best_offset;
      cursor = RoundUp(best_offset + items_[left[best]].elements, options_.alignment_elements);
      left.erase(left.begin() + static_cast<std::ptrdiff_t>(best));
    }
    return offsets;
  }

 private:
  // Smallest gap, then larger, then by name.
  bool Before(size_t a, int64_t offset_a, size_t b, int64_t offset_b) const {
    if (offset_a != offset_b) {
      return offset_a < offset_b;
    }
    if (items_[a].elements != items_[b].elements) {
      return items_[a].elements > items_[b].elements;
    }
    return items_[a].name < items_[b].name;
  }

  bool Legal(const LayoutItem& item, int64_t offset) const {
    const int64_t end = offset + item.elements;
    if (end > total_) {
      return false;
    }
    const int64_t boundary = (offset / shard_ + 1) * shard_;
    if (boundary >= end) {
      return true;
    }
    return (boundary - offset) % item.atom_elements == 0 &&
           (boundary + shard_ >= end || shard_ % item.atom_elements == 0);
  }

  // The smallest legal offset at or after an aligned cursor, or -1. Within a shard only two offsets
  // matter: where its free part begins, and the first one that meets the next boundary at an atom.
  // All shards after the cursor's are alike, so the next one stands for them.
  int64_t FirstLegal(const LayoutItem& item, int64_t cursor) const {
    const int64_t step = BoundedLcm(item.atom_elements, options_.alignment_elements);
    const int64_t next = (cursor / shard_ + 1) * shard_;
    for (const int64_t start : {cursor, next}) {
      if (Legal(item, start)) {
        return start;
      }
      const int64_t boundary = (start / shard_ + 1) * shard_;
      const int64_t steps = (boundary - start) / step;
      if (steps > 0 && Legal(item, boundary - steps * step)) {
        return boundary - steps * step;
      }
    }
    return -1;
  }

  const std::vector<LayoutItem>& items_;
  const FlatLayoutOptions& options_;
  const int64_t shard_;
  const int64_t total_;
};

// Shard sizes to try, ascending: multiples of the alignment, and of the lcm of each set of atoms.
std::vector<int64_t> Candidates(const std::vector<LayoutItem>& items,
                                const FlatLayoutOptions& options) {
  int64_t sum = 0;
  int64_t aligned_sum = 0;
  std::vector<int64_t> atoms;
  for (const LayoutItem& item : items) {
    sum += item.elements;
    aligned_sum += RoundUp(item.elements, options.alignment_elements);
    atoms.push_back(item.atom_elements);
  }
  std::sort(atoms.begin(), atoms.end());
  atoms.erase(std::unique(atoms.begin(), atoms.end()), atoms.end());
  if (atoms.size() > kMostAtoms) {  // the coarsest ones decide
    atoms.erase(atoms.begin(), atoms.end() - static_cast<std::ptrdiff_t>(kMostAtoms));
  }
  const int64_t least =
      RoundUp(std::max<int64_t>(1, DivCeil(sum, options.width)), options.alignment_elements);
  // Everything on one rank: always legal.
  std::vector<int64_t> candidates = {std::max(least, aligned_sum)};
  for (int i = 0; i < kSmallSteps; ++i) {
    candidates.push_back(least + i * options.alignment_elements);
  }
  for (size_t set = 1; set < size_t{1} << atoms.size(); ++set) {
    int64_t multiple = options.alignment_elements;
    for (size_t i = 0; i < atoms.size(); ++i) {
      if ((set >> i & 1) != 0) {
        multiple = BoundedLcm(multiple, atoms[i]);
      }
    }
    if (multiple > kMostAlignment || multiple > candidates.front() + least) {
      continue;
    }
    for (int i = 0; i < kCandidatesPerAtomSet; ++i) {
      candidates.push_back(RoundUp(least, multiple) + i * multiple);
    }
  }
  std::sort(candidates.begin(), candidates.end());
  candidates.erase(std::unique(candidates.begin(), candidates.end()), candidates.end());
  return candidates;
}

// Input order, every offset a multiple of the item's own alignment, shards a multiple of all of
// them: always legal, often wasteful. Nothing when the common multiple is absurd.
std::optional<FlatLayout> Baseline(const std::vector<LayoutItem>& items,
                                   const FlatLayoutOptions& options) {
  FlatLayout layout = {.width = options.width, .shard_elements = 0, .offsets = {}};
  int64_t common = options.alignment_elements;
  int64_t cursor = 0;
  for (const LayoutItem& item : items) {
    const int64_t multiple = BoundedLcm(item.atom_elements, options.alignment_elements);
    common = BoundedLcm(common, multiple);
    if (common > kMostAlignment) {
      return std::nullopt;
    }
    cursor = RoundUp(cursor, multiple);
    layout.offsets.push_back(cursor);
    cursor += item.elements;
  }
  layout.shard_elements = RoundUp(std::max<int64_t>(1, DivCeil(cursor, options.width)), common);
  return layout;
}

}  // namespace

FlatLayout PlanFlatLayout(const std::vector<LayoutItem>& items, const FlatLayoutOptions& options) {
  CHECK(options.width > 0 && options.alignment_elements > 0);
  int64_t sum = 0;
  for (const LayoutItem& item : items) {
    CHECK(item.elements >= 0 && item.atom_elements > 0);
    sum += item.elements;
  }
  FlatLayout layout = {.width = options.width, .shard_elements = 0, .offsets = {}};
  for (const int64_t shard : Candidates(items, options)) {
    std::optional<std::vector<int64_t>> offsets = Placer(items, options, shard).Place();
    if (offsets.has_value()) {
      layout.shard_elements = shard;
      layout.offsets = *std::move(offsets);
      break;
    }
  }
  CHECK_MSG(layout.shard_elements > 0, "all items on one rank always fit");
  std::optional<FlatLayout> baseline = Baseline(items, options);
  if (baseline.has_value() && baseline->shard_elements < layout.shard_elements) {
    layout = *std::move(baseline);
  }
  layout.padding_elements = layout.total_elements() - sum;
  return layout;
}

}  // namespace ravel::plan
