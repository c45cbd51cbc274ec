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
#include "kernels/scalar/float4.h"
#include "kernels/scalar/float8.h"
#include "tests/gpu/twin_matrix.h"

namespace ravel::kernels::testing {
namespace {

using plan::Recipe;

// The value of element `at` of a row of codes, and of the scale of its block.
float CodeAt(ScaleForm form, const TensorView& codes, int64_t row, int64_t at) {
  const uint32_t byte = codes.Row<uint8_t>(row)[at / CodesOfByte(form)];
  return form == ScaleForm::kBlocks16 ? scalar::E2M1Value(byte >> (at % 2 * 4) & 0xFu)
                                      : scalar::E4M3::ValueOfCode(byte);
}
float ScaleOf(ScaleForm form, const TensorView& scales, int64_t index) {
  switch (form) {
    case ScaleForm::kBlocks16:
      return scalar::E4M3::ValueOfCode(scales.As<uint8_t>()[index]);
    case ScaleForm::kBlocks32:
      return scalar::E8M0Value(scales.As<uint8_t>()[index]);
    default:
      return scales.As<float>()[index];
  }
}

struct OfBlocks {
  Recipe recipe;
  bool as_mxfp8 = false;
};
constexpr OfBlocks kOfBlocks[] = {
    {Recipe::kFloat8Block}, {Recipe::kFloat8Block, true}, {Recipe::kMxFp8}, {Recipe::kNvFp4}};

class GpuBlockCodesTest : public GpuQuantizeTest {
 protected:
  struct Case {
    Recipe recipe;
    ActivationRole role;
    BlocksAlong along;
    int64_t tokens;
    int64_t columns;
    int64_t gap;
    float bad;
    bool as_mxfp8;
  };

  static ActivationDraws DrawsOf(const Case& of) {
    return {.seed = 77,
            .step = 5,
            .site = 9,
            .piece = 6,
            .first_sample = 3,
            .sequence_tokens = of.tokens / 2};
  }

  // Codes and scales of blocks are those of the CPU, and together what QuantizeActivation makes.
  void Compare(const Case& of) {
    const bool turned = of.along == BlocksAlong::kRows;
    const float epsilon = plan::HasAmaxEpsilon(of.recipe) && of.columns == 96 ? 40.0f : 0.0f;
    const int64_t outer = turned ? of.columns : of.tokens;
    const int64_t inner = turned ? of.tokens : of.columns;
    const ScaleForm form = ActivationScaleForm(of.recipe, of.as_mxfp8);
    const ActivationDraws draws = DrawsOf(of);
    TwinMatrix from(DType::kBF16, of.tokens, of.columns, of.gap);
    TwinMatrix decoded(DType::kBF16, of.tokens, of.columns);
    TwinMatrix codes(DType::kU8, outer, inner / CodesOfByte(form));
    TwinMatrix scales(DType::kU8, 1, ScaleBytes(form, outer, inner));
    TwinMatrix flag(DType::kU32, 1, 1);
    TwinMatrix scale(DType::kF32, 1, 1);
    TwinMatrix whole(DType::kF32, 1, 1);
    Fill(from, 22, of.bad);
    Set(flag, 0u);
    Set(scale, 1.0f);
    codes.Send();
    scales.Send();
    const auto run = [&](Stream& stream, auto on) {
      QuantizeBlocks(stream,
                     {.recipe = of.recipe,
                      .role = of.role,
                      .along = of.along,
                      .from = (from.*on)(),
                      .codes = (codes.*on)(),
                      .scales = (scales.*on)(),
                      .scale = of.recipe == Recipe::kNvFp4 ? (scale.*on)() : TensorView(),
                      .non_finite = (flag.*on)(),
                      .draws = draws,
                      .epsilon = epsilon,
                      .as_mxfp8 = of.as_mxfp8});
    };
    run(cpu_, &TwinMatrix::host);
    run(gpu(), &TwinMatrix::device);
    SCOPED_TRACE(::testing::Message()
                 << "recipe " << static_cast<int>(of.recipe) << " role "
                 << static_cast<int>(of.role) << " along " << static_cast<int>(of.along) << " "
                 << of.tokens << " x " << of.columns);
    for (TwinMatrix* made : {&codes, &scales, &flag, &scale}) {
      EXPECT_TRUE(made->Same());
    }
    EXPECT_EQ(*flag.host().As<uint32_t>() != 0, of.bad != 0);
    QuantizeActivation(cpu_,
                       {.recipe = of.recipe,
                        .role = of.role,
                        .along = of.along,
                        .from = from.host(),
                        .to = decoded.host(),
                        .scale = whole.host(),
                        .draws = draws,
                        .epsilon = epsilon});
    if (of.bad == 0) {
      EXPECT_EQ(*scale.host().As<float>(), *whole.host().As<float>());
    }
    const int64_t blocks = ScaleBlocks(form, inner);
    for (int64_t row = 0; row < outer; ++row) {
      for (int64_t at = 0; at < inner; ++at) {
        const float code = CodeAt(form, codes.host(), row, at);
        const int64_t index = ScaleIndex(form, row, at / CodesOfScale(form), outer, blocks);
        const float of_block = ScaleOf(form, scales.host(), index);
        const float of_bf16 =
            Bf16ToFloat(decoded.host().Row<uint16_t>(turned ? at : row)[turned ? row : at]);
        ASSERT_TRUE(code * of_block == of_bf16 ||
                    (std::isnan(code * of_block) && std::isnan(of_bf16)))
            << row << ", " << at;
      }
    }
  }
};

TEST_F(GpuBlockCodesTest, CodesOfBlocksAreThoseOfTheCpuAndOfDecodedValues) {
  for (const auto& [recipe, as_mxfp8] : kOfBlocks) {
    for (const ActivationRole role : {ActivationRole::kInput, ActivationRole::kGradient}) {
      for (const BlocksAlong along : {BlocksAlong::kColumns, BlocksAlong::kRows}) {
        for (const auto& [tokens, columns, gap, bad] :
             {std::tuple(int64_t{160}, int64_t{96}, int64_t{0}, 0.0f),
              std::tuple(int64_t{288}, int64_t{352}, int64_t{4}, 0.0f),
              std::tuple(int64_t{32}, int64_t{64}, int64_t{64}, std::nanf(""))}) {
          Compare({recipe, role, along, tokens, columns, gap, bad, as_mxfp8});
        }
      }
    }
  }
}

// Packed codes, of which each is a nibble.
TEST_F(GpuBlockCodesTest, PackedCodesAreTransposedAsOnTheCpu) {
  for (const auto& [rows, columns] :
       {std::pair(int64_t{32}, int64_t{32}), {96, 160}, {192, 64}, {64, 224}}) {
    TwinMatrix from(DType::kU8, rows, columns / 2);
    TwinMatrix to(DType::kU8, columns, rows / 2);
    std::mt19937 random(static_cast<uint32_t>(InputSeed()));
    for (int64_t i = 0; i < rows * columns / 2; ++i) {
      from.host().As<uint8_t>()[i] = static_cast<uint8_t>(random());
    }
    from.Send();
    to.Send();
    const auto run = [&](Stream& stream, auto on) {
      TransposeCodes(stream, {.from = (from.*on)(), .to = (to.*on)(), .codes_per_byte = 2});
    };
    run(cpu_, &TwinMatrix::host);
    run(gpu(), &TwinMatrix::device);
    EXPECT_TRUE(to.Same()) << rows << " x " << columns;
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t column = 0; column < columns; ++column) {
        ASSERT_EQ(CodeAt(ScaleForm::kBlocks16, to.host(), column, row),
                  CodeAt(ScaleForm::kBlocks16, from.host(), row, column));
      }
    }
  }
}

// Of an operand of two weights, in the order of either index.
TEST_F(GpuBlockCodesTest, ScalesOfWeightsArePlacedAsOnTheCpu) {
  for (const auto& [recipe, as_mxfp8] : kOfBlocks) {
    for (const BlocksAlong inner : {BlocksAlong::kColumns, BlocksAlong::kRows}) {
      const int64_t edge = plan::BlockEdge(recipe);
      const int64_t columns = 5 * edge;
      const int64_t parts[] = {2 * edge, 3 * edge};
      const int64_t all_rows = parts[0] + parts[1];
      const bool turned = inner == BlocksAlong::kRows;
      const ScaleForm form = WeightScaleForm(recipe, as_mxfp8);
      const int64_t outer = turned ? columns : all_rows;
      const int64_t blocks = ScaleBlocks(form, turned ? all_rows : columns);
      TwinMatrix amax(DType::kU32, all_rows / edge, 5);
      TwinMatrix domain(DType::kU32, 1, 1);
      TwinMatrix whole(DType::kF32, 1, 1);
      TwinMatrix to(DType::kU8, 1, ScaleBytes(form, outer, turned ? all_rows : columns));
      const uint32_t largest = std::bit_cast<uint32_t>(2560.0f);
      for (int64_t i = 0; i < amax.host().elements(); ++i) {
        amax.host().As<uint32_t>()[i] =
            std::bit_cast<uint32_t>(std::ldexp(1.25f, static_cast<int>(i % 23) - 11));
      }
      amax.Send();
      to.Send();
      Set(domain, largest);
      Set(whole, 1.0f);
      const auto run = [&, recipe = recipe, as_mxfp8 = as_mxfp8](Stream& stream, auto on) {
        int64_t first = 0;
        for (const int64_t rows : parts) {
          const WeightScales scales = {.recipe = recipe,
                                       .amax = RowsOf((amax.*on)(), first / edge, rows / edge),
                                       .domain_amax = (domain.*on)()};
          PlaceScales(stream,
                      {.scales = scales,
                       .inner = inner,
                       .rows = rows,
                       .columns = columns,
                       .first_row = first,
                       .all_rows = all_rows,
                       .to = (to.*on)(),
                       .as_mxfp8 = as_mxfp8});
          if (recipe == Recipe::kNvFp4) {
            DecodeWeight(stream, {.codes = {}, .scales = scales, .to = {}, .scale = (whole.*on)()});
          }
          first += rows;
        }
      };
      run(cpu_, &TwinMatrix::host);
      run(gpu(), &TwinMatrix::device);
      EXPECT_TRUE(to.Same());
      EXPECT_TRUE(whole.Same());
      const scalar::Scales tensor = scalar::WeightTensorScales(recipe, largest, 0);
      EXPECT_EQ(*whole.host().As<float>(), tensor.decode);
      for (int64_t row = 0; row < all_rows; ++row) {
        for (int64_t column = 0; column < columns; ++column) {
          const int64_t index = ScaleIndex(form,
                                           turned ? column : row,
                                           (turned ? row : column) / CodesOfScale(form),
                                           outer,
                                           blocks);
          const uint32_t bits = amax.host().Row<uint32_t>(row / edge)[column / edge];
          ASSERT_EQ(ScaleOf(form, to.host(), index),
                    scalar::WeightBlockScales(recipe, bits, tensor.encode).decode)
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
        codes(of == ScaleForm::kBlocks16 ? DType::kU8 : DType::kF8E4M3,
              outer,
              inner / CodesOfByte(of)),
        scales(DType::kU8, 1, ScaleBytes(of, outer, inner)),
        whole(DType::kF32, 1, 1) {
    std::mt19937 random(static_cast<uint32_t>(InputSeed() + outer));
    std::memset(scales.host().data, 0, Size(scales.host().elements()));
    const int64_t blocks = ScaleBlocks(form, inner);
    const bool packed = form == ScaleForm::kBlocks16;
    for (int64_t row = 0; row < outer; ++row) {
      for (int64_t i = 0; i < codes.host().size[1]; ++i) {
        codes.host().Row<uint8_t>(row)[i] =
            static_cast<uint8_t>(packed ? random() : 0x30 + random() % 16 + random() % 2 * 0x80);
      }
      for (int64_t block = 0; block < blocks; ++block) {
        const int exponent = static_cast<int>((row / 128 * 5 + row % 3 + block) % 7) - 3;
        const float scale = std::ldexp(1.25f, exponent);
        // Rows of a square have one scale, which the last of them sets.
        const int64_t index = ScaleIndex(form, row, block, outer, blocks);
        if (packed) {
          scales.host().As<uint8_t>()[index] =
              static_cast<uint8_t>(scalar::E4M3::NearestCode(scale));
        } else if (form == ScaleForm::kBlocks32) {
          scales.host().As<uint8_t>()[index] = static_cast<uint8_t>(127 + exponent);
        } else {
          scales.host().As<float>()[index] = scale;
        }
      }
    }
    *whole.host().As<float>() = packed ? 0.375f : 1.0f;
    codes.Send();
    scales.Send();
    whole.Send();
  }
  double Value(int64_t row, int64_t i) {
    const TensorView all = codes.host();
    const int64_t blocks = ScaleBlocks(form, all.size[1] * CodesOfByte(form));
    const int64_t index = ScaleIndex(form, row, i / CodesOfScale(form), all.size[0], blocks);
    return double{CodeAt(form, all, row, i)} * double{ScaleOf(form, scales.host(), index)} *
           double{*whole.host().As<float>()};
  }
  TensorView Whole() { return form == ScaleForm::kBlocks16 ? whole.device() : TensorView(); }

  ScaleForm form;
  TwinMatrix codes;
  TwinMatrix scales;
  TwinMatrix whole;
};

TEST_F(GpuBlockCodesTest, GemmsOfBlocksOfCodesAreThoseOfDecodedOperands) {
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
                                       {kBlocks32, kBlocks32},
                                       {kBlocks16, kBlocks16}}) {
    if ((a_form == kBlocks32 || a_form == kBlocks16) != (major >= 10)) {
      continue;  // of other devices
    }
    for (const auto& [out, output] : {std::pair(DType::kF32, Output::kAccumulate),
                                      {DType::kBF16, Output::kAccumulate},
                                      {DType::kBF16, Output::kOverwrite}}) {
      BlockOperand a(a_form, kM, kK);
      BlockOperand b(b_form, kN, kK);
      TwinMatrix c(out, kM, kN);
      TwinMatrix factors(DType::kF32, 1, 2);
      // What is overwritten may be no number.
      std::memset(
          c.host().data, output == Output::kOverwrite ? 0xFF : 0, Size(kM * kN * DTypeBytes(out)));
      c.Send();
      factors.Send();
      Gemm(gpu(),
           {.a = a.codes.device(),
            .b = b.codes.device(),
            .transpose_b = Transpose::kYes,
            .c = c.device(),
            .output = output,
            .scale_a = a.scales.device(),
            .scale_b = b.scales.device(),
            .form_a = a_form,
            .form_b = b_form,
            .whole_a = a.Whole(),
            .whole_b = b.Whole(),
            .factors = a_form == kBlocks16 ? factors.device() : TensorView()});
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
