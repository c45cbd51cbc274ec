// Amaxes of quantized matrices, and plans of jobs with a recipe.

#include "common/plan/layout/quant_layout.h"

#include <algorithm>
#include <functional>
#include <set>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/model/gemm_paths.h"
#include "common/model/recipes.h"
#include "common/plan/check/program_checker.h"
#include "common/plan/numerics.h"
#include "common/plan/plan_proto.h"
#include "common/plan/program/buffer_index.h"
#include "common/plan/report/plan_printer.h"
#include "common/plan/report/plan_report.h"
#include "common/plan/report/wire_table.h"
#include "tests/common/plan/plan_testing.h"

namespace ravel::plan {
namespace {

using ::testing::HasSubstr;

ShardingPlan RecipePlan(const JobSpec& spec, int64_t ranks, bool shared_memory = true) {
  absl::StatusOr<ShardingPlan> plan =
      BuildShardingPlan({.spec = spec, .ranks = ranks, .shared_memory = shared_memory});
  EXPECT_TRUE(plan.ok()) << plan.status();
  return plan.ok() ? *std::move(plan) : ShardingPlan{};
}

int64_t BytesOfKind(const ShardingPlan& plan, BufferKind kind) {
  int64_t bytes = 0;
  for (const ProgramBuffer& buffer : plan.buffers) {
    bytes += buffer.kind == kind ? buffer.bytes : 0;
  }
  return bytes;
}

class QuantLayoutOfRecipe : public ::testing::TestWithParam<testing::RecipeCase> {};
INSTANTIATE_TEST_SUITE_P(Recipes,
                         QuantLayoutOfRecipe,
                         ::testing::ValuesIn(testing::RecipeCases()),
                         [](const auto& tested) { return std::string(tested.param.name); });

TEST_P(QuantLayoutOfRecipe, WordsAreApartAndDoNotDependOnTheMesh) {
  const Recipe recipe = GetParam().recipe;
  const JobSpec spec = testing::RecipeSpecOf(recipe);
  const QuantLayout one = QuantLayoutOf(RecipePlan(spec, 1).inventory);
  // Seven matrices a layer: q, k, v and gate, up are one domain each.
  EXPECT_EQ(one.tensors.size(), 14u);
  EXPECT_EQ(one.domains.size(), 8u);
  std::set<int64_t> words;
  for (const QuantTensor& tensor : one.tensors) {
    const int64_t edge = BlockEdge(recipe);
    for (int64_t word = 0; edge > 0 && word < tensor.grid_rows * tensor.grid_columns; ++word) {
      EXPECT_TRUE(words.insert(tensor.grid + word).second);
    }
  }
  for (const QuantDomain& domain : one.domains) {
    for (const int64_t word : {domain.amax, domain.input, domain.gradient}) {
      EXPECT_TRUE(word < 0 || words.insert(word).second);
    }
  }
  EXPECT_EQ(static_cast<int64_t>(words.size()), one.words);
  EXPECT_TRUE(words.empty() || *words.rbegin() == one.words - 1);
  EXPECT_EQ(one.slots, recipe == Recipe::kDelayed ? 24 : 0);
  for (const int64_t ranks : {2, 3, 8}) {
    const QuantLayout other = QuantLayoutOf(RecipePlan(spec, ranks).inventory);
    ASSERT_EQ(other.tensors.size(), one.tensors.size());
    for (size_t i = 0; i < one.tensors.size(); ++i) {
      EXPECT_EQ(other.tensors[i].grid, one.tensors[i].grid);
      EXPECT_EQ(other.tensors[i].domain, one.tensors[i].domain);
    }
    EXPECT_EQ(other.words, one.words);
    const QuantWords in_memory = QuantWordsOf(other, ranks, 16);
    EXPECT_EQ(in_memory.amax, in_memory.part * ranks);
    EXPECT_GE(in_memory.amax, other.words);
    EXPECT_EQ(in_memory.scales, other.slots * (kScalesPerSlot + 16));
  }
}

TEST_P(QuantLayoutOfRecipe, PlansPassTheCheckerAndTheCodec) {
  const JobSpec spec = testing::RecipeSpecOf(GetParam().recipe);
  for (const int64_t ranks : {1, 2, 3, 8}) {
    for (const bool shared : {false, true}) {
      const ShardingPlan plan = RecipePlan(spec, ranks, shared);
      const std::string bytes = SerializePlan(plan);
      const absl::StatusOr<ShardingPlan> read = ParsePlan(bytes);
      ASSERT_TRUE(read.ok()) << read.status();
      EXPECT_EQ(SerializePlan(*read), bytes);
    }
  }
}

TEST_P(QuantLayoutOfRecipe, CodesTakeAByteOrHalfOfOneAtRestAndOnTheWire) {
  const Recipe recipe = GetParam().recipe;
  JobSpec spec = testing::RecipeSpecOf(recipe);
  const ShardingPlan quantized = RecipePlan(spec, 4, false);
  spec.recipe = {};
  const ShardingPlan wide = RecipePlan(spec, 4, false);
  int64_t codes = 0;
  for (const TensorSpec& tensor : quantized.inventory.tensors) {
    codes += tensor.recipe != Recipe::kNone ? ElementCount(tensor.shape) : 0;
  }
  const int64_t saved = codes * 2 - CodeBytes(recipe, codes);
  EXPECT_EQ(BytesOfKind(wide, BufferKind::kModelWeight) -
                BytesOfKind(quantized, BufferKind::kModelWeight),
            saved / 4);
  EXPECT_EQ(BytesOfKind(wide, BufferKind::kMainWeight),
            BytesOfKind(quantized, BufferKind::kMainWeight));
  EXPECT_LT(StepWire(quantized).gathers, StepWire(wide).gathers);
}

// Each: one thing that a program must not do.
TEST_P(QuantLayoutOfRecipe, TheCheckerRefusesCodesOfOldScalesAndWeights) {
  const ShardingPlan good = RecipePlan(testing::RecipeSpecOf(GetParam().recipe), 2);
  const auto fails = [&](const std::function<void(StepProgram&)>& change) {
    ShardingPlan plan = good;
    for (StepProgram& program : plan.programs) {
      if (program.phase == Phase::kOnly || program.phase == Phase::kLast) {
        change(program);
      }
    }
    return CheckPlan(plan);
  };
  const auto each =
      [](StepProgram& program, OpCode op, const std::function<void(Instruction&)>& to) {
        for (Instruction& at : program.instructions) {
          if (at.op == op) {
            to(at);
          }
        }
      };
  EXPECT_TRUE(CheckPlan(good).ok());
  EXPECT_THAT(std::string(fails([&](StepProgram& program) {
                            each(program, OpCode::kRefreshWeights, [](Instruction& at) {
                              at.waits.clear();
                            });
                          }).message()),
              HasSubstr("K7"));
  EXPECT_THAT(
      std::string(fails([&](StepProgram& program) {
                    each(program, OpCode::kAmaxReduce, [](Instruction& at) { at.waits.clear(); });
                  }).message()),
      HasSubstr("K7"));
  EXPECT_FALSE(
      fails([&](StepProgram& program) {
        each(program, OpCode::kRefreshWeights, [](Instruction& at) { at.operands.pop_back(); });
      }).ok());
}

// The cuts of all strategies: their axes have other names and other sizes.
std::vector<JobSpec> OfEachStrategy(const JobSpec& base) {
  std::vector<JobSpec> specs;
  for (const Strategy strategy :
       {Strategy::kNoShard, Strategy::kOptim, Strategy::kOptimGrads, Strategy::kOptimGradsParams}) {
    specs.push_back(base);
    specs.back().strategy = strategy;
  }
  for (const Strategy between : {Strategy::kNoShard, Strategy::kOptim}) {
    specs.push_back(base);
    specs.back().replicas = 2;
    specs.back().replicate_strategy = between;
  }
  return specs;
}

// Whoever stores a row is in the group that reduces amaxes, whatever the axes are that cut it.
TEST_P(QuantLayoutOfRecipe, AmaxGroupFromOwnersAnyAxisNames) {
  for (const JobSpec& spec : OfEachStrategy(testing::RecipeSpecOf(GetParam().recipe))) {
    const ShardingPlan plan = RecipePlan(spec, 4, false);
    ASSERT_GE(plan.moves.amax, 0);
    const std::vector<std::string>& axes = plan.moves.moves[plan.moves.amax].axes;
    const std::vector<int64_t> members = plan.mesh.GroupOf(0, axes);
    std::set<std::string> known;
    for (const MeshAxis& axis : plan.mesh.axes()) {
      known.insert(axis.name);
    }
    for (const std::string& axis : axes) {
      EXPECT_TRUE(known.contains(axis)) << axis;
    }
    for (const GroupId group : plan.groups.ids()) {
      for (int64_t rank = 0; rank < plan.ranks; ++rank) {
        const bool owner =
            plan.groups[group].recipe != Recipe::kNone && !StoredPieces(plan, group, rank).empty();
        EXPECT_TRUE(!owner || std::count(members.begin(), members.end(), rank) == 1)
            << plan.mesh.Text() << " rank " << rank;
      }
    }
  }
}

// Buffers of state have the elements that a rank stores, in their type: neither all of a tensor nor
// those of another rank.
TEST_P(QuantLayoutOfRecipe, StateBytesEqualShardBytes) {
  for (const StateTypes& types : {kF32States, kBf16States, kFp8States}) {
    for (JobSpec spec : OfEachStrategy(testing::RecipeSpecOf(GetParam().recipe))) {
      spec.optimizer.state_types = types;
      const ShardingPlan plan = RecipePlan(spec, 4, false);
      for (const GroupId group : plan.groups.ids()) {
        const ElementRange stored = StoredRange(plan, group, 0);
        for (int slot = 0; slot < 2; ++slot) {
          const BufferId state =
              FindBuffer(plan.buffers, {.kind = BufferKind::kState, .owner = group, .slot = slot});
          ASSERT_GE(state, 0);
          const DType type = slot == 0 ? types.mean : types.square;
          EXPECT_EQ(plan.buffers[state].bytes, (stored.end - stored.begin) * DTypeBytes(type));
        }
      }
    }
  }
}

// What is not trained has no main weight, and so no recipe.
TEST(RecipePlans, RefuseQuantizedWithoutMain) {
  JobSpec spec = testing::RecipeSpecOf(Recipe::kCurrent);
  spec.freeze = {"model.layers.0.*"};
  ShardingPlan plan = RecipePlan(spec, 2);
  IdVector<TensorId, Recipe> recipes(plan.inventory.tensors.size(), Recipe::kNone);
  const TensorId frozen = plan.inventory.FindTensor("model.layers.0.mlp.up_proj.weight");
  ASSERT_GE(frozen, 0);
  EXPECT_EQ(plan.inventory.tensors[frozen].recipe, Recipe::kNone);
  recipes[frozen] = Recipe::kCurrent;
  EXPECT_THAT(
      std::string(
          SetRecipes(recipes, plan.options.gemm_path, plan.micro_batch, plan.inventory).message()),
      HasSubstr("model.layers.0.mlp.up_proj.weight: no recipe quantizes such a tensor"));
}

// A plan that decodes before it multiplies says so where people read it.
TEST_P(QuantLayoutOfRecipe, EmulationMustBeNamed) {
  const ShardingPlan plan = RecipePlan(testing::RecipeSpecOf(GetParam().recipe), 2);
  EXPECT_EQ(ReportRecipe(plan).path, "cpu_reference");
  EXPECT_THAT(PlanSummary(plan), HasSubstr("cpu_reference"));
}

TEST(RecipePlans, AreRefusedWithFieldAndTensor) {
  const auto refusal = [](const std::function<void(JobSpec&)>& change) {
    JobSpec spec = testing::RecipeSpecOf(Recipe::kFloat8Block);
    change(spec);
    return std::string(
        BuildShardingPlan({.spec = spec, .ranks = 2, .shared_memory = true}).status().message());
  };
  EXPECT_THAT(refusal([](JobSpec& spec) { spec.model->intermediate_size = 320; }),
              ::testing::AllOf(HasSubstr("precision.recipe"),
                               HasSubstr("model.layers.0.mlp."),
                               HasSubstr("multiples of 128")));
  EXPECT_THAT(refusal([](JobSpec& spec) { spec.compute = ComputeType::kF32; }),
              HasSubstr("precision.compute: expected bf16, for fp8_block, got fp32"));
  EXPECT_THAT(refusal([](JobSpec& spec) { spec.recipe.emulation = {GemmPath::kDequantBf16}; }),
              HasSubstr("precision.emulation[0]: expected cpu_reference, the emulation of cpu "
                        "devices, got dequant_bf16"));
  EXPECT_THAT(refusal([](JobSpec& spec) {
                spec.cpu_devices = false;
                spec.recipe.emulation = {GemmPath::kDequantBf16, GemmPath::kCpuReference};
              }),
              HasSubstr("precision.emulation[1]: expected dequant_bf16 or block_as_mxfp8, the "
                        "emulations of gpu devices for fp8_block, got cpu_reference"));
  EXPECT_THAT(refusal([](JobSpec& spec) {
                spec.recipe = {.recipe = Recipe::kNone,
                               .keep_bf16 = {},
                               .emulation = {GemmPath::kCpuReference}};
              }),
              HasSubstr("precision.emulation: expected a precision.recipe beside it"));
  EXPECT_THAT(refusal([](JobSpec& spec) { spec.recipe.keep_bf16 = {"lm_head*"}; }),
              HasSubstr("precision.keepBf16[0]: expected a pattern that matches a trained matrix"));
  EXPECT_THAT(refusal([](JobSpec& spec) {
                spec.cpu_devices = false;  // words of gradients that gemms of codes read
                spec.recipe.recipe = Recipe::kCurrent;
                spec.model->head_dim = 4;
                spec.model->num_attention_heads = 32;
                spec.model->num_key_value_heads = 2;
                spec.recipe.keep_bf16 = {"*.k_proj.*", "*.v_proj.*"};
              }),
              HasSubstr("precision.keepBf16: expected outputs that are multiples of 16 beside "
                        "quantized matrices"));
  EXPECT_THAT(refusal([](JobSpec& spec) { spec.recipe.keep_bf16 = {"*"}; }),
              HasSubstr("precision.keepBf16: expected to leave a matrix that is quantized"));
  EXPECT_THAT(
      refusal([](JobSpec& spec) {
        spec.recipe.recipe = Recipe::kMxFp8;
        spec.data.sequence_length = 40;
      }),
      HasSubstr("training.microBatch: expected times data.sequenceLength a multiple of 32"));
  EXPECT_EQ(refusal([](JobSpec& spec) {
              spec.model->intermediate_size = 320;
              spec.recipe.keep_bf16 = {"*.mlp.*"};
            }),
            "");
}

TEST(RecipePlans, FrozenAndKeptMatricesStayBf16) {
  JobSpec spec = testing::RecipeSpecOf(Recipe::kCurrent);
  spec.freeze = {"model.layers.0.*"};
  spec.recipe.keep_bf16 = {"model.layers.1.self_attn.k_proj.weight"};
  const ShardingPlan plan = RecipePlan(spec, 2);
  int64_t quantized = 0;
  for (const TensorSpec& tensor : plan.inventory.tensors) {
    quantized += tensor.recipe != Recipe::kNone ? 1 : 0;
    if (tensor.name.find("layers.0.") != std::string::npos ||
        tensor.name.find("k_proj") != std::string::npos) {
      EXPECT_EQ(tensor.recipe, Recipe::kNone) << tensor.name;
    }
  }
  EXPECT_EQ(quantized, 6);
  for (const GroupLayout& group : plan.groups) {
    for (const TensorId tensor : group.tensors) {
      EXPECT_EQ(plan.inventory.tensors[tensor].recipe, group.recipe);
    }
  }
}

// The same matrices on either kind of devices, by the path of each.
TEST(RecipePlans, ThePathOfGemmsIsPlannedTravelsAndIsPartOfTheNumerics) {
  JobSpec spec = testing::RecipeSpecOf(Recipe::kMxFp8);
  EXPECT_EQ(RecipePlan(spec, 2).options.gemm_path, GemmPath::kCpuReference);
  EXPECT_THAT(NumericsOf(spec), HasSubstr("gemmPath=cpu_reference "));
  EXPECT_EQ(PlanHash(RecipePlan(spec, 2)),
            PlanHash(*ParsePlan(SerializePlan(RecipePlan(spec, 2)))));
  const std::string before = NumericsOf(spec);
  spec.recipe.emulation = {GemmPath::kCpuReference};
  EXPECT_EQ(NumericsOf(spec), before);
  spec.recipe.emulation = {GemmPath::kDequantBf16};
  spec.cpu_devices = false;
  EXPECT_THAT(NumericsChange(before, NumericsOf(spec)),
              HasSubstr("gemmPath was cpu_reference and is dequant_bf16"));
  const ShardingPlan plan = RecipePlan(spec, 2);
  EXPECT_EQ(plan.options.gemm_path, GemmPath::kDequantBf16);
  const absl::StatusOr<ShardingPlan> back = ParsePlan(SerializePlan(plan));
  ASSERT_TRUE(back.ok()) << back.status();
  EXPECT_EQ(back->options.gemm_path, GemmPath::kDequantBf16);
  EXPECT_EQ(SerializePlan(*back), SerializePlan(plan));
  spec.recipe = {};
  EXPECT_EQ(RecipePlan(spec, 2).options.gemm_path, GemmPath::kNone);
  EXPECT_EQ(NumericsOf(spec).find("gemmPath"), std::string::npos);
}

// Codes take the place of decoded values in the scratch, and have a path of their own.
TEST(RecipePlans, GpusMultiplyCodesOfOneScaleWithoutEmulation) {
  JobSpec spec = testing::RecipeSpecOf(Recipe::kCurrent);
  spec.cpu_devices = false;
  const ShardingPlan codes = RecipePlan(spec, 2);
  EXPECT_EQ(codes.options.gemm_path, GemmPath::kFp8Tensor);
  EXPECT_THAT(NumericsOf(spec), HasSubstr("gemmPath=fp8_tensor "));
  const absl::StatusOr<ShardingPlan> back = ParsePlan(SerializePlan(codes));
  ASSERT_TRUE(back.ok()) << back.status();
  EXPECT_EQ(SerializePlan(*back), SerializePlan(codes));
  spec.recipe.emulation = {GemmPath::kDequantBf16};
  const ShardingPlan decoded = RecipePlan(spec, 2);
  EXPECT_EQ(decoded.options.gemm_path, GemmPath::kDequantBf16);
  EXPECT_LT(codes.memory.private_bytes, decoded.memory.private_bytes);
  spec.recipe.emulation = {};
  spec.data.sequence_length = 20;
  EXPECT_THAT(
      std::string(
          BuildShardingPlan({.spec = spec, .ranks = 1, .shared_memory = true}).status().message()),
      HasSubstr("training.microBatch: expected times data.sequenceLength a multiple of 16"));
}

// Scales of blocks lie in scratch of their own; fast sums are not for them.
TEST(RecipePlans, GpusMultiplyCodesOfBlocksWithoutEmulation) {
  for (const auto& [recipe, path] : {std::pair(Recipe::kFloat8Block, GemmPath::kFp8Block),
                                     {Recipe::kMxFp8, GemmPath::kMxFp8},
                                     {Recipe::kNvFp4, GemmPath::kNvFp4}}) {
    JobSpec spec = testing::RecipeSpecOf(recipe);
    spec.cpu_devices = false;
    const ShardingPlan codes = RecipePlan(spec, 2);
    EXPECT_EQ(codes.options.gemm_path, path);
    EXPECT_EQ(ReportRecipe(codes).path, GemmPathName(path));
    EXPECT_FALSE(ReportRecipe(codes).emulated);
    EXPECT_THAT(PlanSummary(codes), HasSubstr("sums are full"));
    EXPECT_THAT(NumericsOf(spec), HasSubstr(absl::StrCat("gemmPath=", GemmPathName(path), " ")));
    EXPECT_EQ(NumericsOf(spec).find("fastAccum"), std::string::npos);
    const absl::StatusOr<ShardingPlan> back = ParsePlan(SerializePlan(codes));
    ASSERT_TRUE(back.ok()) << back.status();
    EXPECT_EQ(SerializePlan(*back), SerializePlan(codes));
    EXPECT_EQ(back->memory.private_bytes, codes.memory.private_bytes);
    const UnitSpec& layer = codes.inventory.units[UnitId(1)];
    int scales = 0;
    for (const ActivationSpec& scratch : layer.workspace) {
      scales += scratch.name.ends_with("_scales") ? 1 : 0;
    }
    EXPECT_EQ(scales, 4);
    // The plan of another path's codes is refused where it is read.
    ShardingPlan other = codes;
    other.options.gemm_path = path == GemmPath::kMxFp8 ? GemmPath::kFp8Block : GemmPath::kMxFp8;
    EXPECT_FALSE(ParsePlan(SerializePlan(other)).ok());
    spec.recipe.fast_accumulation = FastAccumulation::kNone;
    EXPECT_FALSE(
        BuildShardingPlan({.spec = spec, .ranks = 1, .shared_memory = true}).status().ok());
    spec.recipe.fast_accumulation = FastAccumulation::kForward;
    spec.data.sequence_length = 20;
    EXPECT_THAT(std::string(BuildShardingPlan({.spec = spec, .ranks = 1, .shared_memory = true})
                                .status()
                                .message()),
                HasSubstr("training.microBatch: expected times data.sequenceLength a multiple of"));
  }
}

// Codes of one recipe by the gemms of another: scales are laid out as those of the latter.
TEST(RecipePlans, Float8BlockMayBePlannedByGemmsOfMxFp8) {
  JobSpec spec = testing::RecipeSpecOf(Recipe::kFloat8Block);
  spec.cpu_devices = false;
  const std::string own = NumericsOf(spec);
  spec.recipe.emulation = {GemmPath::kBlockAsMxFp8};
  const ShardingPlan plan = RecipePlan(spec, 2);
  EXPECT_EQ(plan.options.gemm_path, GemmPath::kBlockAsMxFp8);
  EXPECT_TRUE(ReportRecipe(plan).emulated);
  EXPECT_THAT(PlanSummary(plan), HasSubstr("gemm path block_as_mxfp8, an emulation, of "));
  EXPECT_THAT(PlanSummary(plan), HasSubstr("sums are full; not yet run on a GPU"));
  EXPECT_THAT(NumericsChange(own, NumericsOf(spec)),
              HasSubstr("gemmPath was fp8_block and is block_as_mxfp8"));
  const absl::StatusOr<ShardingPlan> back = ParsePlan(SerializePlan(plan));
  ASSERT_TRUE(back.ok()) << back.status();
  EXPECT_EQ(SerializePlan(*back), SerializePlan(plan));
  const auto bytes_of = [](const ShardingPlan& of, std::string_view name) {
    int64_t bytes = 0;
    for (const ActivationSpec& scratch : of.inventory.units[UnitId(1)].workspace) {
      bytes += scratch.name == name ? ElementCount(scratch.shape) : 0;
    }
    return bytes;
  };
  JobSpec mxfp8 = testing::RecipeSpecOf(Recipe::kMxFp8);
  mxfp8.cpu_devices = false;
  const ShardingPlan of_mxfp8 = RecipePlan(mxfp8, 2);
  for (const char* name : {"q_input_scales", "q_gradient_scales", "q_input", "q_gradient"}) {
    EXPECT_GT(bytes_of(plan, name), 0) << name;
    EXPECT_EQ(bytes_of(plan, name), bytes_of(of_mxfp8, name)) << name;
  }
  spec.data.sequence_length = 20;
  EXPECT_THAT(
      std::string(
          BuildShardingPlan({.spec = spec, .ranks = 1, .shared_memory = true}).status().message()),
      HasSubstr("training.microBatch: expected times data.sequenceLength a multiple of 32"));
}

// A gemm of packed codes sums over one part of a cut matrix, whose rows are whole 16 bytes there.
// Decoded operands need whole blocks alone.
TEST(RecipePlans, PartsOfPackedCodesAreWholeSixteenBytes) {
  JobSpec spec = testing::RecipeSpecOf(Recipe::kNvFp4);
  spec.cpu_devices = false;
  spec.tensor_parts = 2;
  const auto build = [&] {
    return BuildShardingPlan({.spec = spec, .ranks = 1, .shared_memory = true}).status();
  };
  EXPECT_EQ(build(), absl::OkStatus());
  spec.model->intermediate_size = 96;
  const std::string refusal(build().message());
  EXPECT_THAT(refusal, HasSubstr("precision.recipe: expected parts of model.layers.0.mlp."));
  EXPECT_THAT(refusal, HasSubstr("that are multiples of 32, got 48 of dimension"));
  spec.recipe.emulation = {GemmPath::kDequantBf16};
  EXPECT_EQ(build(), absl::OkStatus());
}

TEST(RecipePlans, FastSumsArePlannedTravelAndArePartOfTheNumerics) {
  JobSpec spec = testing::RecipeSpecOf(Recipe::kCurrent);
  spec.cpu_devices = false;
  const std::string before = NumericsOf(spec);
  EXPECT_THAT(before, HasSubstr("fastAccum=forward gemmPath=fp8_tensor "));
  EXPECT_THAT(PlanSummary(RecipePlan(spec, 2)), HasSubstr("sums of forward are fast ones, others"));
  spec.recipe.fast_accumulation = FastAccumulation::kForwardAndInputGradient;
  EXPECT_THAT(NumericsChange(before, NumericsOf(spec)),
              HasSubstr("fastAccum was forward and is forward+dgrad"));
  const ShardingPlan plan = RecipePlan(spec, 2);
  EXPECT_EQ(plan.options.fast_accumulation, FastAccumulation::kForwardAndInputGradient);
  EXPECT_THAT(PlanSummary(plan), HasSubstr("sums of forward and of input gradients are fast ones"));
  const absl::StatusOr<ShardingPlan> back = ParsePlan(SerializePlan(plan));
  ASSERT_TRUE(back.ok()) << back.status();
  EXPECT_EQ(SerializePlan(*back), SerializePlan(plan));
  spec.recipe.fast_accumulation = FastAccumulation::kNone;
  EXPECT_THAT(PlanSummary(RecipePlan(spec, 2)), HasSubstr("sums are full"));
  const auto refusal = [&] {
    return std::string(
        BuildShardingPlan({.spec = spec, .ranks = 1, .shared_memory = true}).status().message());
  };
  const std::string refused =
      "precision.fastAccum: expected nothing, or gpu devices and recipe fp8_tensor without "
      "emulation, got none";
  spec.recipe.emulation = {GemmPath::kDequantBf16};
  EXPECT_EQ(refusal(), refused);
  EXPECT_EQ(NumericsOf(spec).find("fastAccum"), std::string::npos);
  spec.recipe.emulation = {};
  spec.cpu_devices = true;
  EXPECT_EQ(refusal(), refused);
  spec.recipe = {};
  spec.recipe.fast_accumulation = FastAccumulation::kNone;
  EXPECT_EQ(refusal(), refused);
}

TEST(RecipePlans, WhatScalesFollowFromIsPlannedTravelsAndIsPartOfTheNumerics) {
  JobSpec spec = testing::RecipeSpecOf(Recipe::kDelayed);
  spec.recipe.amax_algorithm = AmaxAlgorithm::kMostRecent;
  spec.recipe.first_scale = FirstScale::kOnes;
  EXPECT_THAT(NumericsOf(spec), HasSubstr("/margin0/most_recent/ones "));
  const auto travels = [](const ShardingPlan& plan) {
    const absl::StatusOr<ShardingPlan> back = ParsePlan(SerializePlan(plan));
    ASSERT_TRUE(back.ok()) << back.status();
    EXPECT_EQ(SerializePlan(*back), SerializePlan(plan));
    EXPECT_EQ(back->options.amax_algorithm, plan.options.amax_algorithm);
    EXPECT_EQ(back->options.first_scale, plan.options.first_scale);
    EXPECT_EQ(back->options.amax_epsilon, plan.options.amax_epsilon);
  };
  EXPECT_EQ(RecipePlan(spec, 2).options.first_scale, FirstScale::kOnes);
  travels(RecipePlan(spec, 2));
  const auto refusal = [](const JobSpec& of) {
    return std::string(
        BuildShardingPlan({.spec = of, .ranks = 1, .shared_memory = true}).status().message());
  };
  spec.recipe.recipe = Recipe::kCurrent;
  EXPECT_THAT(refusal(spec), HasSubstr("precision.amaxAlgorithm: expected nothing, or recipe"));
  spec.recipe.amax_algorithm = AmaxAlgorithm::kMax;
  EXPECT_THAT(refusal(spec), HasSubstr("precision.firstScale: expected nothing, or recipe"));
  spec.recipe.first_scale = FirstScale::kCurrent;
  spec.recipe.amax_epsilon = 0.25;
  EXPECT_THAT(NumericsOf(spec), HasSubstr("recipe=fp8_tensor/current/epsilon0.25 "));
  EXPECT_EQ(RecipePlan(spec, 2).options.amax_epsilon, 0.25);
  travels(RecipePlan(spec, 2));
  spec.recipe.amax_epsilon = 2;
  EXPECT_THAT(refusal(spec), HasSubstr("precision.amaxEpsilon: expected 0 to 1, got 2"));
  spec.recipe.recipe = Recipe::kDelayed;
  EXPECT_THAT(refusal(spec), HasSubstr("precision.amaxEpsilon: expected nothing, or recipe"));
}

TEST(RecipePlans, APathAsksItsDeviceForWhatItNeeds) {
  const GemmDevice hopper = {
      .name = "H", .compute_major = 9, .compute_minor = 0, .cublas_lt_version = 130100};
  EXPECT_TRUE(CheckGemmPath(GemmPath::kFp8Tensor, hopper).ok());
  GemmDevice ada = hopper;
  ada.compute_major = 8;
  ada.compute_minor = 9;
  EXPECT_TRUE(CheckGemmPath(GemmPath::kFp8Tensor, ada).ok());
  GemmDevice ampere = ada;
  ampere.compute_minor = 0;
  EXPECT_THAT(std::string(CheckGemmPath(GemmPath::kFp8Tensor, ampere).message()),
              ::testing::AllOf(HasSubstr("gemm path fp8_tensor (forward, input gradient, weight"),
                               HasSubstr("expected compute capability 8.9"),
                               HasSubstr("got 8.0 of H"),
                               HasSubstr("precision.emulation: [dequant_bf16]")));
  EXPECT_TRUE(CheckGemmPath(GemmPath::kDequantBf16, ampere).ok());
  GemmDevice blackwell = hopper;
  blackwell.compute_major = 10;
  EXPECT_TRUE(CheckGemmPath(GemmPath::kFp8Tensor, blackwell).ok());
  EXPECT_TRUE(CheckGemmPath(GemmPath::kFp8Block, hopper).ok());
  EXPECT_TRUE(CheckGemmPath(GemmPath::kMxFp8, blackwell).ok());
  EXPECT_THAT(std::string(CheckGemmPath(GemmPath::kFp8Block, blackwell).message()),
              HasSubstr("expected compute capability 9.0 to 9.9 and cuBLASLt 120900 or later, got "
                        "10.0 of H with cuBLASLt 130100"));
  EXPECT_FALSE(CheckGemmPath(GemmPath::kFp8Block, ada).ok());
  EXPECT_FALSE(CheckGemmPath(GemmPath::kMxFp8, hopper).ok());
  GemmDevice consumer = blackwell;
  consumer.compute_major = 12;
  EXPECT_FALSE(CheckGemmPath(GemmPath::kMxFp8, consumer).ok());
  GemmDevice old = hopper;
  old.cublas_lt_version = 120800;
  EXPECT_FALSE(CheckGemmPath(GemmPath::kFp8Block, old).ok());
  GemmDevice bare = hopper;
  bare.cublas_lt_version = 0;
  EXPECT_THAT(std::string(CheckGemmPath(GemmPath::kFp8Tensor, bare).message()),
              HasSubstr("without cuBLASLt"));
}

TEST(RecipePlans, ARecipeIsPartOfTheNumerics) {
  JobSpec spec = testing::RecipeSpecOf(Recipe::kDelayed);
  const std::string before = NumericsOf(spec);
  EXPECT_THAT(before, HasSubstr("recipe=fp8_tensor/delayed/16/margin0 "));
  spec.recipe.recipe = Recipe::kMxFp8;
  EXPECT_EQ(NumericsChange(before, NumericsOf(spec)),
            "recipe was fp8_tensor/delayed/16/margin0 and is mxfp8");
}

}  // namespace
}  // namespace ravel::plan
