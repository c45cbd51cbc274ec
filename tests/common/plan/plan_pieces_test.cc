#include "common/plan/plan_pieces.h"

#include <algorithm>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "common/plan/layout/strategy_table.h"
#include "tests/common/plan/plan_testing.h"

namespace ravel::plan {
namespace {

// Row-major range of a whole tensor that a rank of one Flat axis has: what pieces were before they
// were boxes.
struct FlatPiece {
  TensorId tensor = {};
  int64_t begin = 0;
  int64_t end = 0;
  int64_t offset = 0;
  bool operator==(const FlatPiece&) const = default;
};

std::vector<FlatPiece> FlatPieces(const ModelInventory& inventory,
                                  const GroupLayout& group,
                                  const ElementRange& mine) {
  std::vector<FlatPiece> pieces;
  for (size_t i = 0; i < group.tensors.size(); ++i) {
    const int64_t offset = group.tensor_offsets[i];
    const int64_t end = offset + ElementCount(inventory.tensors[group.tensors[i]].shape);
    const int64_t from = std::max(offset, mine.begin);
    const int64_t to = std::min(end, mine.end);
    if (from < to) {
      pieces.push_back({group.tensors[i], from - offset, to - offset, from - mine.begin});
    }
  }
  return pieces;
}

std::vector<FlatPiece> AsFlat(const ModelInventory& inventory,
                              const std::vector<OwnedPiece>& owned) {
  std::vector<FlatPiece> pieces;
  for (const OwnedPiece& piece : owned) {
    piece.VisitRuns(inventory.tensors[piece.tensor].shape, [&](const OwnedRun& run) {
      pieces.push_back({piece.tensor, run.first, run.first + run.elements, run.offset});
    });
  }
  return pieces;
}

// Under every strategy and random meshes, the pieces of a plan are the old ranges, in one run each:
// what is stored, what is counted, and what is saved, which is each element once. The placements
// are those of the strategy table.
TEST(PlanPieces, AreTheOldRangesUnderEveryStrategy) {
  std::mt19937_64 random(testing::kSeed + 5);
  for (int round = 0; round < 40; ++round) {
    const auto pick = [&](uint64_t below) { return static_cast<int64_t>(random() % below); };
    const std::vector<testing::ModelCase> cases = testing::ModelCases();
    JobSpec spec = testing::SpecOf(cases[random() % 2].config, 8);
    spec.strategy = AxisStrategyRows()[random() % AxisStrategyRows().size()].strategy;
    spec.replicas = int64_t{1} << pick(3);
    const bool cuts = spec.replicas > 1 && spec.strategy != Strategy::kNoShard && pick(2) == 0;
    spec.replicate_strategy = cuts ? Strategy::kOptim : Strategy::kNoShard;
    if (pick(2) == 0) {
      spec.freeze = {"model.layers.0.*"};
    }
    const int64_t width = 1 + pick(8 / spec.replicas);
    const auto built = BuildShardingPlan(
        {.spec = spec, .ranks = width * spec.replicas, .shared_memory = pick(2) == 0});
    ASSERT_TRUE(built.ok()) << built.status();
    const ShardingPlan& plan = *built;
    SCOPED_TRACE(plan.mesh.Text() + " round " + std::to_string(round));
    const StrategyChoice choice = {.replicate = spec.replicate_strategy, .shard = spec.strategy};
    const auto roles = PlacementsOf(choice, {"w", {4096, 4096}}, {}, plan.mesh);
    ASSERT_TRUE(roles.ok()) << roles.status();
    std::vector<std::vector<int64_t>> saved;
    for (const TensorSpec& tensor : plan.inventory.tensors) {
      saved.emplace_back(static_cast<size_t>(ElementCount(tensor.shape)), 0);
    }
    for (const GroupId group : plan.groups.ids()) {
      const GroupLayout& layout = plan.groups[group];
      EXPECT_EQ(StoredPlacements(plan, group),
                layout.trainable ? roles->optimizer : roles->parameter);
      const int64_t total = layout.layout.total_elements();
      const bool by_replicas = cuts && layout.trainable;
      for (int64_t rank = 0; rank < plan.ranks; ++rank) {
        const int64_t inner = rank % width;
        const int64_t outer = rank / width;
        ElementRange measured = {total / width * inner, total / width * (inner + 1)};
        if (by_replicas) {
          const int64_t part = measured.size() / spec.replicas;
          measured.begin += part * outer;
          measured.end = measured.begin + part;
        }
        const bool whole = CutAxes(plan.roles[group].stored).empty();
        const ElementRange stored = whole ? ElementRange{0, total} : measured;
        EXPECT_EQ(AsFlat(plan.inventory, StoredPieces(plan, group, rank)),
                  FlatPieces(plan.inventory, layout, stored));
        std::vector<FlatPiece> counted;
        if (by_replicas || outer == 0) {
          counted = FlatPieces(plan.inventory, layout, measured);
        }
        EXPECT_EQ(AsFlat(plan.inventory, CountedPieces(plan, group, rank)), counted);
        for (FlatPiece& piece : counted) {
          piece.offset += measured.begin - stored.begin;
          for (int64_t i = piece.begin; i < piece.end; ++i) {
            ++saved[static_cast<size_t>(piece.tensor)][static_cast<size_t>(i)];
          }
        }
        EXPECT_EQ(AsFlat(plan.inventory, SavedPieces(plan, group, rank)), counted);
      }
    }
    for (const std::vector<int64_t>& tensor : saved) {
      EXPECT_EQ(std::count(tensor.begin(), tensor.end(), 1), std::ssize(tensor));
    }
  }
}

}  // namespace
}  // namespace ravel::plan
