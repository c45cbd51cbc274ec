// Bug classes of flat layouts, by name. Each says which guard it tests; with that guard taken out
// of the planner the test fails (tried by hand, one at a time).

#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "common/check.h"
#include "common/model/bundles.h"
#include "common/plan/layout/padding_rule.h"
#include "tests/common/plan/layer_testing.h"
#include "tests/common/plan/plan_testing.h"

namespace ravel::plan {
namespace {

// Where shard boundaries cut an item: elements from its start.
std::vector<int64_t> CutsOf(const FlatLayout& layout, size_t item, int64_t elements) {
  std::vector<int64_t> cuts;
  const int64_t begin = layout.offsets.at(item);
  for (int64_t cut = layout.shard_elements; cut < begin + elements; cut += layout.shard_elements) {
    if (cut > begin) {
      cuts.push_back(cut - begin);
    }
  }
  return cuts;
}

// Shapes (2,5,2) and (4,3) over five ranks without padding: offsets 0 and 20, shards of 7 (or, with
// the last rank short, 30 / 5): a boundary falls inside a row of 10. Guard: the first condition of
// Placer::Legal, (boundary - offset) % atom == 0.
TEST(LayoutRegressions, ShardNeverCutsRow) {
  const std::vector<LayoutItem> items = {{"a", 20, 10}, {"b", 12, 3}};
  const FlatLayout layout = PlanFlatLayout(items, {.width = 5, .alignment_elements = 1});
  for (size_t i = 0; i < items.size(); ++i) {
    for (const int64_t cut : CutsOf(layout, i, items[i].elements)) {
      EXPECT_EQ(cut % items[i].atom_elements, 0) << items[i].name;
    }
  }
  EXPECT_LE(layout.total_elements(), 50);
}

// Shapes (7,5) and (1,4,8) over two ranks: one after another the second starts at 35, where none of
// its rows of 32 can meet the boundary. Guard: the first condition of Placer::Legal.
TEST(LayoutRegressions, OffsetsBlockAligned) {
  const std::vector<LayoutItem> items = {{"a", 35, 5}, {"b", 32, 32}};
  const FlatLayout layout = PlanFlatLayout(items, {.width = 2, .alignment_elements = 1});
  EXPECT_TRUE(CutsOf(layout, 1, 32).empty()) << "the only row of b is whole";
  for (const int64_t cut : CutsOf(layout, 0, 35)) {
    EXPECT_EQ(cut % 5, 0);
  }
  EXPECT_LE(layout.total_elements(), 128);
}

// Rows of 18432, 16384 and 7168 elements have a common multiple of 1 032 192, so shards that are a
// multiple of it make 528 M elements at width 512. Guard: the split by atom family
// (GroupSplitter::Assign).
TEST(LayoutRegressions, LcmBlowUpIsSplit) {
  const testing::Layer layer = {"unit",
                                {{"a", {7168, 18432}}, {"b", {7168, 16384}}, {"c", {18432, 7168}}}};
  const ModelInventory inventory = testing::InventoryOf(layer);
  const int64_t elements = inventory.parameter_count();
  const GroupLayouts groups = PlanGroups(inventory, 0, 512);
  EXPECT_GE(groups.size(), 2u);
  EXPECT_LE(PaddingOf(groups, 0).padding, elements / 100);
  const GroupLayouts whole = PlanGroups(inventory, 0, 512, {.most_groups = 1});
  EXPECT_EQ(whole.at(0).layout.total_elements(), 528482304);
  EXPECT_GT(whole.at(0).layout.padding_elements, elements / 3) << "what the split saves";
}

// An expert stack as one 3-D tensor has rows of whole expert matrices. As a bundle of 2-D experts
// it is cut between their rows. Guard: bundles as items of their parts' atom (ItemOf,
// AtomElements).
TEST(LayoutRegressions, ExpertStackPadding) {
  constexpr int kExperts = 12;
  const Shape expert = {768, 2048};
  testing::Layer bundled = {"unit", {}};
  for (int i = 0; i < kExperts; ++i) {
    bundled.tensors.push_back({"expert" + std::to_string(i), expert, 0});
  }
  const testing::Layer stacked = {"unit", {{"experts", {kExperts, 768, 2048}}}};
  const GroupLayouts groups = PlanGroups(testing::InventoryOf(bundled), 0, 8);
  ASSERT_EQ(groups.size(), 1u);
  EXPECT_EQ(groups[0].layout.padding_elements, 0);
  for (size_t i = 1; i < groups[0].tensors.size(); ++i) {  // one after another, in order
    EXPECT_EQ(groups[0].tensors[i], groups[0].tensors[i - 1].value() + 1);
    EXPECT_EQ(groups[0].tensor_offsets[i], groups[0].tensor_offsets[i - 1] + ElementCount(expert));
  }
  EXPECT_GE(PaddingOf(PlanGroups(testing::InventoryOf(stacked), 0, 8), 0).percent(), 25.0);
}

// 256 x 256 in blocks of 128 rows over four ranks: cut at every quarter it has four rows of scales
// instead of two. Guard: block_rows in AtomElements.
TEST(LayoutRegressions, BlockNeverStraddles) {
  const ModelInventory inventory = testing::InventoryOf({"unit", {{"w", {256, 256}}}}, 128);
  const GroupLayouts groups = PlanGroups(inventory, 0, 4);
  ASSERT_EQ(groups.size(), 1u);
  int64_t scale_rows = 0;
  for (int64_t rank = 0; rank < 4; ++rank) {
    for (const OwnedPiece& piece : testing::OwnedPieces(inventory, groups[0], rank)) {
      EXPECT_EQ(piece.range.begin % (128 * 256), 0);
      scale_rows += DivCeil(piece.elements(), 128 * 256);
    }
  }
  EXPECT_EQ(scale_rows, 2);
}

// Two 4-bit numbers share a byte: ranks whose pieces meet inside one race on it. Odd row lengths in
// blocks of 16 rows, and vectors. Guard: the groups' alignment of 512 (alignment_elements of
// GroupOptions reaching PlanFlatLayout).
TEST(LayoutRegressions, Fp4BoundaryEven) {
  const testing::Layer layer = {
      "unit", {{"a", {96, 33}}, {"b", {64, 65}}, {"norm", {777}}, {"c", {33, 31}}}};
  const ModelInventory inventory = testing::InventoryOf(layer, 16);
  for (int64_t width = 1; width <= 9; ++width) {
    const GroupOptions options = {.alignment_elements = 512};
    for (const GroupLayout& group : PlanGroups(inventory, 0, width, options)) {
      // Every shard, gathered or alone, starts at a 256-byte address.
      EXPECT_EQ(group.layout.shard_elements % 512, 0);
      for (const int64_t offset : group.tensor_offsets) {
        EXPECT_EQ(offset % 512, 0);
      }
      for (int64_t rank = 0; rank < width; ++rank) {
        for (const OwnedPiece& piece : testing::OwnedPieces(inventory, group, rank)) {
          const int64_t end_of_tensor =
              ElementCount(inventory.tensors[static_cast<size_t>(piece.tensor)].shape);
          EXPECT_EQ(piece.range.begin % 2, 0) << "width " << width;
          EXPECT_TRUE(piece.range.end % 2 == 0 || piece.range.end == end_of_tensor)
              << "width " << width;
        }
      }
    }
  }
}

TEST(LayoutRegressions, MoreRanksThanRowsLeaveEmptyShards) {
  const ModelInventory inventory = testing::InventoryOf({"unit", {{"w", {3, 256}}}});
  const GroupLayouts groups = PlanGroups(inventory, 0, 8);
  ASSERT_EQ(groups.size(), 1u);
  EXPECT_EQ(groups[0].layout.total_elements(), 8 * 256);
  int owners = 0;
  for (int64_t rank = 0; rank < 8; ++rank) {
    owners += testing::OwnedPieces(inventory, groups[0], rank).empty() ? 0 : 1;
  }
  EXPECT_EQ(owners, 3);
}

TEST(PaddingRule, TooMuchIsRefusedWithItsTensorAndWhatHelps) {
  const testing::Layer layer = testing::KnownLayers()[0];
  const ModelInventory blocks = testing::InventoryOf(layer, 128);
  EXPECT_TRUE(CheckPadding(blocks, PlanGroups(blocks, 0, 64)).ok());
  const absl::Status refused = CheckPadding(blocks, PlanGroups(blocks, 0, 512));
  ASSERT_FALSE(refused.ok());
  const std::string message(refused.message());
  const std::vector<std::string> in_order = {
      "unit Llama-3-8B would be padded by 453.8 % on a shard axis of 512 (at most 10 %)",
      "forced by down [4096, 14336], which is cut between blocks of 128 row(s)",
      "hsdp with parallelism.replicas: 8 (shard width 64: 7.69 %)",
      "larger units",
      "row atoms",
      "parallelism.allowPadding: true"};
  size_t from = 0;
  for (const std::string& part : in_order) {
    const size_t at = message.find(part, from);
    EXPECT_NE(at, std::string::npos) << part << " in: " << message;
    from = at == std::string::npos ? from : at;
  }
  const ModelInventory rows = testing::InventoryOf(layer);
  EXPECT_TRUE(CheckPadding(rows, PlanGroups(rows, 0, 512)).ok());
}

TEST(PaddingRule, SmallUnitsOnManyRanksPass) {
  // 300 % of next to nothing.
  const ModelInventory norm = testing::InventoryOf({"norm", {{"w", {4096}}}});
  const GroupLayouts groups = PlanGroups(norm, 0, 64);
  EXPECT_GT(PaddingOf(groups, 0).percent(), 100);
  EXPECT_TRUE(CheckPadding(norm, groups).ok());
}

}  // namespace
}  // namespace ravel::plan
