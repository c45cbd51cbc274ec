#include "common/plan/flat_layout.h"

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <optional>

#include "common/check.h"

namespace ravel::plan {
namespace {

constexpr int64_t kOneDimensionalRow = 256;
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
  // matter: where the shard's free part begins, and the first one that meets the next boundary at
  // an atom.
  int64_t FirstLegal(const LayoutItem& item, int64_t cursor) const {
    const int64_t step = BoundedLcm(item.atom_elements, options_.alignment_elements);
    for (int64_t start = cursor; start < total_ || (item.elements == 0 && start == total_);
         start = (start / shard_ + 1) * shard_) {
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

int64_t AtomElements(const TensorSpec& tensor) {
  if (tensor.shape.size() > 1) {
    return RowElements(tensor.shape) * tensor.block_rows;
  }
  return std::max<int64_t>(1, std::min(ElementCount(tensor.shape), kOneDimensionalRow));
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

namespace {

// Things of a unit that are placed as one: a bundle, or a tensor outside of any.
struct UnitItems {
  std::vector<LayoutItem> items;
  std::vector<std::vector<int>> members;  // tensors of each item, in buffer order
  std::vector<bool> trainable;
};

LayoutItem ItemOf(const ModelInventory& inventory, const std::vector<int>& tensors) {
  const TensorSpec& first = inventory.tensors[static_cast<size_t>(tensors.front())];
  LayoutItem item = {.name = first.name, .elements = 0, .atom_elements = AtomElements(first)};
  for (const int index : tensors) {
    const TensorSpec& part = inventory.tensors[static_cast<size_t>(index)];
    CHECK(part.unit == first.unit && AtomElements(part) == item.atom_elements);
    item.elements += ElementCount(part.shape);
  }
  return item;
}

// A bundle whose parts are not all trained is placed part by part.
bool Fused(const ModelInventory& inventory, const BundleSpec& bundle) {
  const auto trained = [&](int index) {
    return inventory.tensors[static_cast<size_t>(index)].trainable;
  };
  return std::all_of(bundle.tensors.begin(), bundle.tensors.end(), [&](int index) {
    return trained(index) == trained(bundle.tensors.front());
  });
}

UnitItems ItemsOf(const ModelInventory& inventory, int unit) {
  UnitItems made;
  for (const int index : inventory.units[static_cast<size_t>(unit)].tensors) {
    const TensorSpec& tensor = inventory.tensors[static_cast<size_t>(index)];
    std::vector<int> members = {index};
    if (tensor.bundle >= 0) {
      const BundleSpec& bundle = inventory.bundles[static_cast<size_t>(tensor.bundle)];
      if (Fused(inventory, bundle)) {
        if (bundle.tensors.front() != index) {
          continue;  // placed with the first part
        }
        members = bundle.tensors;
      }
    }
    made.items.push_back(ItemOf(inventory, members));
    made.members.push_back(std::move(members));
    made.trainable.push_back(tensor.trainable);
  }
  return made;
}

GroupLayout GroupOf(const ModelInventory& inventory,
                    int unit,
                    int64_t width,
                    const UnitItems& all,
                    const std::vector<size_t>& chosen) {
  std::vector<LayoutItem> items;
  items.reserve(chosen.size());
  for (const size_t i : chosen) {
    items.push_back(all.items[i]);
  }
  GroupLayout group = {.unit = unit,
                       .trainable = chosen.empty() || all.trainable[chosen.front()],
                       .layout = PlanFlatLayout(items, {.width = width}),
                       .tensors = {},
                       .tensor_offsets = {}};
  std::vector<std::pair<int64_t, int>> placed;
  for (size_t i = 0; i < items.size(); ++i) {
    int64_t offset = group.layout.offsets[i];
    for (const int tensor : all.members[chosen[i]]) {
      placed.emplace_back(offset, tensor);
      offset += ElementCount(inventory.tensors[static_cast<size_t>(tensor)].shape);
    }
  }
  std::sort(placed.begin(), placed.end());
  for (const auto& [offset, tensor] : placed) {
    group.tensor_offsets.push_back(offset);
    group.tensors.push_back(tensor);
  }
  return group;
}

}  // namespace

GroupLayout PlanGroupLayout(const ModelInventory& inventory, int unit, int64_t width) {
  const UnitItems all = ItemsOf(inventory, unit);
  std::vector<size_t> everything(all.items.size());
  std::iota(everything.begin(), everything.end(), size_t{0});
  return GroupOf(inventory, unit, width, all, everything);
}

std::vector<GroupLayout> PlanGroups(const ModelInventory& inventory,
                                    int unit,
                                    int64_t width,
                                    const GroupOptions& options) {
  CHECK(options.most_groups > 0);
  const UnitItems all = ItemsOf(inventory, unit);
  std::vector<GroupLayout> groups;
  for (const bool trainable : {true, false}) {
    std::vector<size_t> chosen;
    for (size_t i = 0; i < all.items.size(); ++i) {
      if (all.trainable[i] == trainable) {
        chosen.push_back(i);
      }
    }
    if (!chosen.empty()) {
      groups.push_back(GroupOf(inventory, unit, width, all, chosen));
    }
  }
  return groups;
}

std::vector<OwnedPiece> OwnedPieces(const ModelInventory& inventory,
                                    const GroupLayout& group,
                                    int64_t rank) {
  CHECK(rank >= 0 && rank < group.layout.width);
  const int64_t shard_begin = rank * group.layout.shard_elements;
  const int64_t shard_end = shard_begin + group.layout.shard_elements;
  std::vector<OwnedPiece> pieces;
  for (size_t i = 0; i < group.tensors.size(); ++i) {
    const TensorSpec& tensor = inventory.tensors[static_cast<size_t>(group.tensors[i])];
    const int64_t offset = group.tensor_offsets[i];
    const int64_t begin = std::max(offset, shard_begin);
    const int64_t end = std::min(offset + ElementCount(tensor.shape), shard_end);
    if (begin < end) {
      pieces.push_back({.tensor = group.tensors[i],
                        .begin = begin - offset,
                        .end = end - offset,
                        .shard_offset = begin - shard_begin});
    }
  }
  return pieces;
}

}  // namespace ravel::plan
