#include <algorithm>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "common/check.h"
#include "common/model/bundles.h"
#include "common/plan/layout/parameter_groups.h"
#include "tests/common/plan/plan_testing.h"

namespace ravel::plan {
namespace {

std::string Describe(const std::vector<LayoutItem>& items, const FlatLayoutOptions& options) {
  std::string text = "width " + std::to_string(options.width) + " align " +
                     std::to_string(options.alignment_elements) + ":";
  for (const LayoutItem& item : items) {
    text += " " + std::to_string(item.elements) + "/" + std::to_string(item.atom_elements);
  }
  return text;
}

int64_t BoundedLcm(int64_t a, int64_t b) {
  constexpr auto kMost = static_cast<unsigned __int128>(int64_t{1} << 50);
  const unsigned __int128 product =
      static_cast<unsigned __int128>(a / std::gcd(a, b)) * static_cast<unsigned __int128>(b);
  return static_cast<int64_t>(std::min(product, kMost));
}

// Shard size of the layout that puts each item at a multiple of its atom, in input order.
int64_t BaselineShard(const std::vector<LayoutItem>& items, const FlatLayoutOptions& options) {
  int64_t common = options.alignment_elements;
  int64_t cursor = 0;
  for (const LayoutItem& item : items) {
    const int64_t own = BoundedLcm(item.atom_elements, options.alignment_elements);
    common = BoundedLcm(common, own);
    cursor = RoundUp(cursor, own) + item.elements;
  }
  return RoundUp(DivCeil(cursor, options.width), common);
}

// The first invariant that a layout breaks, or "".
std::string BrokenInvariant(const std::vector<LayoutItem>& items,
                            const FlatLayoutOptions& options,
                            const FlatLayout& layout) {
  if (layout.width != options.width || layout.shard_elements <= 0 ||
      layout.shard_elements % options.alignment_elements != 0) {
    return "L3";
  }
  int64_t sum = 0;
  std::vector<std::pair<int64_t, int64_t>> extents;
  for (size_t i = 0; i < items.size(); ++i) {
    const int64_t begin = layout.offsets.at(i);
    const int64_t end = begin + items[i].elements;
    if (begin < 0 || end > layout.total_elements()) {
      return "L1 bounds";
    }
    if (begin % options.alignment_elements != 0) {
      return "L2";
    }
    for (int64_t boundary = (begin / layout.shard_elements + 1) * layout.shard_elements;
         boundary < end;
         boundary += layout.shard_elements) {
      if ((boundary - begin) % items[i].atom_elements != 0) {
        return "L4 " + items[i].name;
      }
    }
    extents.emplace_back(begin, end);
    sum += items[i].elements;
  }
  std::sort(extents.begin(), extents.end());
  for (size_t i = 1; i < extents.size(); ++i) {
    if (extents[i].first < extents[i - 1].second) {
      return "L1 overlap";
    }
  }
  if (layout.padding_elements != layout.total_elements() - sum) {
    return "padding";
  }
  return layout.shard_elements <= BaselineShard(items, options) ? "" : "L9";
}

std::vector<LayoutItem> RandomItems(std::mt19937_64& random) {
  const auto pick = [&](int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random);
  };
  std::vector<LayoutItem> items;
  const int64_t count = pick(1, 9);
  const int64_t widest = pick(1, 3) == 1 ? 6 : 600;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t row = pick(1, 4) == 1 ? 256 * pick(1, 4) : pick(1, widest);
    const int64_t block = pick(1, 5) == 1 ? (int64_t{1} << pick(0, 5)) : 1;
    const int64_t rows = pick(1, 40);
    items.push_back({.name = "t" + std::to_string(i),
                     .elements = row * rows,
                     .atom_elements = row * std::min(block, rows)});
  }
  return items;
}

TEST(FlatLayoutProperty, InvariantsHoldForRandomItems) {
  constexpr int kCases = 20000;
  for (int trial = 0; trial < kCases; ++trial) {
    const uint64_t seed = testing::kSeed + static_cast<uint64_t>(trial);
    std::mt19937_64 random(seed);
    std::vector<LayoutItem> items = RandomItems(random);
    const int64_t alignments[] = {1, 4, 256, 512};
    const FlatLayoutOptions options = {.width = static_cast<int64_t>(random() % 12 + 1),
                                       .alignment_elements = alignments[random() % 4]};
    std::string broken = BrokenInvariant(items, options, PlanFlatLayout(items, options));
    // Shrink: drop items while the same invariant stays broken.
    for (size_t i = 0; !broken.empty() && i < items.size();) {
      std::vector<LayoutItem> fewer = items;
      fewer.erase(fewer.begin() + static_cast<std::ptrdiff_t>(i));
      if (!fewer.empty() &&
          !BrokenInvariant(fewer, options, PlanFlatLayout(fewer, options)).empty()) {
        items = fewer;
      } else {
        ++i;
      }
    }
    ASSERT_EQ(broken, "") << "seed " << seed << ", " << Describe(items, options);
  }
}

TEST(FlatLayout, DoesNotDependOnTheOrderOfEqualItems) {
  const std::vector<LayoutItem> items = {{"a", 48, 8}, {"b", 60, 12}, {"c", 8, 8}, {"d", 4, 4}};
  const std::vector<LayoutItem> turned = {items[3], items[1], items[2], items[0]};
  const FlatLayoutOptions options = {.width = 3, .alignment_elements = 4};
  const FlatLayout one = PlanFlatLayout(items, options);
  const FlatLayout two = PlanFlatLayout(turned, options);
  EXPECT_EQ(one.shard_elements, two.shard_elements);
  EXPECT_EQ(one.offsets[0], two.offsets[3]);
  EXPECT_EQ(one.offsets[1], two.offsets[1]);
}

TEST(FlatLayout, WorkedExampleHasNoPadding) {
  const FlatLayout layout =
      PlanFlatLayout({{"W1", 48, 8}, {"W2", 60, 12}, {"b", 8, 8}, {"g", 4, 4}},
                     {.width = 3, .alignment_elements = 4});
  EXPECT_EQ(layout.shard_elements, 40);
  EXPECT_EQ(layout.padding_elements, 0);
  EXPECT_EQ(layout.offsets, (std::vector<int64_t>{0, 56, 48, 116}));
}

TEST(FlatLayout, BaselineCaseOfFiveRanksIsNoLarger) {
  const std::vector<LayoutItem> items = {
      {"a", 12, 6}, {"b", 16, 4}, {"c", 16, 4}, {"d", 2, 2}, {"e", 6, 6}};
  const FlatLayoutOptions options = {.width = 5, .alignment_elements = 1};
  EXPECT_EQ(BaselineShard(items, options) * 5, 60);
  const FlatLayout layout = PlanFlatLayout(items, options);
  EXPECT_LE(layout.total_elements(), 60);
  EXPECT_EQ(BrokenInvariant(items, options, layout), "");
}

class OwnedPiecesTest : public ::testing::TestWithParam<testing::ModelCase> {};

TEST_P(OwnedPiecesTest, EqualBruteForceOwners) {
  const ModelInventory inventory =
      BuildInventory(GetParam().config, {.sequences = 1, .sequence_tokens = 8});
  for (int64_t width = 1; width <= 8; ++width) {
    for (size_t unit = 0; unit < inventory.units.size(); ++unit) {
      const GroupLayout group =
          PlanGroups(inventory, static_cast<int>(unit), width, {.most_groups = 1}).front();
      // Per rank, the elements of each tensor by walking the gathered buffer.
      std::vector<int64_t> next(inventory.tensors.size(), 0);
      for (int64_t rank = 0; rank < width; ++rank) {
        const std::vector<OwnedPiece> pieces = testing::OwnedPieces(inventory, group, rank);
        int64_t end_of_last = 0;
        for (const OwnedPiece& piece : pieces) {
          const auto tensor = static_cast<size_t>(piece.tensor);
          EXPECT_EQ(piece.range.begin, next[tensor])
              << "pieces of a tensor are in order, without holes";
          EXPECT_LT(piece.range.begin, piece.range.end);
          next[tensor] = piece.range.end;
          EXPECT_GE(piece.shard_offset, end_of_last);
          end_of_last = piece.shard_offset + piece.elements();
          EXPECT_LE(end_of_last, group.layout.shard_elements);
          // Where the gathered buffer has this element.
          const auto at = static_cast<size_t>(
              std::find(group.tensors.begin(), group.tensors.end(), piece.tensor) -
              group.tensors.begin());
          EXPECT_EQ(group.tensor_offsets.at(at) + piece.range.begin,
                    rank * group.layout.shard_elements + piece.shard_offset);
          // Rows are never cut.
          const Shape& shape = inventory.tensors[tensor].shape;
          const int64_t row = shape.size() > 1 ? RowElements(shape) : 256;
          EXPECT_EQ(piece.range.begin % row, 0);
          EXPECT_TRUE(piece.range.end % row == 0 || piece.range.end == ElementCount(shape));
        }
      }
      for (const TensorId tensor : inventory.units[unit].tensors) {
        EXPECT_EQ(next[static_cast<size_t>(tensor)],
                  ElementCount(inventory.tensors[static_cast<size_t>(tensor)].shape));
      }
    }
  }
}

TEST_P(OwnedPiecesTest, TensorsAreAlignedAndBundlesAdjacent) {
  const ModelInventory inventory =
      BuildInventory(GetParam().config, {.sequences = 1, .sequence_tokens = 8});
  for (int64_t width = 1; width <= 8; ++width) {
    for (size_t unit = 0; unit < inventory.units.size(); ++unit) {
      const GroupLayout group =
          PlanGroups(inventory, static_cast<int>(unit), width, {.most_groups = 1}).front();
      std::vector<int64_t> offset_of(inventory.tensors.size(), -1);
      for (size_t i = 0; i < group.tensors.size(); ++i) {
        EXPECT_EQ(group.tensor_offsets[i] % kLayoutAlignmentElements, 0);
        offset_of[static_cast<size_t>(group.tensors[i])] = group.tensor_offsets[i];
      }
      EXPECT_EQ(group.tensors.size(), inventory.units[unit].tensors.size());
      for (const BundleSpec& bundle : inventory.bundles) {
        if (inventory.tensors[static_cast<size_t>(bundle.tensors[0])].unit !=
            static_cast<int>(unit)) {
          continue;
        }
        for (size_t part = 1; part < bundle.tensors.size(); ++part) {
          const auto before = static_cast<size_t>(bundle.tensors[part - 1]);
          EXPECT_EQ(offset_of[static_cast<size_t>(bundle.tensors[part])],
                    offset_of[before] + ElementCount(inventory.tensors[before].shape))
              << bundle.name;
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Models,
                         OwnedPiecesTest,
                         ::testing::ValuesIn(testing::ModelCases()),
                         testing::CaseName);

TEST(RangeToBoxesProperty, BoxesCoverTheRangeInOrder) {
  for (int trial = 0; trial < 3000; ++trial) {
    std::mt19937_64 random(testing::kSeed + static_cast<uint64_t>(trial));
    Shape shape;
    const size_t rank = random() % 4 + 1;
    for (size_t i = 0; i < rank; ++i) {
      shape.push_back(static_cast<int64_t>(random() % 6 + 1));
    }
    const int64_t count = ElementCount(shape);
    int64_t begin = static_cast<int64_t>(random() % static_cast<uint64_t>(count + 1));
    int64_t end = static_cast<int64_t>(random() % static_cast<uint64_t>(count + 1));
    if (begin > end) {
      std::swap(begin, end);
    }
    const std::vector<Box> boxes = RangeToBoxes(shape, begin, end);
    EXPECT_LE(boxes.size(), 2 * rank - 1) << "trial " << trial;
    int64_t next = begin;
    for (const Box& box : boxes) {
      // Row-major walk of the box meets consecutive elements.
      for (int64_t i = 0; i < ElementCount(box.length); ++i) {
        int64_t rest = i;
        int64_t index = 0;
        int64_t stride = 1;
        for (size_t d = rank; d-- > 0;) {
          index += (box.offset[d] + rest % box.length[d]) * stride;
          rest /= box.length[d];
          stride *= shape[d];
        }
        ASSERT_EQ(index, next++) << "trial " << trial;
      }
    }
    EXPECT_EQ(next, end) << "trial " << trial;
  }
}

}  // namespace
}  // namespace ravel::plan
