// The least amax that scales follow from, in every op that makes one of them.

#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include <gtest/gtest.h>

#include "kernels/quantize.h"
#include "kernels/scalar/block_scales.h"
#include "kernels/scalar/float8.h"

namespace ravel::kernels {
namespace {

using plan::Recipe;

constexpr Recipe kMeasured[] = {Recipe::kCurrent, Recipe::kFloat8Block};
constexpr float kEpsilon = 0.3f;
constexpr float kTiny = 0x1p-12f;  // all there is in the matrices
constexpr int64_t kRows = 144;
constexpr int64_t kColumns = 160;

// What the codes of an amax of kEpsilon are multiplied by.
float EncodeOf(Recipe recipe, bool e5m2) {
  return scalar::ScaleOf(
      {.largest = e5m2 ? 57344.0f : 448.0f, .power_of_two = recipe == Recipe::kFloat8Block},
      std::bit_cast<uint32_t>(kEpsilon));
}

template <typename T>
TensorView ViewOf(std::vector<T>& values, DType dtype, int64_t rows, int64_t columns) {
  TensorView view = MatrixView(nullptr, rows, columns);
  view.dtype = dtype;
  view.data = values.data();
  return view;
}

TEST(AmaxEpsilon, EpsilonReachesEveryQuantizer) {
  CpuStream stream;
  std::vector<uint16_t> x(kRows * kColumns, FloatToBf16(kTiny));
  const TensorView from = ViewOf(x, DType::kBF16, kRows, kColumns);
  for (const Recipe recipe : kMeasured) {
    for (const ActivationRole role : {ActivationRole::kInput, ActivationRole::kGradient}) {
      const bool e5m2 = recipe == Recipe::kCurrent && role == ActivationRole::kGradient;
      const float encode = EncodeOf(recipe, e5m2);
      const auto code = static_cast<uint8_t>(e5m2 ? scalar::E5M2::NearestCode(kTiny * encode)
                                                  : scalar::E4M3::NearestCode(kTiny * encode));
      const float value = e5m2 ? scalar::E5M2::ValueOfCode(code) : scalar::E4M3::ValueOfCode(code);
      for (const BlocksAlong along : {BlocksAlong::kColumns, BlocksAlong::kRows}) {
        std::vector<uint16_t> to(x.size());
        float scale = 0;
        QuantizeActivation(stream,
                           {.recipe = recipe,
                            .role = role,
                            .along = along,
                            .from = from,
                            .to = ViewOf(to, DType::kBF16, kRows, kColumns),
                            .scale = VectorView(&scale, 1),
                            .epsilon = kEpsilon});
        const float of_block = recipe == Recipe::kCurrent ? 1.0f : 1.0f / encode;
        EXPECT_EQ(scale * of_block, 1.0f / encode);
        for (const uint16_t decoded : to) {
          ASSERT_EQ(Bf16ToFloat(decoded), value * of_block) << static_cast<int>(recipe);
        }
        if (recipe == Recipe::kCurrent || role == ActivationRole::kGradient) {
          continue;
        }
        const bool turned = along == BlocksAlong::kRows;
        std::vector<uint8_t> codes(x.size());
        std::vector<float> scales(static_cast<size_t>(ScaleBytes(ScaleForm::kBlocks128,
                                                                 turned ? kColumns : kRows,
                                                                 turned ? kRows : kColumns) /
                                                      4));
        QuantizeBlocks(
            stream,
            {.recipe = recipe,
             .along = along,
             .from = from,
             .codes =
                 ViewOf(codes, DType::kU8, turned ? kColumns : kRows, turned ? kRows : kColumns),
             .scales = ViewOf(scales, DType::kU8, 1, std::ssize(scales) * 4),
             .epsilon = kEpsilon});
        EXPECT_EQ(codes, std::vector<uint8_t>(x.size(), code));
        EXPECT_EQ(scales, std::vector<float>(scales.size(), 1.0f / encode));
      }
      if (recipe == Recipe::kCurrent) {
        std::vector<uint8_t> codes(x.size());
        float scale = 0;
        QuantizeCodes(stream,
                      {.recipe = recipe,
                       .role = role,
                       .from = from,
                       .codes = ViewOf(codes, DType::kU8, kRows, kColumns),
                       .scale = VectorView(&scale, 1),
                       .epsilon = kEpsilon});
        EXPECT_EQ(codes, std::vector<uint8_t>(x.size(), code));
        EXPECT_EQ(scale, 1.0f / encode);
      }
    }
  }
}

// Scales of weights follow from amaxes in memory: all that a call touches are at least epsilon.
TEST(AmaxEpsilon, EpsilonReachesAmaxesOfWeights) {
  CpuStream stream;
  for (const Recipe recipe : kMeasured) {
    std::vector<float> weight(kRows * kColumns, kTiny);
    const int64_t edge = plan::BlockEdge(recipe);
    std::vector<uint32_t> amax(edge == 0 ? 1 : 4, 0);
    BlockAmax(stream,
              {.from = MatrixView(weight.data(), kRows, kColumns),
               .edge = edge,
               .amax = ViewOf(amax, DType::kU32, edge == 0 ? 1 : 2, edge == 0 ? 1 : 2),
               .epsilon = kEpsilon});
    EXPECT_EQ(amax, std::vector<uint32_t>(amax.size(), std::bit_cast<uint32_t>(kEpsilon)));
    weight[5] = std::numeric_limits<float>::quiet_NaN();
    BlockAmax(stream,
              {.from = MatrixView(weight.data(), 1, kColumns),
               .edge = edge,
               .amax = ViewOf(amax, DType::kU32, edge == 0 ? 1 : 2, edge == 0 ? 1 : 2),
               .epsilon = kEpsilon});
    EXPECT_GT(amax[0], 0x7F800000u) << "it hides no NaN";
  }
}

}  // namespace
}  // namespace ravel::kernels
