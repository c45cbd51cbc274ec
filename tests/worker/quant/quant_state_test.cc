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

// Memory for the codes of all pieces, which lie there then.
std::vector<std::vector<uint8_t>> GiveCodes(plan::Recipe recipe, RankWeights& weights) {
  std::vector<std::vector<uint8_t>> codes;
  for (QuantPiece& piece : weights.pieces) {
    const int64_t columns = piece.main_weight.columns() / plan::CodesPerByte(recipe);
    codes.emplace_back(Size(piece.main_weight.rows() * columns));
    piece.codes = MatrixView(nullptr, piece.main_weight.rows(), columns);
    piece.codes.dtype = DType::kU8;
    piece.codes.data = codes.back().data();
  }
  return codes;
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
    ClearAmaxes();
    QuantState state(inventory_,
                     0,
                     {.path = plan::GemmPath::kCpuReference, .amax_epsilon = kEpsilon},
                     {.amax = amax_.data(),
                      .delayed_scales = scales_.empty() ? nullptr : scales_.data(),
                      .flags = flags_.data(),
                      .history = kHistory,
                      .margin = 1});
    measure(state);
    return amax_;
  }

  void ClearAmaxes() { std::fill(amax_.begin(), amax_.end(), 0); }

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

// Those made in an update of parts are those that a refresh makes of the same rows, and only rows
// of whole blocks have them; none before there is a history.
TEST_P(MeasuredParts, CodesOfAnUpdateAreThoseOfTheRefresh) {
  const plan::Recipe recipe = GetParam().recipe;
  const int64_t edge = std::max<int64_t>(1, plan::BlockEdge(recipe));
  RankWeights weights = SomeWeights(inventory_, 40);
  const std::vector<std::vector<uint8_t>> updated = GiveCodes(recipe, weights);
  RankWeights copy = weights;
  const std::vector<std::vector<uint8_t>> refreshed = GiveCodes(recipe, copy);
  std::mt19937 draws(3);
  int64_t encoded = 0;
  AmaxesOf([&](QuantState& state) {
    EXPECT_EQ(state.QuantizeUpdated(
                       stream_, weights.pieces[0], 0, weights.pieces[0].main_weight.elements())
                      .rows == 0,
              !plan::EncodesInUpdate(recipe) || recipe == plan::Recipe::kDelayed);
    state.MeasureWeights(stream_, weights.pieces);
    state.FinishStep(stream_, {});
    ClearAmaxes();
    std::vector<QuantState::RowRange> of_pieces;
    for (const QuantPiece& piece : weights.pieces) {
      const int64_t columns = piece.main_weight.columns();
      for (int64_t first = 0; first < piece.main_weight.elements();) {
        const int64_t count = std::min<int64_t>(piece.main_weight.elements() - first,
                                                1 + draws() % (3 * edge * columns));
        state.MeasureElements(stream_, piece, first, count);
        const QuantState::RowRange rows = state.QuantizeUpdated(stream_, piece, first, count);
        if (rows.rows > 0) {
          EXPECT_GE(rows.first * columns, first);
          EXPECT_LE((rows.first + rows.rows) * columns, first + count);
          EXPECT_EQ((piece.first_row + rows.first) % edge, 0);
        }
        encoded += rows.rows;
        of_pieces.push_back(rows);
        first += count;
      }
      of_pieces.push_back({.first = -1});
    }
    state.FinishStep(stream_, {});
    state.Quantize(stream_, copy.pieces);
    size_t piece = 0;
    for (const QuantState::RowRange& rows : of_pieces) {
      if (rows.first < 0) {
        ++piece;
        continue;
      }
      const int64_t bytes = weights.pieces[piece].codes.columns();
      EXPECT_TRUE(std::equal(updated[piece].begin() + rows.first * bytes,
                             updated[piece].begin() + (rows.first + rows.rows) * bytes,
                             refreshed[piece].begin() + rows.first * bytes))
          << "piece " << piece << " from row " << rows.first;
    }
  });
  EXPECT_EQ(encoded > 0, plan::EncodesInUpdate(recipe));
}

// An update that changes nothing leaves in its target what both ops leave: amaxes, and codes of the
// rows that it names.
TEST_P(MeasuredParts, TargetsOfAnUpdateGetAmaxesAndCodes) {
  const plan::Recipe recipe = GetParam().recipe;
  const int64_t edge = plan::BlockEdge(recipe);
  for (const int64_t first_row : {0, 40}) {
    RankWeights weights = SomeWeights(inventory_, first_row);
    const std::vector<std::vector<uint8_t>> updated = GiveCodes(recipe, weights);
    RankWeights copy = weights;
    const std::vector<std::vector<uint8_t>> refreshed = GiveCodes(recipe, copy);
    const std::vector<uint32_t> whole = AmaxesOf([&](QuantState& state) {
      state.MeasureWeights(stream_, copy.pieces);
      state.FinishStep(stream_, {});
      state.Quantize(stream_, copy.pieces);
    });
    int64_t encoded = 0;
    const std::vector<uint32_t> amaxes = AmaxesOf([&](QuantState& state) {
      for (size_t i = 0; i < weights.pieces.size(); ++i) {
        const QuantPiece& piece = weights.pieces[i];
        std::vector<float> zeros(Size(piece.main_weight.elements()));
        const auto [target, rows] = state.TargetOf(piece, true);
        EXPECT_EQ(target.codes.present(), rows.rows > 0 || recipe == plan::Recipe::kDelayed);
        encoded += rows.rows;
        EXPECT_EQ(state.TargetOf(piece, false).encoded.rows, 0);
        kernels::WeightUpdateArgs args;
        args.columns = piece.main_weight.columns();
        args.row_step = args.columns;
        args.target = target;
        args.update.update = {
            .main_weight = VectorView(piece.main_weight.As<float>(), std::ssize(zeros)),
            .g = VectorView(zeros.data(), std::ssize(zeros)),
            .m = VectorView(zeros.data(), std::ssize(zeros)),
            .v = {},
            .rule = kernels::ElementRule::kSgd};
        kernels::WeightUpdate(stream_, args);
        if (rows.rows > 0) {
          EXPECT_EQ((piece.first_row + rows.first) % edge, 0);
          const int64_t bytes = piece.codes.columns();
          EXPECT_TRUE(std::equal(updated[i].begin() + rows.first * bytes,
                                 updated[i].begin() + (rows.first + rows.rows) * bytes,
                                 refreshed[i].begin() + rows.first * bytes));
        }
      }
    });
    EXPECT_EQ(amaxes, whole);
    EXPECT_EQ(encoded > 0, plan::BlockEdge(recipe) > 16);
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
