#include "tests/common/plan/layout/strided_import.h"

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/plan/layout/owned_boxes.h"
#include "tests/common/plan/plan_testing.h"

namespace ravel::plan {
namespace {

using ::testing::HasSubstr;

// The order that a list of strided placements stands for, found another way: from the right, each
// axis goes where the sizes before it multiply to its factor.
std::vector<size_t> OrderByInsertion(const Mesh& mesh,
                                     const std::vector<ForeignPlacement>& foreign,
                                     bool* found) {
  std::vector<size_t> order;
  *found = true;
  for (size_t axis = foreign.size(); axis-- > 0;) {
    if (foreign[axis].kind == ForeignKind::kReplicate) {
      continue;
    }
    int64_t product = 1;
    size_t place = 0;
    while (place < order.size() && product != foreign[axis].split_factor) {
      product *= mesh.axes()[order[place++]].size;
    }
    *found = *found && product == foreign[axis].split_factor;
    order.insert(order.begin() + static_cast<std::ptrdiff_t>(place), axis);
  }
  return order;
}

std::string OrderText(const Placements& placements) {
  std::string text;
  for (const AxisPlacement& entry : placements) {
    text += entry.axis;
  }
  return text;
}

TEST(StridedImportTest, EveryOrderOfUpToFourAxesComesBack) {
  for (const std::vector<int64_t>& sizes : std::vector<std::vector<int64_t>>{
           {2, 3}, {2, 2, 2}, {4, 3, 2}, {2, 4, 2, 2}, {2, 2, 4, 8}, {3, 1, 2, 3}}) {
    std::vector<MeshAxis> axes;
    for (const int64_t size : sizes) {
      axes.push_back({std::string(1, static_cast<char>('a' + axes.size())), size});
    }
    const Mesh mesh = *Mesh::Create(axes);
    std::sort(axes.begin(), axes.end(), [](const MeshAxis& x, const MeshAxis& y) {
      return x.name < y.name;
    });
    do {
      Placements cut;
      for (const MeshAxis& axis : axes) {
        cut.push_back({axis.name, Placement::Shard(0)});
      }
      const PlacedTensor tensor = {"w", {37, 4}};
      const auto foreign = ForeignPlacements(tensor, mesh, cut);
      ASSERT_TRUE(foreign.ok()) << foreign.status();
      const absl::StatusOr<Placements> order = RecoverCutOrder(tensor, mesh, *foreign);
      ASSERT_TRUE(order.ok()) << order.status();
      for (int64_t rank = 0; rank < mesh.rank_count(); ++rank) {
        const Coordinate at = mesh.CoordinateOf(rank);
        ASSERT_EQ(ItemBox(tensor.shape, *order, mesh, at), ItemBox(tensor.shape, cut, mesh, at))
            << mesh.Text() << " cut " << OrderText(cut) << " read as " << OrderText(*order);
      }
      if (std::count(sizes.begin(), sizes.end(), 1) == 0) {
        EXPECT_EQ(*order, cut) << mesh.Text();
      }
    } while (
        std::next_permutation(axes.begin(), axes.end(), [](const MeshAxis& x, const MeshAxis& y) {
          return x.name < y.name;
        }));
  }
}

TEST(StridedImportTest, RandomFactorsAreReadOrRefusedAsByInsertion) {
  std::mt19937_64 random(testing::kSeed + 2);
  int read = 0;
  int refused = 0;
  for (int round = 0; round < 20000; ++round) {
    std::vector<MeshAxis> axes;
    std::vector<ForeignPlacement> foreign;
    for (uint64_t i = 0, count = 1 + random() % 4; i < count; ++i) {
      axes.push_back(
          {std::string(1, static_cast<char>('a' + i)), static_cast<int64_t>(2 + random() % 3)});
      const uint64_t kind = random() % 6;
      if (kind == 0) {
        foreign.push_back({});
      } else if (kind <= 2) {
        foreign.push_back({ForeignKind::kShard, 0, 1});
      } else {
        const int64_t factors[] = {1, 2, 3, 4, 6, 8, 9, 12};
        foreign.push_back({ForeignKind::kStridedShard, 0, factors[random() % 8]});
      }
    }
    const Mesh mesh = *Mesh::Create(axes);
    bool found = false;
    std::string expected;
    for (const size_t axis : OrderByInsertion(mesh, foreign, &found)) {
      expected += axes[axis].name;
    }
    const absl::StatusOr<Placements> order = RecoverCutOrder({"w", {1000}}, mesh, foreign);
    ASSERT_EQ(order.ok(), found) << "round " << round << " " << mesh.Text() << order.status();
    if (order.ok()) {
      ++read;
      ASSERT_EQ(OrderText(*order), expected) << "round " << round << " " << mesh.Text();
    } else {
      ++refused;
      ASSERT_THAT(std::string(order.status().message()), HasSubstr("tensor w [1000]: axis "));
    }
  }
  EXPECT_GT(read, 1000);
  EXPECT_GT(refused, 1000);
}

TEST(StridedImportTest, RefusalsNameTensorAxisAndPlacement) {
  const Mesh mesh = *Mesh::Create({{"shard", 4}, {"tensor", 2}});
  const auto message = [&](const Shape& shape, const std::vector<ForeignPlacement>& foreign) {
    return std::string(RecoverCutOrder({"w", shape}, mesh, foreign).status().message());
  };
  EXPECT_EQ(message({8, 8}, {{ForeignKind::kStridedShard, 0, 3}, {ForeignKind::kShard, 0, 1}}),
            "tensor w [8, 8]: axis shard: _StridedShard(0, split_factor=3): no axes to the right "
            "cut dimension 0 into as many pieces first; mesh shard 4 x tensor 2");
  // The cut on the right is of another dimension.
  EXPECT_THAT(message({8, 8}, {{ForeignKind::kStridedShard, 0, 2}, {ForeignKind::kShard, 1, 1}}),
              HasSubstr("axis shard: _StridedShard(0, split_factor=2): no axes"));
  EXPECT_THAT(message({8, 8}, {{ForeignKind::kShard, 0, 1}, {ForeignKind::kStridedShard, 0, 4}}),
              HasSubstr("axis tensor: _StridedShard(0, split_factor=4): no axes"));
  EXPECT_THAT(message({8, 6}, {{ForeignKind::kShard, 1, 1}, {}}),
              HasSubstr("axis shard: Shard(1): 6 indices over 4 ranks"));
  EXPECT_THAT(message({8, 12}, {{ForeignKind::kStridedShard, 1, 2}, {ForeignKind::kShard, 1, 1}}),
              HasSubstr("axis shard: _StridedShard(1, split_factor=2): 6 indices over 4 ranks"));
  EXPECT_EQ(message({8, 16}, {{ForeignKind::kStridedShard, 1, 2}, {ForeignKind::kShard, 1, 1}}),
            "");
  EXPECT_EQ(message({7, 5}, {{ForeignKind::kShard, 0, 1}, {ForeignKind::kShard, 1, 1}}), "");
  EXPECT_THAT(message({8}, {{ForeignKind::kShard, 1, 1}, {}}),
              HasSubstr("axis shard: Shard(1): there is no such dimension"));
  EXPECT_THAT(message({8}, {{ForeignKind::kStridedShard, 0, 0}, {}}),
              HasSubstr("split factor out of range"));
  EXPECT_THAT(message({8}, {{}}), HasSubstr("1 placements for the mesh shard 4 x tensor 2"));
  EXPECT_THAT(
      std::string(
          ForeignPlacements({"w", {8}}, mesh, {{"shard", Placement::Flat()}}).status().message()),
      HasSubstr("tensor w: axis shard: Flat has no DTensor placement"));
}

}  // namespace
}  // namespace ravel::plan
