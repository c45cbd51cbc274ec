// Divides a unit's tensors into groups, each with one flat buffer. Tensors whose atoms differ a lot
// cause padding when they share a buffer, but each further group costs a launch per collective.
// Families of equal atoms (at most kMostFamilies) are therefore assigned to groups in every
// possible way, each subset is laid out once, and the cheapest assignment by padding plus launches
// wins. The search is skipped where a single group wastes less than one launch.

#include "common/plan/layout/parameter_groups.h"

#include <algorithm>
#include <cstddef>
#include <map>
#include <numeric>
#include <utility>

#include "common/check.h"
#include "common/model/bundles.h"
#include "common/model/tensor_cuts.h"

namespace ravel::plan {
namespace {

constexpr size_t kMostFamilies = 8;

// Things of a unit that are placed as one: a bundle, or a tensor outside of any.
struct UnitItems {
  std::vector<LayoutItem> items;
  std::vector<std::vector<TensorId>> members;  // tensors of each item, in buffer order
  // These never share a group: quantized, other trained, frozen tensors; of trained ones those
  // whose gradients are whole on each rank of the tensor axis, addends of copies, addends of all.
  std::vector<int> kind;
};
constexpr int kSums = 3;
constexpr int kKinds = 2 * kSums + 1;

int KindOf(const TensorSpec& tensor) {
  if (!tensor.trainable) {
    return kKinds - 1;
  }
  const int sum = !tensor.cut.partial_gradient ? 0 : tensor.cut.copies > 1 ? 1 : 2;
  return (tensor.recipe == Recipe::kNone ? kSums : 0) + sum;
}

LayoutItem ItemOf(const ModelInventory& inventory, const std::vector<TensorId>& tensors) {
  const TensorSpec& first = inventory.tensors[tensors.front()];
  LayoutItem item = {.name = first.name, .elements = 0, .atom_elements = AtomElements(first)};
  for (const TensorId index : tensors) {
    const TensorSpec& part = inventory.tensors[index];
    item.elements += ItemElements(part);
  }
  return item;
}

UnitItems ItemsOf(const ModelInventory& inventory, UnitId unit) {
  UnitItems made;
  for (const TensorId index : inventory.units[unit].tensors) {
    const TensorSpec& tensor = inventory.tensors[index];
    std::vector<TensorId> members = {index};
    if (tensor.bundle >= 0) {
      const BundleSpec& bundle = inventory.bundles[tensor.bundle];
      CHECK_MSG(CanFuse(inventory, bundle),
                "DissolveBundles leaves only bundles that can be fused");
      if (bundle.tensors.front() != index) {
        continue;  // placed with the first part
      }
      members = bundle.tensors;
    }
    made.items.push_back(ItemOf(inventory, members));
    made.members.push_back(std::move(members));
    made.kind.push_back(KindOf(tensor));
  }
  return made;
}

GroupLayout GroupOf(const ModelInventory& inventory,
                    UnitId unit,
                    const FlatLayoutOptions& options,
                    const UnitItems& all,
                    const std::vector<size_t>& chosen) {
  std::vector<LayoutItem> items;
  items.reserve(chosen.size());
  for (const size_t i : chosen) {
    items.push_back(all.items[i]);
  }
  const TensorSpec& first = inventory.tensors[all.members[chosen.front()].front()];
  GroupLayout group = {.unit = unit,
                       .trainable = first.trainable,
                       .recipe = first.recipe,
                       .layout = PlanFlatLayout(items, options),
                       .tensors = {},
                       .tensor_offsets = {}};
  std::vector<std::pair<int64_t, TensorId>> placed;
  for (size_t i = 0; i < items.size(); ++i) {
    int64_t offset = group.layout.offsets[i];
    for (const TensorId tensor : all.members[chosen[i]]) {
      placed.emplace_back(offset, tensor);
      offset += ItemElements(inventory.tensors[tensor]);
    }
  }
  std::sort(placed.begin(), placed.end());
  for (const auto& [offset, tensor] : placed) {
    group.tensor_offsets.push_back(offset);
    group.tensors.push_back(tensor);
  }
  return group;
}

// Splits a set of families over at most so many groups: every way is tried, each subset is laid out
// once.
class GroupSplitter {
 public:
  GroupSplitter(const ModelInventory& inventory,
                UnitId unit,
                int64_t width,
                const GroupOptions& options,
                const UnitItems& all)
      : inventory_(inventory), unit_(unit), width_(width), options_(options), all_(all) {}

  // Appends the cheapest split of the items `chosen` (not empty).
  void Split(const std::vector<size_t>& chosen, GroupLayouts& out) {
    FindFamilies(chosen);
    const uint32_t whole = (uint32_t{1} << families_.size()) - 1;
    best_ = {whole};
    best_cost_ = CostOf(whole);
    if (LayoutOf(whole).layout.padding_elements > options_.launch_elements) {
      std::vector<uint32_t> parts;
      Assign(0, parts);
    }
    for (const uint32_t part : best_) {
      out.push_back(LayoutOf(part));
    }
  }

 private:
  // Items by atom, ascending; beyond kMostFamilies the smallest atoms are one family.
  void FindFamilies(const std::vector<size_t>& chosen) {
    std::map<int64_t, std::vector<size_t>> by_atom;
    for (const size_t i : chosen) {
      by_atom[all_.items[i].atom_elements].push_back(i);
    }
    families_.clear();
    size_t merged = by_atom.size() > kMostFamilies ? by_atom.size() - kMostFamilies : 0;
    for (auto& [atom, items] : by_atom) {
      if (merged > 0 && !families_.empty()) {
        families_.back().insert(families_.back().end(), items.begin(), items.end());
        --merged;
      } else {
        families_.push_back(std::move(items));
      }
    }
    layouts_.clear();
  }

  const GroupLayout& LayoutOf(uint32_t part) {
    const auto found = layouts_.find(part);
    if (found != layouts_.end()) {
      return found->second;
    }
    std::vector<size_t> items;
    for (size_t family = 0; family < families_.size(); ++family) {
      if ((part >> family & 1) != 0) {
        items.insert(items.end(), families_[family].begin(), families_[family].end());
      }
    }
    std::sort(items.begin(), items.end());
    return layouts_
        .emplace(part,
                 GroupOf(inventory_, unit_, {width_, options_.alignment_elements}, all_, items))
        .first->second;
  }

  int64_t CostOf(uint32_t part) {
    return LayoutOf(part).layout.total_elements() + options_.launch_elements;
  }

  // Every way to give families `family`.. to the parts or to a new one.
  void Assign(size_t family, std::vector<uint32_t>& parts) {
    if (family == families_.size()) {
      int64_t cost = 0;
      for (const uint32_t part : parts) {
        cost += CostOf(part);
      }
      if (cost < best_cost_) {
        best_cost_ = cost;
        best_ = parts;
      }
      return;
    }
    const uint32_t bit = uint32_t{1} << family;
    for (size_t i = 0; i < parts.size(); ++i) {
      parts[i] |= bit;
      Assign(family + 1, parts);
      parts[i] &= ~bit;
    }
    if (std::ssize(parts) < options_.most_groups) {
      parts.push_back(bit);
      Assign(family + 1, parts);
      parts.pop_back();
    }
  }

  const ModelInventory& inventory_;
  const UnitId unit_;
  const int64_t width_;
  const GroupOptions& options_;
  const UnitItems& all_;
  std::vector<std::vector<size_t>> families_;
  std::map<uint32_t, GroupLayout> layouts_;
  std::vector<uint32_t> best_;
  int64_t best_cost_ = 0;
};

}  // namespace

GroupLayouts PlanGroups(const ModelInventory& inventory,
                        UnitId unit,
                        int64_t width,
                        const GroupOptions& options) {
  CHECK(options.most_groups > 0 && options.launch_elements >= 0);
  const UnitItems all = ItemsOf(inventory, unit);
  GroupLayouts groups;
  for (int kind = 0; kind < kKinds; ++kind) {
    std::vector<size_t> chosen;
    for (size_t i = 0; i < all.items.size(); ++i) {
      if (all.kind[i] == kind) {
        chosen.push_back(i);
      }
    }
    if (!chosen.empty()) {
      GroupSplitter(inventory, unit, width, options, all).Split(chosen, groups);
    }
  }
  return groups;
}

}  // namespace ravel::plan
