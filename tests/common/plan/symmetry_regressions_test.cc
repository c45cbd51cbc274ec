// Classes of bugs between ranks, and of experts, each named; see plan_regressions_test.cc. Each
// test says what it fails without.

#include <algorithm>
#include <map>
#include <numeric>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/plan/check/program_checker.h"
#include "common/plan/layout/owned_boxes.h"
#include "common/plan/layout/placement.h"
#include "common/plan/layout/strategy_table.h"
#include "common/plan/plan_pieces.h"
#include "common/plan/report/plan_report.h"
#include "common/plan/save/save_plan.h"
#include "tests/common/plan/layout/rank_check.h"
#include "tests/common/plan/plan_testing.h"

namespace ravel::plan {
namespace {

using ::testing::HasSubstr;

ShardingPlan PlanFor(int64_t ranks, Strategy strategy, bool shared_memory) {
  JobSpec spec = testing::SpecOf(testing::Llama(64, 2, 96, 257), 8);
  spec.strategy = strategy;
  return *BuildShardingPlan({.spec = spec, .ranks = ranks, .shared_memory = shared_memory});
}

// Fails when the order of collectives depends on more than the plan: here one rank goes through the
// groups of a unit's step in another order, which the check between ranks must find.
TEST(SymmetryRegression, CollectiveOrderIsSorted) {
  const ShardingPlan plan = PlanFor(3, Strategy::kOptimGradsParams, false);
  EXPECT_EQ(plan.programs.size(), PlanFor(3, Strategy::kOptimGradsParams, false).programs.size());
  for (const StepProgram& program : plan.programs) {
    std::vector<const StepProgram*> same(3, &program);
    EXPECT_TRUE(CheckRanks(plan, same).ok());
    StepProgram other = program;
    std::vector<Instruction*> gathers;
    for (Instruction& at : other.instructions) {
      if (at.op == OpCode::kGather) {
        gathers.push_back(&at);
      }
    }
    ASSERT_GE(gathers.size(), 2U);
    std::swap(gathers[0]->group, gathers[1]->group);
    std::swap(gathers[0]->unit, gathers[1]->unit);
    std::swap(gathers[0]->operands, gathers[1]->operands);
    same[1] = &other;
    EXPECT_THAT(std::string(CheckRanks(plan, same).message()), HasSubstr("K4"));
  }
}

// Fails when the list of saved tensors is made from what a rank happens to own.
TEST(SymmetryRegression, KeyListsEqualOnAllRanks) {
  std::vector<std::string> expected;
  for (const Strategy strategy : {Strategy::kOptimGradsParams, Strategy::kNoShard}) {
    for (const int64_t ranks : {1, 3, 8}) {
      const absl::StatusOr<SavePlan> save = BuildSavePlan(PlanFor(ranks, strategy, false));
      ASSERT_TRUE(save.ok()) << save.status();
      std::vector<std::string> keys;
      for (const StateTensor& tensor : save->tensors) {
        keys.push_back(tensor.key);
      }
      EXPECT_TRUE(std::is_sorted(keys.begin(), keys.end()));
      if (expected.empty()) {
        expected = keys;
      }
      EXPECT_EQ(keys, expected) << ranks << " ranks";
    }
  }
}

// Offsets are part of the one plan of all ranks; two ranks with different ones are refused when
// they allocate (worker/comm). Here: fails when an offset leaves the alignment or its arena.
TEST(SymmetryRegression, ArenaOffsetsEqualOnAllRanks) {
  for (const bool shared_memory : {false, true}) {
    const ShardingPlan plan = PlanFor(4, Strategy::kOptimGrads, shared_memory);
    const ShardingPlan again = PlanFor(4, Strategy::kOptimGrads, shared_memory);
    EXPECT_EQ(plan.memory.offsets, again.memory.offsets);
    for (size_t i = 0; i < plan.buffers.size(); ++i) {
      if (plan.buffers[i].inside < 0) {
        ShardingPlan moved = plan;
        moved.memory.offsets[i] += 4;
        EXPECT_FALSE(CheckPlan(moved).ok()) << plan.buffers[i].name;
      }
    }
  }
}

// One program for all ranks, whatever they own: the engine runs it where most ranks have nothing of
// a unit (StrategyMatrix, width 8). Fails when a rank stays away from a collective.
TEST(SymmetryRegression, EmptyShardJoinsEveryCollective) {
  const ShardingPlan plan = PlanFor(8, Strategy::kOptimGradsParams, false);
  const StepProgram& program = plan.programs.front();
  std::map<GroupId, int> reduced;
  for (const Instruction& at : program.instructions) {
    reduced[at.group] += at.op == OpCode::kReduce ? 1 : 0;
  }
  for (int group = 0; group < static_cast<int>(plan.groups.size()); ++group) {
    EXPECT_GE(reduced[group], 1) << "group " << group;
  }
  std::vector<const StepProgram*> ranks(8, &program);
  EXPECT_TRUE(CheckRanks(plan, ranks).ok());
  // A rank without a piece of some group that stayed away would be found.
  StepProgram without = program;
  const auto reduce = std::find_if(without.instructions.begin(),
                                   without.instructions.end(),
                                   [](const Instruction& at) { return at.op == OpCode::kReduce; });
  reduce->op = OpCode::kFree;
  reduce->freed = BufferOf(*reduce, Role::kSend);
  ranks[7] = &without;
  EXPECT_FALSE(CheckRanks(plan, ranks).ok());
}

// Sums of contributions 1, 2, 3, 4 of four ranks over the group in which a gradient is reduced.
std::vector<double> SumsOver(const Mesh& mesh, const std::vector<std::string>& axes) {
  std::vector<double> sums;
  for (int64_t rank = 0; rank < mesh.rank_count(); ++rank) {
    double sum = 0;
    for (const int64_t member : mesh.GroupOf(rank, axes)) {
      sum += static_cast<double>(member + 1);
    }
    sums.push_back(sum);
  }
  return sums;
}
std::vector<std::string> PartialAxes(const Placements& placements) {
  std::vector<std::string> axes;
  for (const AxisPlacement& entry : placements) {
    if (entry.placement.kind == PlacementKind::kPartial) {
      axes.push_back(entry.axis);
    }
  }
  return axes;
}

// Four ranks, two expert groups {0,2} and {1,3}. An expert's gradient holds the tokens of both
// ranks of its expert group when it arrives, so that its sum over {0,2} is the sum over all four
// and has the denominator of everything else. Fails when expert gradients are averaged over their
// group, or reduced over the axis that holds other experts.
TEST(SymmetryRegression, ExpertDenominator) {
  const Mesh mesh = *Mesh::Create({{kShardAxis, 4}});
  const Mesh experts = *mesh.ExpertView(2);
  const auto dense = PlacementsOf({}, {"w", {8, 8}}, {}, mesh);
  const auto expert = PlacementsOf({}, {"experts", {4, 8, 8}}, {.expert = true}, experts);
  ASSERT_TRUE(dense.ok()) << dense.status();
  ASSERT_TRUE(expert.ok()) << expert.status();
  const double tokens = 4;
  EXPECT_DOUBLE_EQ(SumsOver(mesh, PartialAxes(dense->gradient_staged))[0] / tokens, 2.5);
  // What a rank of an expert's group holds: tokens of its expert group {0,1} or {2,3}.
  EXPECT_EQ(experts.GroupOf(0, {kExpertAxis}), (std::vector<int64_t>{0, 1}));
  const std::vector<std::string> axes = PartialAxes(expert->gradient_staged);
  EXPECT_EQ(axes, std::vector<std::string>{kShardAxis});
  EXPECT_EQ(experts.GroupOf(0, axes), (std::vector<int64_t>{0, 2}));
  const std::vector<double> arrived = SumsOver(experts, {kExpertAxis});
  double sum = 0;
  for (const int64_t member : experts.GroupOf(0, axes)) {
    sum += arrived[static_cast<size_t>(member)];
  }
  EXPECT_DOUBLE_EQ(sum / tokens, 2.5);
}

// With replicas, experts are reduced over the replicas of their own group of experts. Fails when
// the outer axis takes the ranks that hold other experts.
TEST(SymmetryRegression, ExpertsUseExpertGroupsOnOuterAxis) {
  const Mesh mesh = *Mesh::Create({{kReplicateAxis, 2}, {kShardAxis, 4}});
  const Mesh experts = *mesh.ExpertView(2);
  const auto expert = PlacementsOf({}, {"experts", {4, 8, 8}}, {.expert = true}, experts);
  ASSERT_TRUE(expert.ok()) << expert.status();
  const std::vector<std::string> axes = PartialAxes(expert->gradient_staged);
  EXPECT_THAT(axes, ::testing::UnorderedElementsAre(kShardAxis, kReplicateAxis));
  for (int64_t rank = 0; rank < experts.rank_count(); ++rank) {
    const std::vector<int64_t> group = experts.GroupOf(rank, axes);
    EXPECT_EQ(group.size(), 4U);
    for (const int64_t member : group) {
      EXPECT_EQ(experts.CoordinateOf(member).back(), experts.CoordinateOf(rank).back());
    }
  }
}

// The elements of a 16 x 6 tensor that are a rank's under `placements`, where Flat cuts a buffer of
// twice its size: the last ranks of a shard axis have none.
std::vector<int64_t> OwnedElements(const Placements& placements, const Mesh& mesh, int64_t rank) {
  const Shape shape = {16, 6};
  const int64_t item = ElementCount(ItemBox(shape, placements, mesh, {0, 0, 0}).length);
  const FlatPlace place = {.offset = 0, .total_elements = 2 * item};
  std::vector<int64_t> elements;
  for (const Box& box :
       OwnedBoxes({shape, placements, mesh, place}, mesh.CoordinateOf(rank)).Boxes()) {
    for (int64_t y = box.offset[0]; y < box.offset[0] + box.length[0]; ++y) {
      for (int64_t x = box.offset[1]; x < box.offset[1] + box.length[1]; ++x) {
        elements.push_back(y * 6 + x);
      }
    }
  }
  return elements;
}

// The amax of a weight is a maximum over its owners, whatever the axes are called: every element
// has one owner in the group, ranks with an empty shard are members, and replicas, whose copies are
// equal, are in other groups. Fails when an axis of copies joins the group, or an axis that cuts
// the tensor does not.
TEST(SymmetryRegression, AmaxGroupExcludesReplicas) {
  const Mesh mesh = *Mesh::Create({{kReplicateAxis, 2}, {kShardAxis, 3}, {kTensorAxis, 2}});
  const auto group_axes = [&](std::string_view strategy, TensorParallelKind cut) {
    const absl::StatusOr<NamedStrategy> named = FindStrategy(strategy);
    const auto roles = PlacementsOf(named->choice, {"w", {16, 6}}, {.tensor_parallel = cut}, mesh);
    EXPECT_TRUE(roles.ok()) << roles.status();
    const Placements& weight = roles->optimizer;
    const std::vector<std::string> axes = CutAxes(weight);
    for (int64_t rank = 0; rank < mesh.rank_count(); ++rank) {
      std::vector<int64_t> covered;
      bool empty_member = false;
      for (const int64_t member : mesh.GroupOf(rank, axes)) {
        const std::vector<int64_t> owned = OwnedElements(weight, mesh, member);
        empty_member |= owned.empty();
        covered.insert(covered.end(), owned.begin(), owned.end());
      }
      std::sort(covered.begin(), covered.end());
      std::vector<int64_t> all(16 * 6);
      std::iota(all.begin(), all.end(), int64_t{0});
      EXPECT_EQ(covered, all) << strategy << ", group of rank " << rank;
      EXPECT_EQ(empty_member, FlatPieceCount(weight, mesh) > 1) << strategy << ", rank " << rank;
    }
    return axes;
  };
  const TensorParallelKind column = TensorParallelKind::kColumn;
  const TensorParallelKind whole = TensorParallelKind::kReplicated;
  using ::testing::UnorderedElementsAre;
  EXPECT_THAT(group_axes("hsdp", column), UnorderedElementsAre(kTensorAxis, kShardAxis));
  EXPECT_THAT(group_axes("hsdp", whole), UnorderedElementsAre(kShardAxis));
  EXPECT_THAT(group_axes("hfsdp", column),
              UnorderedElementsAre(kTensorAxis, kShardAxis, kReplicateAxis));
  EXPECT_THAT(group_axes("no_shard", column), UnorderedElementsAre(kTensorAxis));
  EXPECT_THAT(group_axes("no_shard", whole), UnorderedElementsAre());
}

// Weights that are gathered in place are the optimizer's own: one buffer, counted once. Fails when
// main weights inside a gathered buffer are counted, or placed, beside it.
TEST(SymmetryRegression, MainWeightsNotTrackedTwice) {
  const ShardingPlan plan = PlanFor(4, Strategy::kOptimGradsParams, true);
  ASSERT_TRUE(plan.options.gather_in_place);
  int64_t padded = 0;
  for (const GroupLayout& group : plan.groups) {
    padded += group.layout.total_elements() * 4;
  }
  int64_t weights = 0;
  for (const ProgramBuffer& buffer : plan.buffers) {
    const bool holds = buffer.kind == BufferKind::kMainWeight ||
                       buffer.kind == BufferKind::kModelWeight ||
                       buffer.kind == BufferKind::kGathered;
    weights += holds ? ArenaBytes(buffer) : 0;
  }
  EXPECT_EQ(weights, padded);
}

// What an optimizer must know of a tensor is looked up by its id; a piece carries nothing else.
// Fails when decay is decided by a rank's local shape: a piece of a matrix may be one row.
TEST(SymmetryRegression, AttributesSurviveSharding) {
  const ShardingPlan plan = PlanFor(8, Strategy::kOptimGradsParams, false);
  std::map<TensorId, int64_t> owned;
  for (int group = 0; group < static_cast<int>(plan.groups.size()); ++group) {
    for (int64_t rank = 0; rank < plan.ranks; ++rank) {
      for (const OwnedPiece& piece : CountedPieces(plan, group, rank)) {
        owned[piece.tensor] += piece.elements();
      }
    }
  }
  for (size_t i = 0; i < plan.inventory.tensors.size(); ++i) {
    const TensorSpec& tensor = plan.inventory.tensors[i];
    EXPECT_EQ(tensor.decay, tensor.shape.size() == 2) << tensor.name;
    EXPECT_EQ(owned[static_cast<int>(i)], ElementCount(tensor.shape)) << tensor.name;
  }
}

}  // namespace
}  // namespace ravel::plan
