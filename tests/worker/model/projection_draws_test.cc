// The random bits that round gradients of NVFP4: parts of a matrix, which ranks of a tensor axis
// share, and calls of a layer have draws of their own, where their values are equal.

#include <cstring>
#include <random>
#include <vector>

#include <gtest/gtest.h>

#include "common/model/job_spec.h"
#include "common/model/recipes.h"
#include "common/model/tensor_parts.h"
#include "kernels/stream.h"
#include "tests/worker/model/model_configs.h"
#include "worker/model/projection.h"

namespace ravel::model {
namespace {

constexpr int64_t kTokens = 32;
constexpr int64_t kParts = 2;

// gate|up of a layer, whose outputs are in two parts.
class ProjectionDraws : public ::testing::Test {
 protected:
  void SetUp() override {
    plan::ModelConfig config = OddConfig(false);
    config.hidden_size = 64;
    config.intermediate_size = 128;
    config.head_dim = 32;
    const plan::MicroBatchShape shape = {.sequences = 1, .sequence_tokens = kTokens};
    inventory_ = plan::BuildInventory(
        *plan::ValidateModelConfig(config), shape, plan::RecomputePolicy::kNone, {.parts = kParts});
    const plan::RecipeSpec recipe = {.recipe = plan::Recipe::kNvFp4, .keep_bf16 = {}};
    const absl::Status applied =
        plan::ApplyRecipe(recipe, plan::GemmPath::kCpuReference, shape, inventory_);
    ASSERT_TRUE(applied.ok()) << applied;
    plan::ReserveTensorParts(inventory_);
    plan::ReserveRecipeScratch(plan::GemmPath::kCpuReference, shape, inventory_);
  }

  // Gradients of gate and up, [128, 64] each, of the same values in both parts.
  std::vector<std::vector<float>> GradientsOf(uint32_t call) {
    const UnitTensors tensors(inventory_, plan::UnitId(1));
    const plan::LinearNames& names = tensors.architecture().mlp_input;
    const Projection projection(tensors, names);
    const kernels::ActivationDraws draws = {.seed = 3, .piece = call, .sequence_tokens = kTokens};
    UnitMemory memory;
    memory.draws = &draws;
    std::vector<std::vector<std::byte>> storage;
    for (const plan::ActivationSpec& spec : tensors.spec().workspace) {
      memory.workspace.push_back(Allocate(spec.shape, spec.dtype, storage));
    }
    WeightGradients gradients;
    for (const plan::TensorId id : tensors.spec().tensors) {
      const plan::TensorSpec& tensor = inventory_.tensors[id];
      quant::GemmScales& scales = memory.scales.emplace_back();
      scales.weight.recipe = tensor.recipe;
      gradients.views.push_back(Allocate(tensor.shape, DType::kF32, storage));
    }
    TensorView x = Allocate({kTokens, 64}, DType::kBF16, storage);
    TensorView dy = Allocate({kTokens, 256}, DType::kBF16, storage);
    std::mt19937 random(5);
    for (int64_t row = 0; row < kTokens; ++row) {
      Fill(random, x.Row<uint16_t>(row), 64);
      Fill(random, dy.Row<uint16_t>(row), 64);
      for (int64_t part = 1; part < 4; ++part) {
        std::memcpy(dy.Row<uint16_t>(row) + 64 * part, dy.Row<uint16_t>(row), 64 * 2);
      }
    }
    projection.WeightGradient(stream_,
                              {.memory = memory, .gradients = gradients, .x = x, .dy = dy});
    std::vector<std::vector<float>> result;
    for (const std::string_view name : names.names) {
      const TensorView& view = gradients.views[tensors.Index(name, "weight")];
      result.emplace_back(view.As<float>(), view.As<float>() + view.elements());
    }
    return result;
  }

 private:
  static void Fill(std::mt19937& random, uint16_t* values, int64_t count) {
    std::uniform_real_distribution<float> uniform(-1, 1);
    for (int64_t i = 0; i < count; ++i) {
      values[i] = FloatToBf16(uniform(random));
    }
  }
  static TensorView Allocate(const Shape& shape,
                             DType dtype,
                             std::vector<std::vector<std::byte>>& storage) {
    const size_t bytes = static_cast<size_t>(ElementCount(shape) * DTypeBytes(dtype));
    std::byte* data = storage.emplace_back(bytes + 64).data();
    TensorView view =
        shape.size() == 1 ? VectorView(nullptr, shape[0]) : MatrixView(nullptr, shape[0], shape[1]);
    view.dtype = dtype;
    view.data = data;
    return view;
  }

  plan::ModelInventory inventory_;
  kernels::CpuStream stream_;
};

TEST_F(ProjectionDraws, PartsAndMembersAreRoundedByBitsOfTheirOwn) {
  const std::vector<std::vector<float>> gradients = GradientsOf(0);
  std::vector<std::vector<float>> parts;
  for (const std::vector<float>& matrix : gradients) {
    const auto half = matrix.begin() + std::ssize(matrix) / kParts;
    parts.emplace_back(matrix.begin(), half);
    parts.emplace_back(half, matrix.end());
  }
  ASSERT_EQ(parts.size(), 4u);
  for (size_t a = 0; a < parts.size(); ++a) {
    for (size_t b = a + 1; b < parts.size(); ++b) {
      EXPECT_NE(parts[a], parts[b]) << a << " " << b;
    }
  }
  EXPECT_EQ(GradientsOf(0), gradients);
}

TEST_F(ProjectionDraws, CallsOfALayerAreRoundedByBitsOfTheirOwn) {
  EXPECT_NE(GradientsOf(0), GradientsOf(1));
}

}  // namespace
}  // namespace ravel::model
