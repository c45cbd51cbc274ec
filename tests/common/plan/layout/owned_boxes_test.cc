#include "common/plan/layout/owned_boxes.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/plan/layout/parameter_groups.h"
#include "common/plan/layout/strategy_table.h"
#include "tests/common/plan/layout/bundle_split.h"
#include "tests/common/plan/layout/strided_import.h"
#include "tests/common/plan/plan_testing.h"

namespace ravel::plan {
namespace {

using ::testing::ElementsAre;

// Rows as people write them: "[0,2)", or "-" for none.
std::string RowsText(const std::vector<Box>& boxes) {
  return boxes.empty() ? "-"
                       : "[" + std::to_string(boxes[0].offset[0]) + "," +
                             std::to_string(boxes[0].offset[0] + boxes[0].length[0]) + ")";
}

// `Shard(0)` on tensor, then on shard, of n rows: the line of each d, of every t.
std::vector<std::string> OwnedRows(int64_t n, int64_t d_count, int64_t t_count) {
  const Mesh mesh = *Mesh::Create({{"shard", d_count}, {"tensor", t_count}});
  const Placements placements = {{"tensor", Placement::Shard(0)}, {"shard", Placement::Shard(0)}};
  std::vector<std::string> lines;
  for (int64_t d = 0; d < d_count; ++d) {
    std::string line;
    for (int64_t t = 0; t < t_count; ++t) {
      const OwnedPiece owned = OwnedBoxes({{n}, placements, mesh, {}}, {d, t});
      EXPECT_LE(owned.Boxes().size(), 1u);
      line += (t == 0 ? "" : " ") + RowsText(owned.Boxes());
    }
    lines.push_back(line);
  }
  return lines;
}

TEST(OwnedBoxesTest, ChunksAreThoseOfTorch) {
  EXPECT_EQ(Chunk(7, 3, 0), (ElementRange{0, 3}));
  EXPECT_EQ(Chunk(7, 3, 2), (ElementRange{6, 7}));
  EXPECT_EQ(Chunk(5, 4, 2), (ElementRange{4, 5}));
  EXPECT_EQ(Chunk(5, 4, 3), (ElementRange{5, 5}));
  EXPECT_EQ(Chunk(1, 8, 7), (ElementRange{1, 1}));
  EXPECT_EQ(Chunk(0, 3, 1), (ElementRange{0, 0}));
}

TEST(OwnedBoxesTest, WorkedTables) {
  EXPECT_THAT(OwnedRows(8, 4, 2),
              ElementsAre("[0,1) [4,5)", "[1,2) [5,6)", "[2,3) [6,7)", "[3,4) [7,8)"));
  EXPECT_THAT(OwnedRows(7, 2, 2), ElementsAre("[0,2) [4,6)", "[2,4) [6,7)"));
  EXPECT_THAT(OwnedRows(10, 4, 2),
              ElementsAre("[0,2) [5,7)", "[2,4) [7,9)", "[4,5) [9,10)", "- -"));
  EXPECT_THAT(OwnedRows(9, 4, 2),
              ElementsAre("[0,2) [5,6)", "[2,4) [6,7)", "[4,5) [7,8)", "- [8,9)"));
  EXPECT_THAT(OwnedRows(11, 4, 2),
              ElementsAre("[0,2) [6,8)", "[2,4) [8,10)", "[4,6) [10,11)", "- -"));
  EXPECT_THAT(OwnedRows(1, 2, 2), ElementsAre("[0,1) -", "- -"));
}

TEST(OwnedBoxesTest, ReplicasOwnTheSameAndCount) {
  const Mesh mesh = *Mesh::Create({{"replicate", 2}, {"shard", 2}, {"tensor", 3}});
  const Placements placements = {{"tensor", Placement::Shard(0)}, {"shard", Placement::Shard(0)}};
  for (int64_t o = 0; o < 2; ++o) {
    for (int64_t d = 0; d < 2; ++d) {
      for (int64_t t = 0; t < 3; ++t) {
        const OwnedPiece owned = OwnedBoxes({{12}, placements, mesh, {}}, {o, d, t});
        EXPECT_THAT(owned.Boxes(), ElementsAre(Box{{4 * t + 2 * d}, {2}}));
        EXPECT_EQ(ReplicaOf(placements, mesh, {o, d, t}), o);
      }
    }
  }
  // Over replicate and tensor.
  EXPECT_EQ(ReplicaOf({{"shard", Placement::Shard(0)}}, mesh, {1, 0, 2}), 1 * 3 + 2);
  const Placements both = {{"tensor", Placement::Shard(0)},
                           {"shard", Placement::Flat()},
                           {"replicate", Placement::Flat()}};
  const OwnedPiece hfsdp =
      OwnedBoxes({{12}, both, mesh, {.offset = 0, .total_elements = 4}}, {1, 1, 2});
  EXPECT_EQ(ReplicaOf(both, mesh, {1, 1, 2}), 0);
  EXPECT_THAT(hfsdp.Boxes(), ElementsAre(Box{{11}, {1}}));
}

// Pieces of list `rows` as tensor.chunk makes them, in the plainest way.
std::vector<std::vector<int64_t>> ChunksOf(const std::vector<int64_t>& rows, int64_t count) {
  const size_t size = (rows.size() + static_cast<size_t>(count) - 1) / static_cast<size_t>(count);
  std::vector<std::vector<int64_t>> pieces(static_cast<size_t>(count));
  for (size_t i = 0; i < rows.size(); ++i) {
    pieces[i / size].push_back(rows[i]);
  }
  return pieces;
}
std::vector<int64_t> FirstIntegers(int64_t n) {
  std::vector<int64_t> rows(static_cast<size_t>(n));
  std::iota(rows.begin(), rows.end(), int64_t{0});
  return rows;
}
std::vector<int64_t> RowsOf(const std::vector<Box>& boxes) {
  std::vector<int64_t> rows;
  for (const Box& box : boxes) {
    for (int64_t i = 0; i < box.length[0]; ++i) {
      rows.push_back(box.offset[0] + i);
    }
  }
  return rows;
}

// A dimension that `tensor` cut first and `shard` second, read from what PyTorch writes. Cells in
// which cutting from left to right and chunking what is left again gives another owner are counted.
TEST(OwnedBoxesTest, StridedImport740) {
  std::vector<std::tuple<int64_t, int64_t, int64_t>> tricky;
  int64_t cells = 0;
  for (int64_t n = 1; n <= 128; ++n) {
    for (int64_t d_count = 1; d_count <= 8; ++d_count) {
      for (int64_t t_count = 1; t_count <= 8; ++t_count) {
        const Mesh mesh = *Mesh::Create({{"shard", d_count}, {"tensor", t_count}});
        const std::vector<ForeignPlacement> foreign = {
            {t_count > 1 ? ForeignKind::kStridedShard : ForeignKind::kShard, 0, t_count},
            {ForeignKind::kShard, 0, 1}};
        const absl::StatusOr<Placements> order = RecoverCutOrder({"w", {n, 2}}, mesh, foreign);
        ASSERT_TRUE(order.ok()) << order.status();
        const std::vector<std::vector<int64_t>> columns = ChunksOf(FirstIntegers(n), t_count);
        const int64_t before = cells;
        for (int64_t d = 0; d < d_count; ++d) {
          std::vector<int64_t> together;
          std::vector<std::vector<int64_t>> owners;
          for (const std::vector<int64_t>& column : columns) {
            owners.push_back(ChunksOf(column, d_count)[static_cast<size_t>(d)]);
            together.insert(together.end(), owners.back().begin(), owners.back().end());
          }
          const std::vector<std::vector<int64_t>> replay = ChunksOf(together, t_count);
          for (size_t t = 0; t < owners.size(); ++t) {
            const OwnedPiece owned =
                OwnedBoxes({{n, 2}, *order, mesh, {}}, {d, static_cast<int64_t>(t)});
            ASSERT_EQ(RowsOf(owned.Boxes()), owners[t])
                << "n " << n << " D " << d_count << " TP " << t_count << " d " << d << " t " << t;
            ASSERT_EQ(owned.item.length, (Shape{static_cast<int64_t>(owners[t].size()), 2}));
            cells += replay[t] != owners[t] ? 1 : 0;
          }
        }
        if (cells > before) {
          tricky.emplace_back(n, d_count, t_count);
        }
      }
    }
  }
  EXPECT_EQ(tricky.size(), 740u);
  EXPECT_EQ(cells, 2858);
  const std::vector<std::tuple<int64_t, int64_t, int64_t>> first = {{7, 3, 2},
                                                                    {9, 4, 2},
                                                                    {11, 3, 3},
                                                                    {11, 5, 2},
                                                                    {13, 3, 2},
                                                                    {13, 6, 2},
                                                                    {14, 4, 3},
                                                                    {15, 3, 4},
                                                                    {15, 7, 2},
                                                                    {16, 4, 3},
                                                                    {16, 5, 3},
                                                                    {17, 4, 2},
                                                                    {17, 5, 3},
                                                                    {17, 8, 2}};
  ASSERT_GE(tricky.size(), first.size());
  EXPECT_TRUE(std::equal(first.begin(), first.end(), tricky.begin()));
}

TEST(OwnedBoxesTest, StridedImportOfTheNamedTriple) {
  EXPECT_THAT(OwnedRows(7, 3, 2), ElementsAre("[0,2) [4,5)", "[2,4) [5,6)", "- [6,7)"));
}

// Shard cuts of three axes, on any dimensions and in any order, against lists of indices.
TEST(OwnedBoxesTest, RandomThreeAxisMeshes) {
  std::mt19937_64 random(testing::kSeed + 3);
  for (int round = 0; round < 2000; ++round) {
    std::vector<MeshAxis> axes;
    for (const char* name : {"a", "b", "c"}) {
      axes.push_back({name, static_cast<int64_t>(1 + random() % 5)});
    }
    const Mesh mesh = *Mesh::Create(axes);
    Shape shape;
    for (uint64_t i = 0, dims = 1 + random() % 3; i < dims; ++i) {
      shape.push_back(static_cast<int64_t>(random() % 14));
    }
    Placements placements;
    for (const MeshAxis& axis : axes) {
      if (random() % 4 != 0) {
        placements.push_back(
            {axis.name, Placement::Shard(static_cast<int>(random() % shape.size()))});
      }
    }
    std::shuffle(placements.begin(), placements.end(), random);
    std::map<std::string, int64_t> owners;
    for (int64_t rank = 0; rank < mesh.rank_count(); ++rank) {
      const Coordinate at = mesh.CoordinateOf(rank);
      std::vector<std::vector<int64_t>> indices;
      for (const int64_t size : shape) {
        indices.push_back(FirstIntegers(size));
      }
      for (const AxisPlacement& entry : placements) {
        std::vector<int64_t>& rows = indices[static_cast<size_t>(entry.placement.dim)];
        rows = ChunksOf(rows, mesh.AxisSize(entry.axis))[static_cast<size_t>(
            at[static_cast<size_t>(mesh.AxisIndex(entry.axis))])];
      }
      const OwnedPiece owned = OwnedBoxes({shape, placements, mesh, {}}, at);
      std::string key = PlacementsText(placements);
      for (size_t dim = 0; dim < shape.size(); ++dim) {
        const std::vector<int64_t>& rows = indices[dim];
        ASSERT_EQ(owned.item.length[dim], static_cast<int64_t>(rows.size()))
            << mesh.Text() << " " << key << " " << ShapeText(shape) << " round " << round;
        if (!rows.empty()) {
          ASSERT_EQ(owned.item.offset[dim], rows.front());
        }
        key += " " + std::to_string(owned.item.offset[dim]);
      }
      if (!IsEmpty(owned.item)) {
        ASSERT_THAT(owned.Boxes(), ElementsAre(owned.item));
        // Replicas of one box are numbered from 0, in the order of ranks.
        ASSERT_EQ(ReplicaOf(placements, mesh, at), owners[key]++);
      }
    }
  }
}

TEST(OwnedBoxesTest, TwoFlatAxesAreInnerMajor) {
  const Mesh mesh = *Mesh::Create({{"replicate", 3}, {"shard", 2}});
  const Placements placements = {{"shard", Placement::Flat()}, {"replicate", Placement::Flat()}};
  for (int64_t o = 0; o < 3; ++o) {
    for (int64_t i = 0; i < 2; ++i) {
      EXPECT_EQ(FlatInterval(48, placements, mesh, {o, i}),
                (ElementRange{24 * i + 8 * o, 24 * i + 8 * o + 8}));
      // The outer pieces lie inside what the inner axis alone leaves.
      const ElementRange inner = FlatInterval(48, {{"shard", Placement::Flat()}}, mesh, {o, i});
      EXPECT_EQ(inner, (ElementRange{24 * i, 24 * i + 24}));
    }
  }
}

TEST(OwnedBoxesTest, FlatBelowAColumnCut) {
  const Mesh mesh = *Mesh::Create({{"shard", 3}, {"tensor", 2}});
  const Placements placements = {{"tensor", Placement::Shard(0)}, {"shard", Placement::Flat()}};
  for (int64_t d = 0; d < 3; ++d) {
    for (int64_t t = 0; t < 2; ++t) {
      const OwnedPiece owned =
          OwnedBoxes({{12, 4}, placements, mesh, {.offset = 0, .total_elements = 24}}, {d, t});
      EXPECT_THAT(owned.Boxes(), ElementsAre(Box{{6 * t + 2 * d, 0}, {2, 4}}));
    }
  }
}

// The rows of a row-parallel item are as long as the item's, not as the tensor's.
TEST(OwnedBoxesTest, RowParallelUsesLocalTrailingShape) {
  const Mesh mesh = *Mesh::Create({{"shard", 3}, {"tensor", 2}});
  const Placements placements = {{"tensor", Placement::Shard(1)}, {"shard", Placement::Flat()}};
  for (int64_t d = 0; d < 3; ++d) {
    for (int64_t t = 0; t < 2; ++t) {
      const OwnedPiece owned =
          OwnedBoxes({{6, 8}, placements, mesh, {.offset = 0, .total_elements = 24}}, {d, t});
      EXPECT_THAT(owned.Boxes(), ElementsAre(Box{{2 * d, 4 * t}, {2, 4}}));
      EXPECT_EQ(owned.item.length, (Shape{6, 4}));
      EXPECT_EQ(owned.range, (ElementRange{8 * d, 8 * d + 8}));
    }
  }
}

TEST(OwnedBoxesTest, EmptyIsAValue) {
  const Mesh mesh = *Mesh::Create({{"shard", 4}});
  const Placements flat = {{"shard", Placement::Flat()}};
  const OwnedPiece owned =
      OwnedBoxes({{3, 2, 5}, flat, mesh, {.offset = 0, .total_elements = 160}}, {3});
  EXPECT_EQ(owned.elements(), 0);
  EXPECT_EQ(owned.item.length, (Shape{3, 2, 5}));
  EXPECT_TRUE(owned.Boxes().empty());
  const OwnedPiece sharded =
      OwnedBoxes({{3, 2, 5}, {{"shard", Placement::Shard(0)}}, mesh, {}}, {3});
  EXPECT_EQ(sharded.item.length, (Shape{0, 2, 5}));
  EXPECT_TRUE(sharded.Boxes().empty());
  const OwnedPiece scalar = OwnedBoxes({{}, flat, mesh, {.offset = 0, .total_elements = 4}}, {1});
  EXPECT_EQ(scalar.elements(), 0);
  EXPECT_TRUE(scalar.Boxes().empty());
}

// Row-major global indices of a box of `shape`.
std::vector<int64_t> ElementsOf(const Box& box, const Shape& shape) {
  std::vector<int64_t> elements = {0};
  for (size_t dim = 0; dim < shape.size(); ++dim) {
    std::vector<int64_t> longer;
    for (const int64_t element : elements) {
      for (int64_t i = 0; i < box.length[dim]; ++i) {
        longer.push_back(element * shape[dim] + box.offset[dim] + i);
      }
    }
    elements = longer;
  }
  return elements;
}

// One random world: tensors in one flat buffer, cut by tensor and expert axes first.
struct FlatCase {
  Mesh mesh;
  Placements placements;
  std::vector<Shape> shapes;
  FlatLayout layout;
};

FlatCase RandomFlatCase(std::mt19937_64& random) {
  FlatCase made;
  const auto pick = [&](uint64_t below) { return static_cast<int64_t>(random() % below); };
  made.mesh = *Mesh::Create({{"replicate", 1 + pick(3)},
                             {"shard", 1 + pick(4)},
                             {"expert", 1 + pick(2)},
                             {"tensor", 1 + pick(3)}});
  const int64_t even = made.mesh.AxisSize("expert") * made.mesh.AxisSize("tensor");
  const int64_t block = 1 + pick(3);
  const Placement flat = block > 1 ? Placement::BlockAtomic(block) : Placement::Flat();
  const uint64_t dims = 1 + random() % 4;
  for (const char* axis : {"tensor", "expert"}) {
    if (random() % 2 == 0) {
      made.placements.push_back({axis, Placement::Shard(static_cast<int>(random() % dims))});
    }
  }
  made.placements.push_back({"shard", flat});
  if (random() % 2 == 0) {
    made.placements.push_back({"replicate", flat});
  }
  std::vector<LayoutItem> items;
  for (int i = 0; i < 3; ++i) {
    Shape shape = {pick(9)};
    while (shape.size() < dims) {
      shape.push_back(even * (1 + pick(3)));
    }
    const Shape item = ItemBox(shape, made.placements, made.mesh, {0, 0, 0, 0}).length;
    items.push_back({.name = std::to_string(i),
                     .elements = ElementCount(item),
                     .atom_elements = std::max<int64_t>(1, RowElements(item)) * block});
    made.shapes.push_back(shape);
  }
  made.layout = PlanFlatLayout(
      items,
      {.width = FlatPieceCount(made.placements, made.mesh), .alignment_elements = 1 + pick(3)});
  return made;
}

// The flat buffer of a coordinate, written element by element with global indices of tensor `i`.
std::vector<int64_t> WrittenBuffer(const FlatCase& one, size_t tensor, const Coordinate& at) {
  std::vector<int64_t> buffer(static_cast<size_t>(one.layout.total_elements()), -1);
  const Box item = ItemBox(one.shapes[tensor], one.placements, one.mesh, at);
  const std::vector<int64_t> elements = ElementsOf(item, one.shapes[tensor]);
  std::copy(elements.begin(), elements.end(), buffer.begin() + one.layout.offsets[tensor]);
  return buffer;
}

// Flat and BlockAtomic on one and two axes below up to two cuts: boxes are what a buffer filled
// with indices holds in the rank's interval, and all replicas 0 hold each element once.
TEST(OwnedBoxesTest, RandomFlatPlacementsAgainstABufferOfIndices) {
  std::mt19937_64 random(testing::kSeed + 4);
  for (int round = 0; round < 1500; ++round) {
    const FlatCase one = RandomFlatCase(random);
    for (size_t i = 0; i < one.shapes.size(); ++i) {
      const Shape& shape = one.shapes[i];
      SCOPED_TRACE(one.mesh.Text() + " " + PlacementsText(one.placements) + " " + ShapeText(shape) +
                   " round " + std::to_string(round));
      ASSERT_TRUE(
          ValidatePlacements({"t", shape}, one.mesh, one.placements, BufferUse::kValues).ok());
      std::multiset<int64_t> once;
      for (int64_t rank = 0; rank < one.mesh.rank_count(); ++rank) {
        const Coordinate at = one.mesh.CoordinateOf(rank);
        const OwnedPiece owned = OwnedBoxes(
            {shape,
             one.placements,
             one.mesh,
             {.offset = one.layout.offsets[i], .total_elements = one.layout.total_elements()}},
            at);
        std::vector<int64_t> elements;
        for (const Box& box : owned.Boxes()) {
          const std::vector<int64_t> more = ElementsOf(box, shape);
          elements.insert(elements.end(), more.begin(), more.end());
        }
        const ElementRange mine =
            FlatInterval(one.layout.total_elements(), one.placements, one.mesh, at);
        const std::vector<int64_t> buffer = WrittenBuffer(one, i, at);
        std::vector<int64_t> expected;
        for (int64_t at_element = mine.begin; at_element < mine.end; ++at_element) {
          const int64_t global = buffer[static_cast<size_t>(at_element)];
          if (global >= 0) {
            if (expected.empty()) {
              ASSERT_EQ(owned.shard_offset, at_element - mine.begin);
            }
            expected.push_back(global);
          }
        }
        ASSERT_EQ(elements, expected);
        ASSERT_EQ(owned.elements(), static_cast<int64_t>(expected.size()));
        ASSERT_LE(owned.Boxes().size(), 1u);  // boundaries lie between rows
        // The same elements run by run, each where it lies in the buffer.
        std::vector<int64_t> by_runs;
        owned.VisitRuns(shape, [&](const OwnedRun& run) {
          for (int64_t k = 0; k < run.elements; ++k) {
            EXPECT_EQ(owned.IndexOf(shape, static_cast<int64_t>(by_runs.size())), run.first + k);
            EXPECT_EQ(buffer[static_cast<size_t>(mine.begin + run.offset + k)], run.first + k);
            by_runs.push_back(run.first + k);
          }
        });
        ASSERT_EQ(by_runs, expected);
        if (ReplicaOf(one.placements, one.mesh, at) == 0) {
          once.insert(elements.begin(), elements.end());
        }
      }
      const std::vector<int64_t> all = FirstIntegers(ElementCount(shape));
      ASSERT_EQ(std::vector<int64_t>(once.begin(), once.end()), all);
    }
  }
}

// Cuts inside rows, which no layout of rows makes: at most 2 (n-1) + 1 boxes.
TEST(OwnedBoxesTest, RangesInsideRowsAreFewBoxes) {
  const Mesh mesh = *Mesh::Create({{"shard", 7}});
  const Shape shape = {4, 3, 2, 5};
  size_t most = 0;
  std::vector<int64_t> all;
  for (int64_t rank = 0; rank < 7; ++rank) {
    const Placements flat = {{"shard", Placement::Flat()}};
    const OwnedPiece owned =
        OwnedBoxes({shape, flat, mesh, {.offset = 1, .total_elements = 126}}, {rank});
    most = std::max(most, owned.Boxes().size());
    int64_t elements = 0;
    for (const Box& box : owned.Boxes()) {
      elements += ElementCount(box.length);
      const std::vector<int64_t> more = ElementsOf(box, shape);
      all.insert(all.end(), more.begin(), more.end());
    }
    EXPECT_EQ(elements, owned.elements());
  }
  EXPECT_EQ(all, FirstIntegers(120));
  EXPECT_GT(most, 2u);
  EXPECT_LE(most, 2u * (4 - 1) + 1);
}

// 8 x 4 gate_up over three ranks of 12: parts are cut by their sizes in the item of 32.
TEST(OwnedBoxesTest, BundleSplitUsesItemSize) {
  const std::vector<int64_t> parts = {16, 16};
  EXPECT_THAT(SplitBundle(parts, 32, {0, 12}), ElementsAre(BundlePiece{{0, 12}, 0}, BundlePiece{}));
  EXPECT_THAT(SplitBundle(parts, 32, {12, 24}),
              ElementsAre(BundlePiece{{12, 16}, 0}, BundlePiece{{0, 8}, 4}));
  EXPECT_THAT(SplitBundle(parts, 32, {24, 32}),
              ElementsAre(BundlePiece{}, BundlePiece{{8, 16}, 0}));
  // A local count in the item's place is refused, not used.
  EXPECT_DEATH(SplitBundle(parts, 12, {0, 12}), "the parts of a bundle are its item");
  EXPECT_DEATH(SplitBundle({12, 12}, 32, {12, 24}), "the parts of a bundle are its item");
  EXPECT_DEATH(SplitBundle(parts, 12, {12, 24}), "CHECK failed");
}

// The same function where `tensor` cuts every part and where it replicates the bundle: each rank
// keeps what its own item holds, and a replica keeps all that the first one keeps.
TEST(OwnedBoxesTest, BundleSplitWhenReplicatedOverTp) {
  const Mesh mesh = *Mesh::Create({{"shard", 3}, {"tensor", 2}});
  for (const bool cut : {false, true}) {
    Placements placements = {{"shard", Placement::Flat()}};
    if (cut) {
      placements.insert(placements.begin(), {"tensor", Placement::Shard(0)});
    }
    const Shape part = {4, 4};  // gate and up
    const int64_t part_elements = ElementCount(ItemBox(part, placements, mesh, {0, 0}).length);
    EXPECT_EQ(part_elements, cut ? 8 : 16);
    const int64_t item = 2 * part_elements;
    const int64_t total = RoundUp(item, 3 * 4);
    for (int64_t t = 0; t < 2; ++t) {
      std::vector<int64_t> kept(2, 0);
      for (int64_t d = 0; d < 3; ++d) {
        const OwnedPiece owned = OwnedBoxes(
            {{item}, {{"shard", Placement::Flat()}}, mesh, {.offset = 0, .total_elements = total}},
            {d, t});
        const std::vector<BundlePiece> pieces =
            SplitBundle({part_elements, part_elements}, item, owned.range);
        for (size_t k = 0; k < pieces.size(); ++k) {
          // The part alone, placed where it lies in the item, is owned alike.
          const OwnedPiece alone = OwnedBoxes(
              {part,
               placements,
               mesh,
               {.offset = static_cast<int64_t>(k) * part_elements, .total_elements = total}},
              {d, t});
          EXPECT_EQ(pieces[k].in_part.size(), alone.elements());
          if (alone.elements() > 0) {
            EXPECT_EQ(pieces[k].in_part, alone.range);
            EXPECT_EQ(pieces[k].local_begin, alone.shard_offset);
          }
          kept[k] += pieces[k].in_part.size();
        }
      }
      EXPECT_THAT(kept, ElementsAre(part_elements, part_elements));
    }
  }
}

}  // namespace
}  // namespace ravel::plan
