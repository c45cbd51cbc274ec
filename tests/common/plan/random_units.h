#pragma once

// Plans of models that no architecture describes: random units, orders, frozen and shared tensors.

#include <algorithm>
#include <cstdint>
#include <random>
#include <string>

#include "common/plan/program/group_roles.h"
#include "common/plan/sharding_plan.h"

namespace ravel::plan::testing {

// Everything that a plan depends on, apart from the units.
struct PlanShape {
  StrategyChoice choice;
  LaneMap lanes;
  ProgramOptions options;
};

inline ShardingPlan PlanOfUnits(ModelInventory inventory, const PlanShape& shape) {
  ShardingPlan plan;
  plan.ranks = shape.lanes.ranks;
  plan.lanes = shape.lanes;
  plan.inventory = std::move(inventory);
  plan.options = shape.options;
  plan.options.ranks = shape.lanes.ranks;
  plan.options.replicas = shape.lanes.replicas;
  plan.mesh = *MeshOf(shape.lanes);
  const auto roles = [&](bool trainable) {
    return *RolesOf(
        shape.choice, {.name = "any", .shape = {1, 1}}, shape.lanes, plan.mesh, trainable);
  };
  const int64_t width = LayoutWidth(roles(true), plan.mesh);
  for (size_t unit = 0; unit < plan.inventory.units.size(); ++unit) {
    for (GroupLayout& group : PlanGroups(plan.inventory, static_cast<int>(unit), width)) {
      plan.roles.push_back(roles(group.trainable));
      plan.groups.push_back(std::move(group));
    }
  }
  EXPECT_TRUE(PlanPrograms(plan).ok());
  return plan;
}

inline int AddTensor(ModelInventory& inventory, int unit, Shape shape, bool trainable = true) {
  const int id = static_cast<int>(inventory.tensors.size());
  TensorSpec tensor;
  tensor.name = "t" + std::to_string(id);
  tensor.shape = std::move(shape);
  tensor.unit = unit;
  tensor.trainable = trainable;
  tensor.site = static_cast<uint32_t>(id);
  inventory.tensors.push_back(std::move(tensor));
  inventory.units[static_cast<size_t>(unit)].tensors.push_back(id);
  return id;
}

// `count` units of one [rows, 256] matrix each.
inline ModelInventory EqualUnits(int count, int64_t rows) {
  ModelInventory inventory;
  for (int unit = 0; unit < count; ++unit) {
    UnitSpec spec;
    spec.name = "u" + std::to_string(unit);
    spec.saved = {{"x", {64}}};
    spec.workspace = {{"w", {64}}};
    inventory.units.push_back(std::move(spec));
    AddTensor(inventory, unit, {rows, 256});
  }
  inventory.shared = {{"hidden", {64}}};
  return inventory;
}

class RandomPlans {
 public:
  explicit RandomPlans(uint64_t seed) : random_(seed) {}

  ShardingPlan Next() { return PlanOfUnits(Units(), Shape()); }

 private:
  int64_t Pick(int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random_);
  }
  bool Chance(int percent) { return Pick(1, 100) <= percent; }

  ModelInventory Units() {
    ModelInventory inventory;
    const int count = static_cast<int>(Pick(1, 7));
    for (int unit = 0; unit < count; ++unit) {
      UnitSpec spec;
      spec.name = "u" + std::to_string(unit);
      spec.kind = unit == 0 && Chance(50) ? UnitKind::kEmbedding : UnitKind::kLayer;
      spec.optional = Chance(10);
      for (std::vector<ActivationSpec>* list : {&spec.saved, &spec.remade, &spec.workspace}) {
        if (Chance(list == &spec.remade ? 30 : 80)) {
          *list = {{"a", {Pick(1, 5000)}}, {"b", {Pick(1, 5000)}}};
        }
      }
      inventory.units.push_back(std::move(spec));
      for (int64_t tensors = Pick(1, 4); tensors > 0; --tensors) {
        AddTensor(inventory, unit, {Pick(1, 40), Pick(1, 300)}, Chance(80));
      }
      if (unit > 0 && Chance(20)) {
        const int owner = static_cast<int>(Pick(0, unit - 1));
        inventory.units.back().borrowed = {
            inventory.units[static_cast<size_t>(owner)].tensors.front()};
      }
    }
    inventory.tensors[static_cast<size_t>(Pick(0, count - 1))].trainable = true;
    inventory.shared = {{"hidden", {Pick(1, 5000)}}};
    if (Chance(40)) {
      for (int unit = 0; unit < count; ++unit) {
        inventory.order.push_back(unit);
      }
      for (int64_t again = Pick(1, 3); again > 0; --again) {
        const auto at = inventory.order.begin() + Pick(0, count);
        inventory.order.insert(at, static_cast<int>(Pick(0, count - 1)));
      }
    }
    return inventory;
  }

  PlanShape Shape() {
    PlanShape shape;
    shape.choice.shard = static_cast<Strategy>(Pick(0, 3));
    LaneMap& lanes = shape.lanes;
    lanes.lanes = int64_t{1} << Pick(0, 5);
    lanes.replicas = std::min(lanes.lanes, int64_t{1} << Pick(0, 2));
    lanes.ranks = lanes.replicas * Pick(1, lanes.lanes / lanes.replicas);
    lanes.micro_batches = Chance(50) ? 1 : Pick(2, 4);
    const bool partial =
        shape.choice.shard == Strategy::kNoShard || shape.choice.shard == Strategy::kOptim;
    lanes.blocks = partial && lanes.lanes % lanes.ranks == 0 && lanes.lanes > lanes.ranks;
    if (lanes.replicas > 1 && shape.choice.shard != Strategy::kNoShard && Chance(50)) {
      shape.choice.replicate = Strategy::kOptim;
    }
    shape.options.read_peers_in_place = Chance(50);
    shape.options.gather_in_place = shape.options.read_peers_in_place && Chance(70);
    shape.options.gather_window_bytes = Chance(40) ? 0 : Pick(1, 400000);
    shape.options.staging_window_bytes = Chance(40) ? 0 : Pick(1, 400000);
    return shape;
  }

  std::mt19937_64 random_;
};

}  // namespace ravel::plan::testing
