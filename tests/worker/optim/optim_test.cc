// Schedules, the decision of a step, the norm that no partition changes, and what a loaded state
// may not have.

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "common/plan/plan_pieces.h"
#include "kernels/row_sum.h"
#include "kernels/stream.h"
#include "worker/optim/decide_step.h"
#include "worker/optim/lr_schedule.h"
#include "worker/optim/norm_tree.h"
#include "worker/optim/step_messages.h"
#include "worker/optim/step_statistics.h"
#include "worker/optim/stored_state.h"

namespace ravel::optim {
namespace {

using plan::ScheduleKind;

double Rate(ScheduleKind kind, int64_t step, double min_ratio = 0.1) {
  return LearningRate(2.0, {.kind = kind, .warmup_steps = 10, .min_ratio = min_ratio}, 110, step);
}

TEST(LearningRateSchedule, WarmsUpFallsAndEndsAtTheFinalRate) {
  for (const ScheduleKind kind : {ScheduleKind::kConstant,
                                  ScheduleKind::kLinear,
                                  ScheduleKind::kCosine,
                                  ScheduleKind::kWsd}) {
    EXPECT_DOUBLE_EQ(Rate(kind, 0), 0.2);
    EXPECT_DOUBLE_EQ(Rate(kind, 4), 1.0);
    EXPECT_DOUBLE_EQ(Rate(kind, 9), 2.0);
    for (int64_t step = 10; step < 110; ++step) {
      EXPECT_LE(Rate(kind, step), Rate(kind, step - 1) + 1e-15);
    }
    EXPECT_NEAR(Rate(kind, 109), kind == ScheduleKind::kConstant ? 2.0 : 0.2, 1e-15);
  }
  EXPECT_DOUBLE_EQ(Rate(ScheduleKind::kLinear, 59), 1.1);
  EXPECT_NEAR(Rate(ScheduleKind::kCosine, 59), 1.1, 1e-15);
  EXPECT_DOUBLE_EQ(Rate(ScheduleKind::kWsd, 87), 2.0);    // the last fifth begins at step 88
  EXPECT_NEAR(Rate(ScheduleKind::kWsd, 98), 1.1, 1e-12);  // and is half done here
}

TEST(LearningRateSchedule, NoWarmupStartsBelowThePeakOnlyByOneStepOfDecay) {
  const double rate =
      LearningRate(1.0, {.kind = ScheduleKind::kLinear, .warmup_steps = 0, .min_ratio = 0}, 10, 0);
  EXPECT_DOUBLE_EQ(rate, 0.9);
}

TEST(StepDecision, DividesOnceAndClipsToTheNorm) {
  const StepDecision decision = DecideStep(
      {.squared_norm = 400.0, .non_finite = 0, .target_tokens = 4, .loss_sum = 10.0}, 1.0);
  EXPECT_TRUE(decision.apply);
  EXPECT_EQ(decision.loss, 2.5f);
  EXPECT_DOUBLE_EQ(decision.grad_norm, 5.0);
  EXPECT_FLOAT_EQ(decision.gradient_scale, static_cast<float>(1.0 / (5.0 + 1e-6) / 4.0));
  EXPECT_FLOAT_EQ(DecideStep({.squared_norm = 400.0, .target_tokens = 4}, 0.0).gradient_scale,
                  0.25f);
  EXPECT_FLOAT_EQ(DecideStep({.squared_norm = 4.0, .target_tokens = 4}, 1.0).gradient_scale, 0.25f);
}

TEST(StepDecision, SkipsWhatIsNotFiniteAndWhatHasNoTargets) {
  EXPECT_FALSE(DecideStep({.squared_norm = 1.0, .non_finite = 1, .target_tokens = 4}, 1.0).apply);
  EXPECT_FALSE(DecideStep({.squared_norm = std::numeric_limits<double>::infinity(),
                           .non_finite = 0,
                           .target_tokens = 4},
                          1.0)
                   .apply);
  EXPECT_FALSE(DecideStep({.squared_norm = 1.0, .non_finite = 0, .target_tokens = 0}, 1.0).apply);
}

TEST(NormTree, NodesOfRowsAreAlignedAndCoverTheRange) {
  for (int64_t begin = 0; begin < 40; ++begin) {
    for (int64_t end = begin; end < 80; ++end) {
      int64_t row = begin;
      for (const TreeNode& node : NodesOfRows(0, begin, end)) {
        EXPECT_EQ(node.first_row(), row);
        row += node.rows();
      }
      EXPECT_EQ(row, end);
    }
  }
}

plan::ShardingPlan PlanFor(int64_t ranks) {
  plan::JobSpec spec;
  plan::ModelConfig model;
  model.vocab_size = 301;
  model.hidden_size = 300;
  model.intermediate_size = 77;
  model.num_hidden_layers = 2;
  model.num_attention_heads = 6;
  model.num_key_value_heads = 2;
  model.head_dim = 10;
  model.max_position_embeddings = 8;
  spec.model = model;
  spec.data.sequence_length = 4;
  spec.global_batch = 16;
  spec.virtual_ranks = 16;
  spec.steps = 1;
  return *plan::BuildShardingPlan({.spec = spec, .ranks = ranks});
}

TEST(NormTree, AnyNumberOfRanksGivesTheBitsOfOneTreeOverAllRows) {
  // The same random row sums for every partition.
  const plan::ShardingPlan one = PlanFor(1);
  std::mt19937 random(5);
  std::uniform_real_distribution<float> uniform(0.0f, 3.0f);
  std::vector<std::vector<double>> rows;
  std::vector<double> expected;
  for (const plan::TensorSpec& tensor : one.inventory.tensors) {
    std::vector<double>& sums = rows.emplace_back();
    const int64_t count = DivCeil(ElementCount(tensor.shape), StatisticsRowElements(tensor.shape));
    for (int64_t i = 0; i < count; ++i) {
      sums.push_back(static_cast<double>(uniform(random)));
    }
    expected.push_back(kernels::TreeSumDouble(sums.data(), count));
  }
  for (int64_t ranks = 1; ranks <= 16; ++ranks) {
    const plan::ShardingPlan plan = PlanFor(ranks);
    const NormTree tree(plan);
    std::vector<std::vector<double>> values;
    for (int rank = 0; rank < ranks; ++rank) {
      std::vector<double>& mine = values.emplace_back();
      for (const TreeNode& node : tree.nodes(rank)) {
        mine.push_back(kernels::TreeSumDouble(
            rows[static_cast<size_t>(node.tensor)].data() + node.first_row(), node.rows()));
      }
      EXPECT_LE(static_cast<int64_t>(mine.size()), tree.longest());
    }
    const std::vector<double> sums =
        tree.Combine(std::vector<std::span<const double>>(values.begin(), values.end()));
    for (size_t t = 0; t < expected.size(); ++t) {
      EXPECT_EQ(std::bit_cast<uint64_t>(sums[t]), std::bit_cast<uint64_t>(expected[t]))
          << plan.inventory.tensors[t].name << " on " << ranks << " ranks";
    }
  }
}

// A matrix whose columns a tensor axis cuts, one whose rows it cuts, and a vector that each of its
// ranks has, on shards x degree ranks; sums of columns are in `parts`.
plan::ShardingPlan CutPlan(int64_t shards, int64_t degree, int64_t parts) {
  plan::ShardingPlan plan;
  plan.ranks = degree * shards;
  plan.mesh = *plan::Mesh::Create({{plan::kShardAxis, shards}, {plan::kTensorAxis, degree}});
  plan.inventory.cut = {.parts = parts, .degree = degree};
  plan.inventory.units.emplace_back().kind = plan::UnitKind::kLayer;
  const std::vector<Shape> shapes = {{13, 12}, {16, 5}, {300}};
  std::vector<plan::LayoutItem> items;
  for (size_t i = 0; i < shapes.size(); ++i) {
    plan::TensorSpec tensor;
    tensor.name = std::string(1, static_cast<char>('a' + i));
    tensor.name += i == 0 ? ".self_attn.o_proj.weight" : "";  // of a row layer: blocks of columns
    tensor.shape = shapes[i];
    tensor.site = static_cast<uint32_t>(i);
    tensor.unit = 0;
    tensor.cut = {.dim = i == 2 ? -1 : 1 - static_cast<int>(i), .ranks = degree};
    const int64_t elements = ElementCount(tensor.shape) / (i == 2 ? 1 : degree);
    items.push_back({.name = tensor.name,
                     .elements = elements,
                     .atom_elements = i == 2 ? 256 : (i == 0 ? 12 / degree : 5)});
    plan.inventory.tensors.push_back(tensor);
  }
  plan::GroupLayout group;
  // Small shards, so that boundaries lie inside tensors.
  group.layout = plan::PlanFlatLayout(items, {.width = shards, .alignment_elements = 1});
  std::vector<std::pair<int64_t, plan::TensorId>> placed;
  for (size_t i = 0; i < items.size(); ++i) {
    placed.emplace_back(group.layout.offsets[i], static_cast<int>(i));
  }
  std::sort(placed.begin(), placed.end());
  for (const auto& [offset, tensor] : placed) {
    group.tensor_offsets.push_back(offset);
    group.tensors.push_back(tensor);
  }
  plan.groups.push_back(group);
  plan.roles.push_back({});
  plan.roles.back().stored =
      plan.roles.back().measured = {{plan::kShardAxis, plan::Placement::Flat()}};
  return plan;
}

// Elements of the tensors of CutPlan.
std::vector<std::vector<float>> CutValues() {
  std::mt19937 random(7);
  std::uniform_real_distribution<float> uniform(-1.0f, 1.0f);
  std::vector<std::vector<float>> values;
  for (const plan::TensorSpec& tensor : CutPlan(1, 1, 1).inventory.tensors) {
    for (values.emplace_back(); std::ssize(values.back()) < ElementCount(tensor.shape);) {
      values.back().push_back(uniform(random));
    }
  }
  return values;
}

// Sums of squares per tensor, from what each rank of the plan measures of its pieces.
std::vector<double> CutSums(const plan::ShardingPlan& plan,
                            const std::vector<std::vector<float>>& values) {
  const NormTree tree(plan);
  kernels::CpuStream stream;
  std::vector<std::vector<double>> sums;
  for (int rank = 0; rank < plan.ranks; ++rank) {
    const std::vector<plan::OwnedPiece> pieces = plan::CountedPieces(plan, 0, rank);
    std::vector<float> buffer(static_cast<size_t>(plan::MeasuredRange(plan, 0, rank).size()));
    for (const plan::OwnedPiece& piece : pieces) {
      const std::vector<float>& from = values[static_cast<size_t>(piece.tensor)];
      piece.VisitRuns(plan.inventory.tensors[piece.tensor].shape, [&](const plan::OwnedRun& run) {
        std::copy_n(from.begin() + run.first, run.elements, buffer.begin() + run.offset);
      });
    }
    sums.emplace_back(tree.nodes(rank).size());
    EXPECT_EQ(MeasureNodes(stream,
                           {.inventory = plan.inventory,
                            .pieces = pieces,
                            .base = buffer.data(),
                            .nodes = tree.nodes(rank),
                            .out = sums.back()},
                           0),
              sums.back().size());
  }
  return tree.Combine(std::vector<std::span<const double>>(sums.begin(), sums.end()));
}

// Rows are counted in the tensor, each block of columns has a tree of its own, and what all ranks
// of the tensor axis have counts once. Fails when a part of an item is measured as rows of the
// tensor, or when the blocks of one row are taken for the same node.
TEST(NormTree, ColumnsThatAnAxisCutsAreBlocks) {
  const std::vector<std::vector<float>> values = CutValues();
  const std::vector<double> one = CutSums(CutPlan(1, 1, 4), values);
  for (size_t t = 0; t < one.size(); ++t) {
    double exact = 0;
    for (const float value : values[t]) {
      exact += static_cast<double>(value) * static_cast<double>(value);
    }
    EXPECT_NEAR(one[t], exact, 1e-5 * exact) << t;
  }
  for (const int64_t degree : {1, 2, 4}) {
    for (const int64_t shards : {1, 2, 3, 5}) {
      EXPECT_EQ(CutSums(CutPlan(shards, degree, 4), values), one) << shards << " x " << degree;
    }
  }
}

// Without blocks a row sum covers all columns of its rank, and depends on how many those are.
TEST(NormTree, WithoutBlocksOfColumnsTheBitsDependOnTheRanks) {
  const std::vector<std::vector<float>> values = CutValues();
  const std::vector<double> one = CutSums(CutPlan(1, 1, 1), values);
  for (const int64_t degree : {2, 4}) {
    const std::vector<double> sums = CutSums(CutPlan(1, degree, degree), values);
    EXPECT_NE(sums[0], one[0]) << degree;
    EXPECT_EQ(sums[1], one[1]) << degree << ": whole rows are what they were";
    EXPECT_EQ(sums[2], one[2]) << degree;
  }
}

TEST(NormTree, ItsAdditionsInLevelsHaveTheBitsOfItsSum) {
  for (const int64_t ranks : {1, 3, 8, 16}) {
    const plan::ShardingPlan plan = PlanFor(ranks);
    const NormTree tree(plan);
    std::mt19937 random(static_cast<uint32_t>(ranks));
    std::uniform_real_distribution<double> uniform(0.0, 3.0);
    std::vector<double> words(static_cast<size_t>(ranks * tree.longest()));
    for (double& word : words) {
      word = uniform(random);
    }
    std::vector<std::span<const double>> values;
    for (int64_t rank = 0; rank < ranks; ++rank) {
      values.push_back(std::span<const double>(words).subspan(
          static_cast<size_t>(rank * tree.longest()), static_cast<size_t>(tree.longest())));
    }
    const SumProgram program = tree.Program([&](int rank, size_t position) {
      return static_cast<int32_t>(rank * tree.longest() + static_cast<int64_t>(position));
    });
    std::vector<double> sums;
    int64_t level_begin = 0;
    for (const int64_t end : program.level_ends) {
      // Nothing of a level reads another sum of that level.
      for (int64_t i = level_begin; i < end; ++i) {
        const auto value = [&](int32_t operand) {
          EXPECT_TRUE(operand >= 0 || -1 - operand < level_begin);
          return operand >= 0 ? words.at(static_cast<size_t>(operand))
                              : sums.at(static_cast<size_t>(-1 - operand));
        };
        const kernels::SumStep& step = program.steps[static_cast<size_t>(i)];
        sums.push_back(value(step.a) + value(step.b));
      }
      level_begin = end;
    }
    ASSERT_EQ(sums.size(), program.steps.size());
    ASSERT_LT(program.total, 0);
    EXPECT_EQ(std::bit_cast<uint64_t>(sums.at(static_cast<size_t>(-1 - program.total))),
              std::bit_cast<uint64_t>(tree.Total(tree.Combine(values))));
  }
}

TEST(LaneLosses, IgnoreTargetsOfMinusOneAndAddInTokenOrder) {
  std::vector<float> losses = {1.5f, 100.0f, 2.0f};
  std::vector<int32_t> targets = {0, -1, 3};
  TensorView target_view = VectorView(reinterpret_cast<float*>(targets.data()), 3);
  target_view.dtype = DType::kI32;
  LaneLoss lane;
  kernels::CpuStream stream;
  const auto add = [&] {
    kernels::SumLoss(stream,
                     {.losses = VectorView(losses.data(), 3),
                      .targets = target_view,
                      .sum = &lane.sum,
                      .tokens = &lane.tokens});
  };
  add();
  EXPECT_EQ(lane.sum, 3.5);
  EXPECT_EQ(lane.tokens, 2);
  add();  // the lane's next micro-batch
  EXPECT_EQ(lane.sum, 7.0);
  EXPECT_EQ(lane.tokens, 4);
}

TEST(StoredCodes, TheFirstThatIsNanIsFound) {
  std::vector<std::byte> codes(256);
  for (size_t i = 0; i < codes.size(); ++i) {
    codes[i] = static_cast<std::byte>(i);
  }
  EXPECT_EQ(FirstNanCode(codes, false), 0x7Fu);
  EXPECT_EQ(FirstNanCode(codes, true), 0xFFu);
  codes[0x7F] = std::byte{0};
  EXPECT_EQ(FirstNanCode(codes, false), 0xFFu);
  codes[0xFF] = std::byte{0};
  EXPECT_EQ(FirstNanCode(codes, false), codes.size());
  EXPECT_EQ(FirstNanCode(codes, true), codes.size());
}

TEST(StoredCodes, TheFirstThatIsNoScaleIsFound) {
  EXPECT_EQ(FirstNotScale({}), 0u);
  for (const float bad : {0.0f, 3.0f, -1.0f, 0x1p-128f, std::numeric_limits<float>::quiet_NaN()}) {
    EXPECT_EQ(FirstNotScale(std::vector<float>{0x1p-127f, 1.0f, 0x1p127f, bad, 1.0f}), 3u) << bad;
  }
}

TEST(LaneLosses, TreeOverLanesDoesNotDependOnTheRanksThatSentThem) {
  std::vector<double> by_lane = {1e16, 1.0, -1e16, 3.0, 0.1, 0.2, 0.3, 7.0};
  const double expected = kernels::TreeSumDouble(by_lane.data(), 8);
  for (int64_t ranks = 1; ranks <= 8; ++ranks) {
    const plan::LaneMap map = {.lanes = 8, .ranks = ranks};
    std::vector<std::vector<double>> sums(
        static_cast<size_t>(ranks), std::vector<double>(static_cast<size_t>(map.turns()), 99.0));
    for (int64_t lane = 0; lane < 8; ++lane) {
      sums[static_cast<size_t>(lane % ranks)][static_cast<size_t>(lane / ranks)] =
          by_lane[static_cast<size_t>(lane)];
    }
    EXPECT_EQ(TreeOverLanes(map, sums), expected) << ranks;
  }
}

}  // namespace
}  // namespace ravel::optim
