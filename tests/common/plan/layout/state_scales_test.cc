#include "common/plan/layout/state_scales.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <vector>

#include <gtest/gtest.h>

#include "common/model/state_groups.h"
#include "common/plan/plan_pieces.h"
#include "tests/common/plan/plan_testing.h"

namespace ravel::plan {
namespace {

TEST(StateGroups, EveryElementIsInOneGroupOfItsRow) {
  // Oracle: walk all elements; a new group begins with a row and after 128 elements.
  for (const Shape& shape : {Shape{1},
                             Shape{127},
                             Shape{128},
                             Shape{300},
                             Shape{3, 1},
                             Shape{2, 128},
                             Shape{5, 200},
                             Shape{2, 3, 100}}) {
    const int64_t row = shape.size() == 1 ? shape[0] : RowElements(shape);
    int64_t groups = 0;
    for (int64_t i = 0; i < ElementCount(shape); ++i) {
      const bool begins = i % row % 128 == 0;
      if (begins) {
        EXPECT_EQ(StateGroups(shape, 0, i), groups) << ShapeText(shape) << " " << i;
        EXPECT_EQ(StateGroups(shape, i, ElementCount(shape)),
                  StateGroups(shape, 0, ElementCount(shape)) - groups);
      }
      groups += begins ? 1 : 0;
    }
    EXPECT_EQ(StateGroups(shape, 0, ElementCount(shape)), groups) << ShapeText(shape);
    EXPECT_EQ(ElementCount(ScaleShape(shape)), groups) << ShapeText(shape);
    EXPECT_EQ(StateGroups(shape, 0, 0), 0);
  }
}

// Over all ranks every scale of every tensor is there once, in an order without gaps, and no rank
// has more than the most.
TEST(StateScales, ShardsPartitionTheScalesOfEveryTensor) {
  for (const int64_t width : {1, 2, 3, 5, 8}) {
    const ShardingPlan plan = testing::PlanOf(testing::Llama(200, 2, 136, 257), width, 8, false);
    for (const GroupId group : plan.groups.ids()) {
      const int64_t most = MostStateScales(
          plan.inventory, plan.groups[group], plan.mesh, StoredPlacements(plan, group));
      std::map<TensorId, std::vector<int>> seen;
      int64_t largest = 0;
      for (int64_t rank = 0; rank < plan.ranks; ++rank) {
        const std::vector<OwnedPiece> stored = StoredPieces(plan, group, rank);
        int64_t next = 0;
        for (const OwnedPiece& scales : ScalePieces(plan.inventory, stored, stored)) {
          EXPECT_EQ(scales.shard_offset, next);
          next += scales.elements();
          std::vector<int>& of_tensor = seen[scales.tensor];
          of_tensor.resize(static_cast<size_t>(ElementCount(scales.item.length)), 0);
          for (int64_t i = scales.range.begin; i < scales.range.end; ++i) {
            ++of_tensor[static_cast<size_t>(i)];
          }
        }
        EXPECT_LE(next, most);
        largest = std::max(largest, next);
      }
      EXPECT_EQ(largest, most);
      for (const auto& [tensor, counts] : seen) {
        EXPECT_EQ(counts, std::vector<int>(counts.size(), 1))
            << plan.inventory.tensors[tensor].name;
      }
    }
  }
}

// The same on a tensor axis: columns are cut between groups of 128.
TEST(StateScales, CutsOfTheTensorAxisPartitionThemToo) {
  ModelConfig config = testing::Llama(512, 1, 512, 97);
  config.num_attention_heads = 4;
  config.num_key_value_heads = 2;
  config.head_dim = 128;
  for (const int64_t shards : {1, 3}) {
    for (const int64_t tensor : {2, 4}) {
      JobSpec spec = testing::SpecOf(config, 4);
      spec.tensor = tensor;
      spec.optimizer.state_types = kFp8States;
      const absl::StatusOr<ShardingPlan> plan =
          BuildShardingPlan({.spec = spec, .ranks = shards * tensor, .shared_memory = false});
      ASSERT_TRUE(plan.ok()) << plan.status();
      std::map<TensorId, std::vector<int>> seen;
      for (const GroupId group : plan->groups.ids()) {
        const int64_t most = MostStateScales(
            plan->inventory, plan->groups[group], plan->mesh, StoredPlacements(*plan, group));
        for (int64_t rank = 0; rank < plan->ranks; ++rank) {
          const std::vector<OwnedPiece> stored = StoredPieces(*plan, group, rank);
          const std::vector<OwnedPiece> counted = CountedPieces(*plan, group, rank);
          for (const OwnedPiece& scales : ScalePieces(plan->inventory, stored, counted)) {
            const Shape shape = ScaleShape(plan->inventory.tensors[scales.tensor].shape);
            std::vector<int>& of_tensor = seen[scales.tensor];
            of_tensor.resize(static_cast<size_t>(ElementCount(shape)), 0);
            EXPECT_LE(scales.shard_offset + scales.elements(), most);
            scales.VisitRuns(shape, [&](const OwnedRun& run) {
              for (int64_t i = run.first; i < run.first + run.elements; ++i) {
                ++of_tensor[static_cast<size_t>(i)];
              }
            });
          }
        }
      }
      EXPECT_EQ(seen.size(), plan->inventory.tensors.size());
      for (const auto& [id, counts] : seen) {
        EXPECT_EQ(counts, std::vector<int>(counts.size(), 1)) << plan->inventory.tensors[id].name;
      }
    }
  }
}

TEST(StateScalesDeath, ACutInsideAGroupIsABug) {
  EXPECT_DEATH(StateGroups({4, 200}, 0, 130), "a cut inside a group");
}

TEST(StateScales, CodesOfSquaresAreAnEighthApart) {
  EXPECT_EQ(SquareOfCode(0), 0.0f);
  for (int code = 1; code < 0xFF; ++code) {
    const int exponent = std::max(1, code / 8);
    const float step = std::ldexp(1.0f, exponent - 18);
    EXPECT_EQ(
        SquareOfCode(static_cast<uint8_t>(code)) - SquareOfCode(static_cast<uint8_t>(code - 1)),
        code % 8 == 0 && exponent > 1 ? step / 2 : step)
        << code;
  }
  EXPECT_EQ(SquareOfCode(0xFE), 114688.0f);
  EXPECT_TRUE(std::isnan(SquareOfCode(0xFF)));
}

}  // namespace
}  // namespace ravel::plan
