#include "common/plan/layout/placement.h"

#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/plan/layout/owned_boxes.h"
#include "common/plan/layout/placement_move.h"
#include "tests/common/plan/plan_testing.h"

namespace ravel::plan {
namespace {

using ::testing::HasSubstr;

constexpr Placement kRep = Placement::Replicate();
constexpr Placement kPart = Placement::Partial();
constexpr Placement kFlat = Placement::Flat();
constexpr Placement kBlock = Placement::BlockAtomic(32);
constexpr Placement kWhole = Placement::TensorAtomic();

Mesh DataMesh(int64_t outer, int64_t inner, int64_t tensor = 1) {
  return *Mesh::Create({{"replicate", outer}, {"shard", inner}, {"tensor", tensor}});
}
const PlacedTensor& Weight() {
  static const PlacedTensor tensor = {"model.w", {96, 64}};
  return tensor;
}
// Inner first, as a table row (outer, inner) is read from the right.
Placements DataAxes(const Placement& outer, const Placement& inner) {
  return Canonical({{"shard", inner}, {"replicate", outer}}, DataMesh(2, 4));
}
std::string MessageOf(const absl::Status& status) {
  return std::string(status.message());
}

// What the kinds of a sequence are and what they leave.
std::vector<std::string> StepsOf(const absl::StatusOr<std::vector<Move>>& moves) {
  std::vector<std::string> steps;
  if (!moves.ok()) {
    return {moves.status().ToString()};
  }
  for (const Move& move : *moves) {
    steps.push_back(std::string(MoveKindName(move.kind)) + " on " + move.axis + " to " +
                    PlacementsText(move.after));
  }
  return steps;
}

TEST(PlacementMoveTest, ExactlyTheListedMovesAreLegal) {
  const std::map<std::pair<std::string, std::string>, MoveKind> legal = {
      {{"Flat", "Replicate"}, MoveKind::kAllGather},
      {{"BlockAtomic(32)", "Replicate"}, MoveKind::kAllGather},
      {{"Partial", "Replicate"}, MoveKind::kAllReduce},
      {{"Partial", "Flat"}, MoveKind::kReduceScatter},
      {{"Partial", "BlockAtomic(32)"}, MoveKind::kReduceScatter},
      {{"Replicate", "Flat"}, MoveKind::kView},
      {{"Replicate", "BlockAtomic(32)"}, MoveKind::kView},
      {{"Flat", "TensorAtomic"}, MoveKind::kAllToAll},
      {{"BlockAtomic(32)", "TensorAtomic"}, MoveKind::kAllToAll},
      {{"TensorAtomic", "Flat"}, MoveKind::kAllToAll},
      {{"TensorAtomic", "BlockAtomic(32)"}, MoveKind::kAllToAll},
      {{"Replicate", "Shard(0)"}, MoveKind::kView},
      {{"Replicate", "Shard(1)"}, MoveKind::kView},
  };
  const std::vector<Placement> all = {
      kRep, kPart, kFlat, kBlock, kWhole, Placement::Shard(0), Placement::Shard(1)};
  for (const int64_t size : {4, 1}) {
    const Mesh mesh = DataMesh(2, size);
    for (const Placement& from : all) {
      for (const Placement& to : all) {
        SCOPED_TRACE(PlacementText(from) + " to " + PlacementText(to));
        const absl::StatusOr<Move> move =
            PlanMove(Weight(), mesh, Canonical({{"shard", from}}, mesh), {"shard", to});
        const auto expected = legal.find({PlacementText(from), PlacementText(to)});
        ASSERT_EQ(move.ok(), expected != legal.end()) << move.status();
        if (!move.ok()) {
          EXPECT_EQ(MessageOf(move.status()),
                    "tensor model.w: axis shard: cannot move from " + PlacementText(from) + " to " +
                        PlacementText(to) + ": there is no such move");
          continue;
        }
        EXPECT_EQ(PlacementOn(move->after, "shard"), to);
        if (size > 1) {
          EXPECT_EQ(move->kind, expected->second);
        } else {
          EXPECT_EQ(move->kind, from == kPart ? MoveKind::kCopy : MoveKind::kView);
          EXPECT_EQ(MoveBytes(*move, mesh, 96 * 64, 4), 0);
        }
      }
    }
  }
}

TEST(PlacementMoveTest, ReducesGoInnerFirstAndGathersOuterFirst) {
  const Mesh mesh = DataMesh(2, 4);
  EXPECT_THAT(
      StepsOf(PlanMoves(Weight(), mesh, DataAxes(kPart, kPart), DataAxes(kFlat, kFlat))),
      ::testing::ElementsAre("reduce-scatter on shard to [shard Flat, replicate Partial]",
                             "reduce-scatter on replicate to [shard Flat, replicate Flat]"));
  EXPECT_THAT(StepsOf(PlanMoves(Weight(), mesh, DataAxes(kFlat, kFlat), DataAxes(kRep, kRep))),
              ::testing::ElementsAre("all-gather on replicate to [shard Flat]",
                                     "all-gather on shard to []"));
}

// Outer optim with inner optim_grads, as one step walks through it.
TEST(PlacementMoveTest, OuterOptimWithInnerOptimGrads) {
  const Mesh mesh = DataMesh(2, 4);
  EXPECT_THAT(StepsOf(PlanMoves(Weight(), mesh, DataAxes(kPart, kPart), DataAxes(kPart, kFlat))),
              ::testing::ElementsAre("reduce-scatter on shard to [shard Flat, replicate Partial]"));
  EXPECT_THAT(
      StepsOf(PlanMoves(Weight(), mesh, DataAxes(kPart, kFlat), DataAxes(kFlat, kFlat))),
      ::testing::ElementsAre("reduce-scatter on replicate to [shard Flat, replicate Flat]"));
}

TEST(PlacementMoveTest, NestedFlatAxesAreLeftFromOutside) {
  const Mesh mesh = DataMesh(2, 4);
  EXPECT_EQ(MessageOf(PlanMove(Weight(), mesh, DataAxes(kFlat, kFlat), {"shard", kRep}).status()),
            "tensor model.w: axis shard: cannot move from Flat to Replicate: axis replicate lies "
            "outside and must be gathered first");
  EXPECT_EQ(
      MessageOf(PlanMove(Weight(), mesh, DataAxes(kFlat, kPart), {"shard", kFlat}).status()),
      "tensor model.w: axis shard: cannot move from Partial to Flat: axis replicate lies outside "
      "and is Flat; inner axis first");
  EXPECT_EQ(
      MessageOf(PlanMove(Weight(), mesh, DataAxes(kFlat, kFlat), {"replicate", kWhole}).status()),
      "tensor model.w: axis replicate: cannot move from Flat to TensorAtomic: axis shard is Flat "
      "too; gather it first");
  EXPECT_EQ(
      MessageOf(
          PlanMove(Weight(), DataMesh(2, 4, 2), {{"shard", kFlat}}, {"tensor", Placement::Shard(0)})
              .status()),
      "tensor model.w: axis tensor: cannot move from Replicate to Shard(0): axis shard is "
      "already Flat, and Shard is cut before Flat");
}

TEST(PlacementMoveTest, WholeTensorsAreReachedAndLeftThroughFlat) {
  const Mesh mesh = DataMesh(2, 4);
  EXPECT_THAT(
      StepsOf(PlanMoves(Weight(), mesh, DataAxes(kRep, kWhole), DataAxes(kRep, kRep))),
      ::testing::ElementsAre("all-to-all on shard to [shard Flat]", "all-gather on shard to []"));
  EXPECT_THAT(StepsOf(PlanMoves(Weight(), mesh, DataAxes(kRep, kPart), DataAxes(kRep, kWhole))),
              ::testing::ElementsAre("reduce-scatter on shard to [shard Flat]",
                                     "all-to-all on shard to [shard TensorAtomic]"));
  EXPECT_THAT(StepsOf(PlanMoves(Weight(), mesh, DataAxes(kFlat, kFlat), DataAxes(kRep, kWhole))),
              ::testing::ElementsAre("all-gather on replicate to [shard Flat]",
                                     "all-to-all on shard to [shard TensorAtomic]"));
  EXPECT_THAT(StepsOf(PlanMoves(Weight(), mesh, DataAxes(kRep, kWhole), DataAxes(kRep, kBlock))),
              ::testing::ElementsAre("all-to-all on shard to [shard BlockAtomic(32)]"));
}

TEST(PlacementMoveTest, NothingToDoIsNoMoves) {
  EXPECT_THAT(
      StepsOf(PlanMoves(
          Weight(), DataMesh(2, 4), {{"shard", kFlat}, {"replicate", kRep}}, {{"shard", kFlat}})),
      ::testing::IsEmpty());
}

TEST(PlacementMoveTest, SequencesWithoutALegalMoveNameWhatIsWrong) {
  const Mesh mesh = DataMesh(2, 4, 2);
  const Placements row = {{"tensor", Placement::Shard(1)}, {"shard", kFlat}};
  EXPECT_EQ(MessageOf(PlanMoves(Weight(), mesh, row, {{"shard", kFlat}}).status()),
            "tensor model.w: axis tensor: cannot move from Shard(1) to Replicate: there is no such "
            "move");
  EXPECT_EQ(MessageOf(PlanMoves(Weight(), mesh, {}, {{"shard", kPart}}).status()),
            "tensor model.w: axis shard: cannot move from Replicate to Partial: there is no such "
            "move");
  EXPECT_THAT(MessageOf(PlanMoves(Weight(),
                                  mesh,
                                  {{"tensor", Placement::Shard(0)}, {"shard", Placement::Shard(0)}},
                                  {{"shard", Placement::Shard(0)}, {"tensor", Placement::Shard(0)}})
                            .status()),
              HasSubstr("tensor model.w: no moves from [tensor Shard(0), shard Shard(0)] to [shard "
                        "Shard(0), tensor Shard(0)]: the order of the cuts differs"));
}

TEST(PlacementMoveTest, BytesAreThoseOfTheLargerSide) {
  const Mesh mesh = DataMesh(2, 4);
  const int64_t elements = 96 * 64;
  const auto bytes = [&](const Placements& from, const AxisPlacement& to) {
    return MoveBytes(*PlanMove(Weight(), mesh, from, to), mesh, elements, 4);
  };
  EXPECT_EQ(bytes(DataAxes(kRep, kFlat), {"shard", kRep}), elements * 4 * 3 / 4);
  EXPECT_EQ(bytes(DataAxes(kRep, kPart), {"shard", kFlat}), elements * 4 * 3 / 4);
  EXPECT_EQ(bytes(DataAxes(kRep, kPart), {"shard", kRep}), 2 * elements * 4 * 3 / 4);
  EXPECT_EQ(bytes(DataAxes(kRep, kFlat), {"shard", kWhole}), elements / 4 * 4 * 3 / 4);
  EXPECT_EQ(bytes(DataAxes(kPart, kFlat), {"replicate", kFlat}), elements / 4 * 4 / 2);
  EXPECT_EQ(bytes(DataAxes(kPart, kFlat), {"replicate", kRep}), 2 * elements / 4 * 4 / 2);
}

// Every rank's part of one flat buffer; addends are numbers that depend on the rank.
struct FlatWorld {
  const Mesh& mesh;
  int64_t total = 0;
  std::vector<std::vector<int64_t>> parts;
};

int64_t AddendOf(int64_t element, int64_t rank) {
  return element * 1000 + rank * rank + 1;
}

// What a rank holds under `placements`, by definition: its interval of the sum over those Partial
// axes that have been reduced, which are the ones that are no longer Partial.
std::vector<int64_t> Expected(const FlatWorld& world, const Placements& now, int64_t rank) {
  std::vector<std::string> reduced;
  for (const MeshAxis& axis : world.mesh.axes()) {
    if (PlacementOn(now, axis.name) != kPart) {
      reduced.push_back(axis.name);
    }
  }
  const ElementRange range =
      FlatInterval(world.total, now, world.mesh, world.mesh.CoordinateOf(rank));
  std::vector<int64_t> values;
  for (int64_t element = range.begin; element < range.end; ++element) {
    int64_t sum = 0;
    for (const int64_t other : world.mesh.GroupOf(rank, reduced)) {
      sum += AddendOf(element, other);
    }
    values.push_back(sum);
  }
  return values;
}

// The collective itself, which knows its group and its buffers and nothing else.
void Perform(const Move& move, FlatWorld* world) {
  const std::vector<std::vector<int64_t>> before = world->parts;
  const auto of = [&](int64_t rank) -> const std::vector<int64_t>& {
    return before[static_cast<size_t>(rank)];
  };
  for (int64_t rank = 0; rank < world->mesh.rank_count(); ++rank) {
    const std::vector<int64_t> group = world->mesh.GroupOf(rank, {move.axis});
    const auto place = static_cast<size_t>(world->mesh.GroupIndex(rank, {move.axis}));
    std::vector<int64_t> result;
    if (move.from.in_flat_family()) {
      for (const int64_t other : group) {
        result.insert(result.end(), of(other).begin(), of(other).end());
      }
    } else {
      result = of(rank);
      if (move.from == kPart) {
        std::fill(result.begin(), result.end(), 0);
        for (const int64_t other : group) {
          for (size_t i = 0; i < result.size(); ++i) {
            result[i] += of(other)[i];
          }
        }
      }
      if (move.to.in_flat_family()) {
        const size_t piece = result.size() / group.size();
        result = {result.begin() + static_cast<std::ptrdiff_t>(place * piece),
                  result.begin() + static_cast<std::ptrdiff_t>((place + 1) * piece)};
      }
    }
    world->parts[static_cast<size_t>(rank)] = result;
  }
}

// Collectives on one axis after another leave every rank with the interval that the placements
// say, and no permutation is needed on the way there or back.
TEST(PlacementMoveTest, RandomSequencesLeaveWhatThePlacementsSay) {
  std::mt19937_64 random(testing::kSeed + 1);
  for (int round = 0; round < 300; ++round) {
    std::vector<MeshAxis> axes;
    for (uint64_t i = 0, count = 1 + random() % 3; i < count; ++i) {
      axes.push_back({"a" + std::to_string(i), static_cast<int64_t>(1 + random() % 3)});
    }
    const Mesh mesh = *Mesh::Create(axes);
    FlatWorld world = {mesh, mesh.rank_count() * 4, {}};
    Placements partial;
    Placements cut;
    for (size_t i = axes.size(); i-- > 0;) {
      partial.push_back({axes[i].name, kPart});
      const uint64_t choice = random() % 3;
      cut.push_back({axes[i].name, choice == 0 ? kPart : choice == 1 ? kFlat : kRep});
    }
    for (int64_t rank = 0; rank < mesh.rank_count(); ++rank) {
      world.parts.emplace_back();
      for (int64_t element = 0; element < world.total; ++element) {
        world.parts.back().push_back(AddendOf(element, rank));
      }
    }
    Placements gathered;
    for (const AxisPlacement& entry : cut) {
      gathered.push_back({entry.axis, entry.placement == kFlat ? kRep : entry.placement});
    }
    SCOPED_TRACE(mesh.Text() + " " + PlacementsText(cut) + " round " + std::to_string(round));
    const PlacedTensor tensor = {"t", {world.total}};
    Placements now = partial;
    for (const Placements& goal : {cut, gathered}) {
      const absl::StatusOr<std::vector<Move>> moves = PlanMoves(tensor, mesh, now, goal);
      ASSERT_TRUE(moves.ok()) << moves.status();
      for (const Move& move : *moves) {
        Perform(move, &world);
        for (int64_t rank = 0; rank < mesh.rank_count(); ++rank) {
          ASSERT_EQ(world.parts[static_cast<size_t>(rank)], Expected(world, move.after, rank))
              << MoveKindName(move.kind) << " on " << move.axis << ", rank " << rank;
        }
      }
      now = goal;
    }
  }
}

struct BadPlacements {
  Placements placements;
  std::string says;
};
TEST(PlacementTest, RefusalsNameTensorAndAxis) {
  const Mesh mesh = *Mesh::Create({{"replicate", 2}, {"shard", 4}, {"expert", 2}, {"tensor", 5}});
  const std::vector<BadPlacements> bad = {
      {{{"pipeline", kFlat}}, "axis pipeline: the mesh is replicate 2 x shard 4"},
      {{{"shard", kFlat}, {"shard", kRep}}, "axis shard: has two placements"},
      {{{"shard", kPart}}, "axis shard: Partial is for gradients only"},
      {{{"tensor", Placement::Shard(2)}}, "axis tensor: Shard(2): the tensor has 2 dimensions"},
      {{{"tensor", Placement::Shard(-1)}}, "axis tensor: Shard(-1)"},
      {{{"shard", kFlat}, {"tensor", Placement::Shard(0)}},
       "axis tensor: Shard(0) must come before Flat on axis shard"},
      {{{"replicate", kFlat}, {"shard", kFlat}},
       "axis shard: Flat must come before that of axis replicate"},
      {{{"shard", kWhole}, {"replicate", kFlat}}, "axis replicate: Flat beside TensorAtomic"},
      {{{"shard", kFlat}, {"replicate", kWhole}}, "axis replicate: TensorAtomic beside Flat"},
      {{{"shard", kFlat}, {"replicate", kBlock}},
       "axis replicate: BlockAtomic(32) is not a divisor of Flat on axis shard"},
      {{{"shard", kBlock}, {"replicate", Placement::BlockAtomic(24)}},
       "axis replicate: BlockAtomic(24) is not a divisor of BlockAtomic(32)"},
      {{{"shard", Placement::BlockAtomic(0)}}, "axis shard: BlockAtomic(0): expected at least 1"},
      {{{"tensor", Placement::Shard(1)}, {"shard", kFlat}},
       "axis tensor: Shard(1) of shape [96, 64] over 5 ranks is uneven"},
  };
  for (const BadPlacements& one : bad) {
    const absl::Status status =
        ValidatePlacements(Weight(), mesh, one.placements, BufferUse::kValues);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(MessageOf(status), HasSubstr("tensor model.w: " + one.says));
  }
}

TEST(PlacementTest, WhatTheTableNeedsIsValid) {
  const Mesh mesh = *Mesh::Create({{"replicate", 2}, {"shard", 4}, {"expert", 2}, {"tensor", 5}});
  const std::vector<Placements> good = {
      {},
      {{"shard", kFlat}, {"replicate", kFlat}},
      {{"shard", kBlock}, {"replicate", kFlat}},
      {{"shard", kBlock}, {"replicate", Placement::BlockAtomic(16)}},
      {{"tensor", Placement::Shard(0)}, {"shard", kFlat}},
      {{"tensor", Placement::Shard(1)}},
      {{"tensor", Placement::Shard(0)}, {"shard", Placement::Shard(0)}},
      {{"expert", Placement::Shard(0)}, {"shard", kWhole}},
  };
  for (const Placements& one : good) {
    const absl::Status status = ValidatePlacements(Weight(), mesh, one, BufferUse::kValues);
    EXPECT_TRUE(status.ok()) << status;
  }
  EXPECT_TRUE(ValidatePlacements(
                  Weight(), mesh, {{"shard", kFlat}, {"replicate", kPart}}, BufferUse::kGradient)
                  .ok());
}

TEST(PlacementTest, CanonicalListsCompare) {
  const Mesh mesh = DataMesh(2, 4, 2);
  EXPECT_EQ(Canonical({{"replicate", kPart}, {"tensor", kRep}, {"shard", kPart}}, mesh),
            (Placements{{"shard", kPart}, {"replicate", kPart}}));
  EXPECT_EQ(Canonical({{"replicate", kPart}, {"shard", kFlat}}, mesh),
            (Placements{{"shard", kFlat}, {"replicate", kPart}}));
  EXPECT_EQ(PlacementsText({{"tensor", Placement::Shard(0)}, {"shard", kBlock}}),
            "[tensor Shard(0), shard BlockAtomic(32)]");
  EXPECT_EQ(
      CutCount({{"tensor", Placement::Shard(0)}, {"shard", kFlat}, {"replicate", kPart}}, mesh), 8);
}

}  // namespace
}  // namespace ravel::plan
