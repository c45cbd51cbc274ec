#include "tests/common/plan/layout/tensor_owners.h"

#include <algorithm>
#include <numeric>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/plan/layout/owned_boxes.h"
#include "tests/common/plan/plan_testing.h"

namespace ravel::plan {
namespace {

using ::testing::ElementsAre;

TEST(TensorOwnersTest, LongestFirstToWhoeverHasLeast) {
  const std::vector<LayoutItem> items = {
      {"a", 256, 1}, {"b", 1024, 1}, {"c", 512, 1}, {"d", 512, 1}, {"e", 100, 1}};
  const TensorOwners owners = AssignTensorOwners(items, 2);
  EXPECT_THAT(owners.owner, ElementsAre(0, 0, 1, 1, 1));
  EXPECT_THAT(owners.offset, ElementsAre(0, 256, 0, 512, 1024));
  EXPECT_THAT(owners.part_elements, ElementsAre(1280, 1280));
  // Whatever the order of the list, the same owner.
  std::vector<LayoutItem> shuffled = {items[3], items[0], items[4], items[2], items[1]};
  EXPECT_THAT(AssignTensorOwners(shuffled, 2).owner, ElementsAre(1, 0, 1, 1, 0));
  EXPECT_THAT(AssignTensorOwners({}, 3).part_elements, ElementsAre(0, 0, 0));
}

// Matrices of a whole model are shared out with no padding and nearly equal parts.
TEST(TensorOwnersTest, ModelsAreSharedOutWithoutPadding) {
  const ModelInventory inventory =
      BuildInventory(testing::Llama(512, 8, 1408, 8192), {.sequences = 1, .sequence_tokens = 64});
  std::vector<LayoutItem> items;
  int64_t sum = 0;
  for (const TensorSpec& tensor : inventory.tensors) {
    if (tensor.shape.size() == 2) {
      items.push_back({tensor.name, ElementCount(tensor.shape), 1});
      sum += items.back().elements;
    }
  }
  const TensorOwners owners = AssignTensorOwners(items, 4);
  const auto [least, most] =
      std::minmax_element(owners.part_elements.begin(), owners.part_elements.end());
  EXPECT_EQ(std::accumulate(owners.part_elements.begin(), owners.part_elements.end(), int64_t{0}),
            sum);
  EXPECT_LT(*most - *least, 512 * 1408 + 1);
  const Mesh mesh = *Mesh::Create({{"shard", 4}, {"tensor", 2}});
  const Placements placements = {{"shard", Placement::TensorAtomic()}};
  for (size_t i = 0; i < items.size(); ++i) {
    const TensorSpec& tensor =
        inventory.tensors[static_cast<size_t>(inventory.FindTensor(items[i].name))];
    int64_t owned_elements = 0;
    for (int64_t d = 0; d < 4; ++d) {
      const OwnedPiece owned = OwnedBoxes(
          {tensor.shape, placements, mesh, {.offset = owners.offset[i], .owner = owners.owner[i]}},
          {d, 1});
      EXPECT_EQ(ReplicaOf(placements, mesh, {d, 1}), 1);
      owned_elements += owned.elements();
      if (owned.elements() > 0) {
        EXPECT_THAT(owned.Boxes(), ElementsAre(WholeBox(tensor.shape)));
        EXPECT_EQ(owned.shard_offset, owners.offset[i]);
        EXPECT_LE(owned.shard_offset + owned.elements(),
                  owners.part_elements[static_cast<size_t>(d)]);
      } else {
        EXPECT_TRUE(owned.Boxes().empty());
      }
    }
    EXPECT_EQ(owned_elements, items[i].elements);
  }
}

}  // namespace
}  // namespace ravel::plan
