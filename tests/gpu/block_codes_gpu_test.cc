// Codes with a scale for each block: the device gives the bits of the CPU, and gemms of them are
// those of the decoded operands.

#include <bit>
#include <cmath>
#include <cstring>
#include <random>
#include <tuple>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "common/signed_size.h"
#include "kernels/gemm.h"
#include "kernels/quantize.h"
#include "kernels/scalar/block_scales.h"
#include "kernels/scalar/float8.h"
#include "tests/gpu/twin_matrix.h"

namespace ravel::kernels::testing {
namespace {

using plan::Recipe;

// Codes and scales of blocks: those of the CPU, and together what QuantizeActivation makes.
TEST_F(GpuQuantizeTest, CodesOfBlocksAreThoseOfTheCpuAndOfDecodedValues) {
  for (const Recipe recipe : {Recipe::kFloat8Block, Recipe::kMxFp8}) {
    for (const BlocksAlong along : {BlocksAlong::kColumns, BlocksAlong::kRows}) {
      for (const auto& [tokens, columns, gap, bad] :
           {std::tuple(int64_t{160}, int64_t{96}, int64_t{0}, 0.0f),
            std::tuple(int64_t{288}, int64_t{352}, int64_t{4}, 0.0f),
            std::tuple(int64_t{32}, int64_t{64}, int64_t{64}, std::nanf(""))}) {
        const bool turned = along == BlocksAlong::kRows;
        const float epsilon = plan::HasAmaxEpsilon(recipe) && columns == 96 ? 40.0f : 0.0f;
        const int64_t outer = turned ? columns : tokens;
        const int64_t inner = turned ? tokens : columns;
        const ScaleForm form = ActivationScaleForm(recipe);
        TwinMatrix from(DType::kBF16, tokens, columns, gap);
        TwinMatrix decoded(DType::kBF16, tokens, columns);
        TwinMatrix codes(DType::kU8, outer, inner);
        TwinMatrix scales(DType::kU8, 1, ScaleBytes(form, outer, inner));
        TwinMatrix flag(DType::kU32, 1, 1);
        TwinMatrix scale(DType::kF32, 1, 1);
        Fill(from, 22, bad);
        Set(flag, 0u);
        codes.Send();
        scales.Send();
        const auto run = [&](Stream& stream, auto on) {
          QuantizeBlocks(stream,
                         {.recipe = recipe,
                          .along = along,
                          .from = (from.*on)(),
                          .codes = (codes.*on)(),
                          .scales = (scales.*on)(),
                          .non_finite = (flag.*on)(),
                          .epsilon = epsilon});
        };
        run(cpu_, &TwinMatrix::host);
        run(gpu(), &TwinMatrix::device);
        SCOPED_TRACE(::testing::Message()
                     << "recipe " << static_cast<int>(recipe) << " along "
                     << static_cast<int>(along) << " " << tokens << " x " << columns);
        for (TwinMatrix* made : {&codes, &scales, &flag}) {
          EXPECT_TRUE(made->Same());
        }
        EXPECT_EQ(*flag.host().As<uint32_t>() != 0, bad != 0);
        QuantizeActivation(cpu_,
                           {.recipe = recipe,
                            .along = along,
                            .from = from.host(),
                            .to = decoded.host(),
                            .scale = scale.host(),
                            .epsilon = epsilon});
        const int64_t blocks = ScaleBlocks(form, inner);
        for (int64_t row = 0; row < outer; ++row) {
          for (int64_t at = 0; at < inner; ++at) {
            const float code = scalar::E4M3::ValueOfCode(codes.host().Row<uint8_t>(row)[at]);
            const int64_t index = ScaleIndex(form, row, at / CodesOfScale(form), outer, blocks);
            const float of_block = form == ScaleForm::kBlocks32
                                       ? scalar::E8M0Value(scales.host().As<uint8_t>()[index])
                                       : scales.host().As<float>()[index];
            const float of_bf16 =
                Bf16ToFloat(decoded.host().Row<uint16_t>(turned ? at : row)[turned ? row : at]);
            ASSERT_TRUE(code * of_block == of_bf16 ||
                        (std::isnan(code * of_block) && std::isnan(of_bf16)))
                << row << ", " << at;
          }
        }
      }
    }
  }
}

// Of an operand of two weights, in the order of either index.
TEST_F(GpuQuantizeTest, ScalesOfWeightsArePlacedAsOnTheCpu) {
  for (const Recipe recipe : {Recipe::kFloat8Block, Recipe::kMxFp8}) {
    for (const BlocksAlong inner : {BlocksAlong::kColumns, BlocksAlong::kRows}) {
      const int64_t edge = plan::BlockEdge(recipe);
      const int64_t columns = 5 * edge;
      const int64_t parts[] = {2 * edge, 3 * edge};
      const int64_t all_rows = parts[0] + parts[1];
      const bool turned = inner == BlocksAlong::kRows;
      const ScaleForm form = WeightScaleForm(recipe);
      const int64_t outer = turned ? columns : all_rows;
      const int64_t blocks = ScaleBlocks(form, turned ? all_rows : columns);
      TwinMatrix amax(DType::kU32, all_rows / edge, 5);
      TwinMatrix to(DType::kU8, 1, ScaleBytes(form, outer, turned ? all_rows : columns));
      for (int64_t i = 0; i < amax.host().elements(); ++i) {
        amax.host().As<uint32_t>()[i] =
            std::bit_cast<uint32_t>(std::ldexp(1.25f, static_cast<int>(i % 23) - 11));
      }
      amax.Send();
      to.Send();
      const auto run = [&](Stream& stream, auto on) {
        int64_t first = 0;
        for (const int64_t rows : parts) {
          PlaceScales(stream,
                      {.scales = {.recipe = recipe,
                                  .amax = RowsOf((amax.*on)(), first / edge, rows / edge)},
                       .inner = inner,
                       .rows = rows,
                       .columns = columns,
                       .first_row = first,
                       .all_rows = all_rows,
                       .to = (to.*on)()});
          first += rows;
        }
      };
      run(cpu_, &TwinMatrix::host);
      run(gpu(), &TwinMatrix::device);
      EXPECT_TRUE(to.Same());
      for (int64_t row = 0; row < all_rows; ++row) {
        for (int64_t column = 0; column < columns; ++column) {
          const int64_t index = ScaleIndex(
              form, turned ? column : row, (turned ? row : column) / edge, outer, blocks);
          const float of_block = form == ScaleForm::kBlocks32
                                     ? scalar::E8M0Value(to.host().As<uint8_t>()[index])
                                     : to.host().As<float>()[index];
          const uint32_t bits = amax.host().Row<uint32_t>(row / edge)[column / edge];
          ASSERT_EQ(of_block, scalar::WeightBlockScales(recipe, bits, 1.0f).decode)
              << row << ", " << column;
        }
      }
    }
  }
}

// An operand of a gemm: codes around 1, and scales of their blocks.
struct BlockOperand {
  BlockOperand(ScaleForm of, int64_t outer, int64_t inner)
      : form(of),
        codes(DType::kF8E4M3, outer, inner),
        scales(DType::kU8, 1, ScaleBytes(of, outer, inner)) {
    std::mt19937 random(static_cast<uint32_t>(InputSeed() + outer));
    std::memset(scales.host().data, 0, Size(scales.host().elements()));
    const int64_t blocks = ScaleBlocks(form, inner);
    for (int64_t row = 0; row < outer; ++row) {
      for (int64_t i = 0; i < inner; ++i) {
        codes.host().Row<uint8_t>(row)[i] =
            static_cast<uint8_t>(0x30 + random() % 16 + random() % 2 * 0x80);
        const int64_t block = i / CodesOfScale(form);
        const int exponent = static_cast<int>((row / 128 * 5 + row % 3 + block) % 7) - 3;
        // Rows of a square have one scale, which the last of them sets.
        const int64_t index = ScaleIndex(form, row, block, outer, blocks);
        if (form == ScaleForm::kBlocks32) {
          scales.host().As<uint8_t>()[index] = static_cast<uint8_t>(127 + exponent);
        } else {
          scales.host().As<float>()[index] = std::ldexp(1.25f, exponent);
        }
      }
    }
    codes.Send();
    scales.Send();
  }
  double Value(int64_t row, int64_t i) {
    const int64_t index = ScaleIndex(form,
                                     row,
                                     i / CodesOfScale(form),
                                     codes.host().size[0],
                                     ScaleBlocks(form, codes.host().size[1]));
    const float scale = form == ScaleForm::kBlocks32
                            ? scalar::E8M0Value(scales.host().As<uint8_t>()[index])
                            : scales.host().As<float>()[index];
    return double{scalar::E4M3::ValueOfCode(codes.host().Row<uint8_t>(row)[i])} * double{scale};
  }

  ScaleForm form;
  TwinMatrix codes;
  TwinMatrix scales;
};

TEST_F(GpuQuantizeTest, GemmsOfBlocksOfCodesAreThoseOfDecodedOperands) {
  if (!TheGpu().device->no_cublas().empty()) {
    GTEST_SKIP() << TheGpu().device->no_cublas();
  }
  constexpr int64_t kM = 144;
  constexpr int64_t kN = 160;
  constexpr int64_t kK = 288;
  const int major = TheGpu().device->properties().compute_major;
  using enum ScaleForm;
  for (const auto& [a_form, b_form] : {std::pair(kBlocks128, kSquares128),
                                       {kSquares128, kBlocks128},
                                       {kBlocks128, kBlocks128},
                                       {kBlocks32, kBlocks32}}) {
    if ((a_form == kBlocks32) != (major >= 10)) {
      continue;  // of other devices
    }
    for (const DType out : {DType::kF32, DType::kBF16}) {
      BlockOperand a(a_form, kM, kK);
      BlockOperand b(b_form, kN, kK);
      TwinMatrix c(out, kM, kN);
      std::memset(c.host().data, 0, Size(kM * kN * DTypeBytes(out)));
      c.Send();
      Gemm(gpu(),
           {.a = a.codes.device(),
            .b = b.codes.device(),
            .transpose_b = Transpose::kYes,
            .c = c.device(),
            .output = Output::kAccumulate,
            .scale_a = a.scales.device(),
            .scale_b = b.scales.device(),
            .form_a = a_form,
            .form_b = b_form});
      const TensorView result = c.Result();
      for (int64_t i = 0; i < kM * kN; ++i) {
        double sum = 0;
        double magnitude = 0;
        for (int64_t k = 0; k < kK; ++k) {
          const double product = a.Value(i / kN, k) * b.Value(i % kN, k);
          sum += product;
          magnitude += std::abs(product);
        }
        const float x =
            out == DType::kBF16 ? Bf16ToFloat(result.As<uint16_t>()[i]) : result.As<float>()[i];
        ASSERT_NEAR(x, sum, magnitude / 1024 + std::abs(sum) / 256) << i;
      }
    }
  }
}

}  // namespace
}  // namespace ravel::kernels::testing
