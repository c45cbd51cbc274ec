// Ranks of a tensor axis on a device, as threads of this process: each has its part of every layer,
// and, under sequence parallelism, its own tokens between products. All meshes have the bits of one
// rank; on a real device those agree closely that compute chunks of tokens, or whose gemms have
// scales of blocks, which no probe compares (worker/trainer/gemm_choices.h).

#include <algorithm>
#include <string>
#include <vector>

#include <absl/strings/str_cat.h>
#include <gtest/gtest.h>

#include "common/model/compute_type.h"
#include "common/model/gemm_paths.h"
#include "common/model/recipes.h"
#include "tests/gpu/engine_device.h"
#include "tests/testing/device_runs.h"

namespace ravel::trainer {
namespace {

using plan::ComputeType;
using plan::Recipe;
using plan::RecomputePolicy;

constexpr int64_t kParts = 4;

struct TensorMesh {
  StrategyCase strategy;
  const char* model = "bundled_rope_scaling";
  ComputeType compute = ComputeType::kF32;
  bool offload = false;  // the optimizer's state is in memory of the host
  Recipe recipe = Recipe::kNone;
  bool of_codes = false;  // gemms read codes; else they are emulated
  bool as_mxfp8 = false;  // of_codes: those of fp8_block by gemms of mxfp8

  std::string name() const {
    return absl::StrCat(
        strategy.name(),
        "_",
        model,
        compute == ComputeType::kF32 ? "" : absl::StrCat("_", plan::ComputeName(compute)),
        offload ? "_offload" : "",
        recipe == Recipe::kNone ? "" : absl::StrCat("_", recipe_name()),
        as_mxfp8 ? "_as_mxfp8" : "",
        of_codes ? "_codes" : "");
  }
  // On devices whose gemms' bits may depend on sizes.
  bool keeps_bits() const {
    return strategy.chunks <= 1 && !(of_codes && plan::BlockEdge(recipe) > 0);
  }
  std::string recipe_name() const {
    std::string name = plan::RecipeName(recipe);
    std::replace(name.begin(), name.end(), '/', '_');
    return name;
  }
};

RecordArgs StepsOf(const TensorMesh& mesh) {
  RecordArgs args = DeviceSteps(mesh.strategy, mesh.model);
  args.spec.tensor_parts = kParts;
  args.gemms = GemmOptions{.measure = false};
  args.spec.compute = mesh.compute;
  args.spec.optimizer.offload.fraction = mesh.offload ? 1 : 0;
  if (mesh.recipe != Recipe::kNone) {
    args.spec.compute = ComputeType::kBF16;
    args.spec.recipe = {.recipe = mesh.recipe, .keep_bf16 = {}, .history = 3};
    if (mesh.recipe == Recipe::kFloat8Block) {  // parts are whole blocks of 128
      args.spec.model->head_dim = 128;
      args.spec.model->intermediate_size = 512;
    }
    if (!mesh.of_codes) {
      args.spec.recipe.emulation = {plan::GemmPath::kDequantBf16};
    } else if (mesh.as_mxfp8) {
      args.spec.recipe.emulation = {plan::GemmPath::kBlockAsMxFp8};
    }
  }
  return args;
}

const Recording& OneRankOf(kernels::CudaGpu& gpu, const TensorMesh& mesh) {
  const TensorMesh alone = {
      .strategy = {.micro_batches = mesh.strategy.micro_batches, .in_place = true},
      .model = mesh.model,
      .compute = mesh.compute,
      .recipe = mesh.recipe,
      .of_codes = mesh.of_codes,
      .as_mxfp8 = mesh.as_mxfp8};
  return RecordedOnce(gpu, "tensor " + alone.name(), StepsOf(alone));
}

class GpuTensor : public GpuEngine, public ::testing::WithParamInterface<TensorMesh> {};

TEST_P(GpuTensor, MeshesHaveTheBitsOfOneRank) {
  const TensorMesh& mesh = GetParam();
  if (mesh.of_codes) {
    // A device that has one of the two paths of fp8_block's codes lacks the other.
    const absl::Status checked = CheckCodes(mesh.as_mxfp8 ? Recipe::kMxFp8 : mesh.recipe);
    if (!checked.ok()) {
      GTEST_SKIP() << checked;
    }
  }
  const Recording& one = OneRankOf(gpu(), mesh);
  const Recording run = RecordOn(gpu(), StepsOf(mesh));
  if (emulated() || mesh.keeps_bits()) {
    ExpectEqualRuns(one, run, mesh.name());
    return;
  }
  ASSERT_EQ(run.steps.size(), one.steps.size());
  const bool narrow = mesh.compute != ComputeType::kF32 || mesh.recipe != Recipe::kNone;
  for (size_t step = 0; step < one.steps.size(); ++step) {
    EXPECT_NEAR(run.steps[step].loss / one.steps[step].loss, 1.0, narrow ? 1e-3 : 1e-5) << step;
  }
  EXPECT_LT(RelativeDifference(one.weights, run.weights), narrow ? 1e-2 : 1e-4);
}

std::vector<TensorMesh> Meshes() {
  return {
      {.strategy = {.strategy = "ZeRO3", .width = 2, .tensor = 2}},
      {.strategy = {.strategy = "ZeRO3", .width = 2, .tensor = 2, .chunks = 4}},
      {.strategy = {.strategy = "ZeRO1", .tensor = 4, .sequence = true}},
      {.strategy = {.strategy = "HFSDP",
                    .width = 1,
                    .micro_batches = 3,
                    .recompute = RecomputePolicy::kBlock,
                    .tensor = 2,
                    .sequence = true,
                    .chunks = 2}},
      {.strategy = {.strategy = "ZeRO2", .tensor = 2, .sequence = true, .chunks = 4},
       .model = "recipes_gpt2"},
      {.strategy = {.strategy = "ZeRO0", .tensor = 4, .chunks = 2}, .model = "recipes_gpt2"},
      {.strategy = {.strategy = "ZeRO3", .width = 2, .tensor = 2, .sequence = true},
       .compute = ComputeType::kBF16},
      {.strategy = {.strategy = "ZeRO2", .tensor = 4, .chunks = 2}, .compute = ComputeType::kBF16},
      {.strategy = {.strategy = "ZeRO1", .tensor = 2, .sequence = true},
       .compute = ComputeType::kF16},
      {.strategy = {.strategy = "ZeRO3", .width = 2, .tensor = 2, .sequence = true},
       .offload = true},
      {.strategy = {.strategy = "ZeRO3", .width = 2, .tensor = 2},
       .model = "recipes",
       .recipe = Recipe::kMxFp8},
      {.strategy = {.strategy = "ZeRO1", .tensor = 4, .sequence = true},
       .model = "recipes",
       .recipe = Recipe::kNvFp4},
      {.strategy = {.strategy = "ZeRO3", .width = 2, .tensor = 2, .sequence = true},
       .model = "recipes",
       .recipe = Recipe::kCurrent,
       .of_codes = true},
      {.strategy = {.strategy = "ZeRO2", .tensor = 4},
       .model = "recipes_gpt2",
       .recipe = Recipe::kDelayed,
       .of_codes = true},
      {.strategy = {.strategy = "ZeRO3", .width = 2, .tensor = 2},
       .model = "recipes",
       .recipe = Recipe::kFloat8Block,
       .of_codes = true},
      {.strategy = {.strategy = "ZeRO2", .tensor = 2, .chunks = 2},
       .model = "recipes",
       .recipe = Recipe::kFloat8Block,
       .of_codes = true},
      {.strategy = {.strategy = "ZeRO3", .width = 2, .tensor = 2, .sequence = true},
       .model = "recipes",
       .recipe = Recipe::kFloat8Block,
       .of_codes = true,
       .as_mxfp8 = true},
      {.strategy = {.strategy = "ZeRO3", .tensor = 2, .sequence = true, .chunks = 2},
       .model = "recipes",
       .recipe = Recipe::kMxFp8},
      {.strategy = {.strategy = "ZeRO2", .tensor = 4, .sequence = true},
       .model = "recipes",
       .recipe = Recipe::kMxFp8,
       .of_codes = true},
      {.strategy = {.strategy = "ZeRO2", .tensor = 4, .sequence = true},
       .model = "recipes",
       .recipe = Recipe::kNvFp4,
       .of_codes = true}};
}

INSTANTIATE_TEST_SUITE_P(Meshes, GpuTensor, ::testing::ValuesIn(Meshes()), [](const auto& tested) {
  return tested.param.name();
});

// The order of the sums is the plan's: parts are another one, close to that of a whole product.
TEST_F(GpuEngine, SumsInPartsAreAnotherOrderOfTheSameSums) {
  const TensorMesh mesh = {.strategy = {.in_place = true}};
  RecordArgs whole = StepsOf(mesh);
  whole.spec.tensor_parts = 1;
  const Recording one = RecordOn(gpu(), whole);
  const Recording& four = OneRankOf(gpu(), mesh);
  EXPECT_NE(FirstDifference(one, four), "");
  for (size_t step = 0; step < one.steps.size(); ++step) {
    EXPECT_NEAR(four.steps[step].loss / one.steps[step].loss, 1.0, 1e-4) << step;
  }
}

}  // namespace
}  // namespace ravel::trainer
