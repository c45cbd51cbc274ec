#include "common/plan/program_uses.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <utility>

namespace ravel::plan {
namespace {

std::vector<int> OrderOf(const ModelInventory& inventory) {
  if (!inventory.order.empty()) {
    return inventory.order;
  }
  std::vector<int> order(inventory.units.size());
  std::iota(order.begin(), order.end(), 0);
  return order;
}

// The groups that hold the unit's own tensors and those that it borrows.
std::vector<std::vector<int>> GroupsOfUnits(const ModelInventory& inventory,
                                            const std::vector<GroupLayout>& groups) {
  std::vector<std::vector<int>> found(inventory.units.size());
  std::vector<int> group_of(inventory.tensors.size(), -1);
  for (size_t group = 0; group < groups.size(); ++group) {
    found[static_cast<size_t>(groups[group].unit)].push_back(static_cast<int>(group));
    for (const int tensor : groups[group].tensors) {
      group_of[static_cast<size_t>(tensor)] = static_cast<int>(group);
    }
  }
  for (size_t unit = 0; unit < found.size(); ++unit) {
    for (const int tensor : inventory.units[unit].borrowed) {
      const int group = group_of[static_cast<size_t>(tensor)];
      if (std::find(found[unit].begin(), found[unit].end(), group) == found[unit].end()) {
        found[unit].push_back(group);
      }
    }
  }
  return found;
}

// Adds the backward calls to the forward ones.
class BackwardUses {
 public:
  BackwardUses(const ModelInventory& inventory,
               const std::vector<GroupLayout>& groups,
               ModelUses& made)
      : inventory_(inventory), groups_(groups), made_(made) {}

  void Add() {
    const size_t forwards = made_.uses.size();
    size_t lowest = forwards;
    for (size_t use = forwards; use-- > 0;) {
      const std::vector<int>& needs = made_.uses[use].needs;
      if (std::any_of(needs.begin(), needs.end(), [&](int group) { return Trains(group); })) {
        lowest = use;
      }
    }
    for (size_t use = forwards; use-- > lowest;) {
      AddBackward(use);
    }
  }

 private:
  bool Trains(int group) const { return groups_[static_cast<size_t>(group)].trainable; }

  void AddBackward(size_t forward) {
    const size_t at = made_.uses.size();
    UnitUse use = made_.uses[forward];
    const UnitSpec& unit = inventory_.units[static_cast<size_t>(use.unit)];
    use.op = OpCode::kBackward;
    use.remakes = !unit.remade.empty() && at != forward + 1;
    for (const int group : use.needs) {
      if (Trains(group)) {
        use.gradients.push_back(GradientOf(group, use.unit, at));
      }
    }
    if (unit.kind == UnitKind::kEmbedding || unit.kind == UnitKind::kPositions) {
      const auto unread = [&](int group) { return !Trains(group); };
      use.needs.erase(std::remove_if(use.needs.begin(), use.needs.end(), unread), use.needs.end());
    }
    made_.uses.push_back(std::move(use));
  }

  int GradientOf(int group, int writer, size_t use) {
    const auto [found, added] =
        index_.emplace(std::make_pair(group, writer), static_cast<int>(made_.gradients.size()));
    if (added) {
      made_.gradients.push_back({.group = group,
                                 .call = GradientCallsOf(made_, group),
                                 .first_use = use,
                                 .last_use = use});
    }
    made_.gradients[static_cast<size_t>(found->second)].last_use = use;
    return found->second;
  }

  const ModelInventory& inventory_;
  const std::vector<GroupLayout>& groups_;
  ModelUses& made_;
  std::map<std::pair<int, int>, int> index_;  // (group, writing unit) -> gradient
};

}  // namespace

ModelUses UsesOf(const ModelInventory& inventory,
                 const std::vector<GroupLayout>& groups,
                 bool trains) {
  const std::vector<std::vector<int>> needs = GroupsOfUnits(inventory, groups);
  ModelUses made;
  std::vector<int> calls(inventory.units.size(), 0);
  for (const int unit : OrderOf(inventory)) {
    made.uses.push_back({.op = OpCode::kForward,
                         .unit = unit,
                         .call = calls[static_cast<size_t>(unit)]++,
                         .remakes = false,
                         .needs = needs[static_cast<size_t>(unit)],
                         .gradients = {}});
  }
  if (trains) {
    BackwardUses(inventory, groups, made).Add();
  }
  return made;
}

int CallsOf(const ModelInventory& inventory, int unit) {
  const std::vector<int> order = OrderOf(inventory);
  return static_cast<int>(std::count(order.begin(), order.end(), unit));
}

int GradientCallsOf(const ModelUses& uses, int group) {
  return static_cast<int>(
      std::count_if(uses.gradients.begin(), uses.gradients.end(), [&](const GradientCall& call) {
        return call.group == group;
      }));
}

}  // namespace ravel::plan
