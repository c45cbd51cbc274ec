// Amaxes of weights that are measured part by part.

#include "worker/quant/quant_state.h"

#include <bit>
#include <random>
#include <vector>

#include <gtest/gtest.h>

#include "common/plan/sharding_plan.h"
#include "common/signed_size.h"
#include "tests/common/plan/plan_testing.h"

namespace ravel::quant {
namespace {

constexpr int64_t kHistory = 16;
constexpr float kEpsilon = 1e-3f;

// The weights of a rank: in each matrix the rows from `first_row` on.
struct RankWeights {
  std::vector<std::vector<float>> data;
  std::vector<QuantPiece> pieces;
};

RankWeights SomeWeights(const plan::ModelInventory& inventory, int64_t first_row) {
  RankWeights weights;
  std::mt19937 draws(7);
  std::uniform_real_distribution<float> values(-1, 1);
  for (const plan::QuantTensor& of : plan::QuantLayoutOf(inventory).tensors) {
    const Shape& shape = inventory.tensors[of.tensor].shape;
    const int64_t rows = shape[0] - first_row;
    weights.data.emplace_back(Size(rows * shape[1]));
    for (float& value : weights.data.back()) {
      value = values(draws) * (draws() % 3 == 0 ? 1e-5f : 1.0f);
    }
    weights.pieces.push_back({.tensor = of.tensor,
                              .first_row = first_row,
                              .main_weight = MatrixView(weights.data.back().data(), rows, shape[1]),
                              .codes = {}});
  }
  return weights;
}

class MeasuredParts : public ::testing::TestWithParam<plan::testing::RecipeCase> {
 protected:
  MeasuredParts() {
    auto plan = plan::BuildShardingPlan(
        {.spec = plan::testing::RecipeSpecOf(GetParam().recipe), .ranks = 1});
    EXPECT_TRUE(plan.ok()) << plan.status();
    inventory_ = plan->inventory;
    const plan::QuantWords words = plan::QuantWordsOf(plan::QuantLayoutOf(inventory_), 1, kHistory);
    amax_.resize(Size(words.amax));
    scales_.resize(Size(words.scales));
    flags_.resize(Size(words.flags));
  }

  template <typename Measure>
  std::vector<uint32_t> AmaxesOf(const Measure& measure) {
    std::fill(amax_.begin(), amax_.end(), 0);
    QuantState state(inventory_,
                     0,
                     {.path = plan::GemmPath::kCpuReference, .amax_epsilon = kEpsilon},
                     {.amax = amax_.data(),
                      .delayed_scales = scales_.empty() ? nullptr : scales_.data(),
                      .flags = flags_.data(),
                      .history = kHistory});
    measure(state);
    return amax_;
  }

  plan::ModelInventory inventory_;
  kernels::CpuStream stream_;

 private:
  std::vector<uint32_t> amax_;
  std::vector<float> scales_;
  std::vector<uint32_t> flags_;
};
INSTANTIATE_TEST_SUITE_P(Recipes,
                         MeasuredParts,
                         ::testing::ValuesIn(plan::testing::RecipeCases()),
                         [](const auto& tested) { return std::string(tested.param.name); });

// Parts end within blocks and rows, and some are rows and parts of rows on both sides.
TEST_P(MeasuredParts, HaveTheAmaxesOfTheWhole) {
  std::mt19937 draws(11);
  for (const int64_t first_row : {0, 128}) {
    const RankWeights weights = SomeWeights(inventory_, first_row);
    const std::vector<uint32_t> whole =
        AmaxesOf([&](QuantState& state) { state.MeasureWeights(stream_, weights.pieces); });
    EXPECT_NE(whole, std::vector<uint32_t>(whole.size()));
    for (const int64_t most : {int64_t{3}, int64_t{100}, int64_t{5000}, int64_t{65536}}) {
      const std::vector<uint32_t> parts = AmaxesOf([&](QuantState& state) {
        for (const QuantPiece& piece : weights.pieces) {
          int64_t left = piece.main_weight.elements();
          while (left > 0) {  // from the end: no order is needed
            const int64_t count = std::min<int64_t>(left, 1 + draws() % most);
            left -= count;
            state.MeasureElements(stream_, piece, left, count);
          }
        }
      });
      EXPECT_EQ(parts, whole) << "parts of up to " << most << " from row " << first_row;
    }
  }
}

// A value changes the amaxes of its own block and whole, and those alone.
TEST_P(MeasuredParts, SeeOnlyTheirOwnElements) {
  RankWeights weights = SomeWeights(inventory_, 0);
  const QuantPiece& piece = weights.pieces.front();
  const int64_t at = 3 * piece.main_weight.columns() + 130;
  piece.main_weight.As<float>()[at] = 1e6f;
  const auto largest = std::bit_cast<uint32_t>(1e6f);
  const auto count = [&](int64_t first, int64_t elements) {
    const std::vector<uint32_t> amaxes = AmaxesOf(
        [&](QuantState& state) { state.MeasureElements(stream_, piece, first, elements); });
    return std::count(amaxes.begin(), amaxes.end(), largest);
  };
  const int64_t expected = GetParam().recipe == plan::Recipe::kNvFp4 ? 2 : 1;
  EXPECT_EQ(count(at, 1), expected);
  EXPECT_EQ(count(at - 1, 3), expected);
  EXPECT_EQ(count(at + 1, piece.main_weight.elements() - at - 1), 0);
  EXPECT_EQ(count(0, at), 0);
}

}  // namespace
}  // namespace ravel::quant
