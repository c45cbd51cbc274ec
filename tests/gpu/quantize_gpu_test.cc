// Quantization: the device gives the bits of the CPU, in every recipe; and gemms with scales.

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <tuple>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "common/signed_size.h"
#include "kernels/gemm.h"
#include "kernels/quantize.h"
#include "kernels/scalar/float8.h"
#include "kernels/step_statistics.h"
#include "tests/gpu/twin_matrix.h"

namespace ravel::kernels::testing {
namespace {

using plan::Recipe;

constexpr Recipe kRecipes[] = {
    Recipe::kDelayed, Recipe::kCurrent, Recipe::kFloat8Block, Recipe::kMxFp8, Recipe::kNvFp4};

struct Layout {
  int64_t rows;
  int64_t columns;
  int64_t gap;
  int64_t offset;
};

class GpuActivationTest : public GpuQuantizeTest {
 protected:
  void Compare(const QuantizeActivationArgs& base, const Layout& layout, float bad, float encode) {
    const auto make = [&] {
      return TwinMatrix(DType::kBF16, layout.rows, layout.columns, layout.gap, layout.offset);
    };
    for (const bool in_place : {false, true}) {
      TwinMatrix from = make();
      TwinMatrix other = make();
      TwinMatrix& to = in_place ? from : other;
      Fill(from, 7, bad);
      other.Send();
      TwinMatrix scale(DType::kF32, 1, 1);
      TwinMatrix given(DType::kF32, 1, 1);
      TwinMatrix staged(DType::kU32, 1, 1);
      TwinMatrix non_finite(DType::kU32, 1, 1);
      Set(scale, -1.0f);
      Set(given, encode);
      Set(staged, 5u);
      Set(non_finite, 0u);
      QuantizeActivationArgs args = base;
      TwinMatrix step(DType::kU32, 1, 2);  // int64
      std::memset(step.host().data, 0, sizeof(int64_t));
      Set(step, args.draws.step);
      args.draws.step += in_place ? 50 : 0;  // the step in memory counts
      const auto run = [&](Stream& stream, auto on) {
        args.from = (from.*on)();
        args.to = (to.*on)();
        args.scale = (scale.*on)();
        args.encode = (given.*on)();
        args.staged = (staged.*on)();
        args.non_finite = (non_finite.*on)();
        args.draws.device_step = in_place ? (step.*on)().template As<int64_t>() : nullptr;
        QuantizeActivation(stream, args);
      };
      run(cpu_, &TwinMatrix::host);
      run(gpu(), &TwinMatrix::device);
      SCOPED_TRACE(::testing::Message()
                   << "recipe " << static_cast<int>(base.recipe) << " role "
                   << static_cast<int>(base.role) << " along " << static_cast<int>(base.along)
                   << " " << layout.rows << " x " << layout.columns << " in place " << in_place
                   << " with " << bad);
      EXPECT_TRUE(to.Same());
      EXPECT_TRUE(scale.Same());
      EXPECT_TRUE(staged.Same());
      EXPECT_TRUE(non_finite.Same());
    }
  }
};

TEST_F(GpuActivationTest, GivesTheBitsOfTheCpu) {
  constexpr Layout kLayouts[] = {{96, 288, 0, 0},
                                 {96, 288, 8, 8},
                                 {160, 32, 3, 1},
                                 {33, 301, 0, 0},
                                 {48, 37, 0, 0},
                                 {1, 64, 0, 0},
                                 {0, 64, 0, 0}};
  for (const Recipe recipe : kRecipes) {
    for (const ActivationRole role : {ActivationRole::kInput, ActivationRole::kGradient}) {
      for (const BlocksAlong along : {BlocksAlong::kColumns, BlocksAlong::kRows}) {
        QuantizeActivationArgs args;
        args.recipe = recipe;
        args.role = role;
        args.along = along;
        args.draws = {.seed = 0x123456789ABCDEF0u,
                      .step = 3,
                      .site = 0x00FEDCBA,
                      .piece = 0x5A3,
                      .first_sample = 9,
                      .sequence_tokens = 40};
        for (const Layout& layout : kLayouts) {
          const bool whole = recipe == Recipe::kMxFp8 || recipe == Recipe::kNvFp4;
          const int64_t extent = along == BlocksAlong::kColumns ? layout.columns : layout.rows;
          if (whole && extent % plan::BlockEdge(recipe) != 0) {
            continue;
          }
          Compare(args, layout, 0.0f, 0.0f);
        }
        Compare(args, kLayouts[0], 0.0f, 3.5f);
        if (plan::HasAmaxEpsilon(recipe)) {
          args.epsilon = 40.0f;  // more than many blocks have
          Compare(args, kLayouts[3], 0.0f, 0.0f);
          args.epsilon = 0;
        }
        Compare(args, kLayouts[0], std::numeric_limits<float>::quiet_NaN(), 0.0f);
        Compare(args, kLayouts[0], -std::numeric_limits<float>::infinity(), 0.0f);
      }
    }
  }
}

class GpuWeightTest : public GpuQuantizeTest {
 protected:
  // A weight of these sizes whose rows come in two parts.
  void Compare(Recipe recipe, const Layout& layout, float bad) {
    const int64_t edge = plan::BlockEdge(recipe);
    const int64_t bytes = layout.columns / plan::CodesPerByte(recipe);
    TwinMatrix weight(DType::kF32, layout.rows, layout.columns, 0, layout.offset);
    TwinMatrix amax(DType::kU32,
                    edge == 0 ? 1 : DivCeil(layout.rows, edge),
                    edge == 0 ? 1 : DivCeil(layout.columns, edge));
    TwinMatrix domain(DType::kU32, 1, 1);
    TwinMatrix encode(DType::kF32, 1, 1);
    TwinMatrix codes(DType::kU8, layout.rows, bytes, 0, layout.offset);
    TwinMatrix decoded(DType::kBF16, layout.rows, layout.columns, 0, layout.offset);
    TwinMatrix scale(DType::kF32, 1, 1);
    Fill(weight, 11, bad);
    std::memset(amax.host().data, 0, Size(amax.host().elements() * 4));
    amax.Send();
    Set(domain, std::bit_cast<uint32_t>(90.0f));
    Set(encode, 2.25f);
    codes.Send();
    decoded.Send();
    scale.Send();
    const auto run = [&](Stream& stream, auto on) {
      const WeightScales scales = {.recipe = recipe,
                                   .amax = (amax.*on)(),
                                   .encode = (encode.*on)(),
                                   .domain_amax = (domain.*on)()};
      const int64_t half = layout.rows / 2;
      for (const auto& [first, rows] : {std::pair(int64_t{0}, half), {half, layout.rows - half}}) {
        BlockAmax(stream,
                  {.from = RowsOf((weight.*on)(), first, rows),
                   .first_row = first,
                   .edge = edge,
                   .amax = (amax.*on)(),
                   .epsilon = plan::HasAmaxEpsilon(recipe) ? 0.75f : 0.0f});
      }
      for (const auto& [first, rows] : {std::pair(int64_t{0}, half), {half, layout.rows - half}}) {
        QuantizeWeight(stream,
                       {.from = RowsOf((weight.*on)(), first, rows),
                        .first_row = first,
                        .scales = scales,
                        .codes = RowsOf((codes.*on)(), first, rows)});
      }
      DecodeWeight(stream,
                   {.codes = (codes.*on)(),
                    .scales = scales,
                    .to = (decoded.*on)(),
                    .scale = (scale.*on)()});
    };
    run(cpu_, &TwinMatrix::host);
    run(gpu(), &TwinMatrix::device);
    SCOPED_TRACE(::testing::Message() << "recipe " << static_cast<int>(recipe) << " " << layout.rows
                                      << " x " << layout.columns << " with " << bad);
    EXPECT_TRUE(amax.Same());
    EXPECT_TRUE(codes.Same());
    EXPECT_TRUE(decoded.Same());
    EXPECT_TRUE(scale.Same());
  }
};

TEST_F(GpuWeightTest, GivesTheBitsOfTheCpu) {
  for (const Recipe recipe : kRecipes) {
    for (const Layout& layout : {Layout{130, 258, 0, 0},
                                 Layout{256, 320, 0, 0},
                                 Layout{33, 64, 0, 2},
                                 Layout{300, 20, 0, 0},
                                 Layout{1, 2, 0, 0}}) {
      Compare(recipe, layout, 0.0f);
    }
    Compare(recipe, {130, 264, 0, 0}, std::numeric_limits<float>::quiet_NaN());
    Compare(recipe, {130, 264, 0, 0}, std::numeric_limits<float>::infinity());
  }
}

// The codes that QuantizeActivation decodes, in either order.
TEST_F(GpuQuantizeTest, CodesOfTensorsAreThoseOfTheCpuAndOfDecodedValues) {
  for (const ActivationRole role : {ActivationRole::kInput, ActivationRole::kGradient}) {
    for (const auto& [tokens, columns, gap, bad] :
         {std::tuple(int64_t{144}, int64_t{80}, int64_t{0}, 0.0f),
          std::tuple(int64_t{16}, int64_t{208}, int64_t{4}, 0.0f),
          std::tuple(int64_t{64}, int64_t{64}, int64_t{64}, std::nanf(""))}) {
      for (const float given : {0.0f, 3.5f}) {
        TwinMatrix from(DType::kBF16, tokens, columns, gap);
        TwinMatrix decoded(DType::kBF16, tokens, columns);
        TwinMatrix codes(DType::kU8, tokens, columns);
        TwinMatrix transposed(DType::kU8, columns, tokens);
        TwinMatrix back(DType::kU8, tokens, columns);
        TwinMatrix scale(DType::kF32, 1, 1);
        TwinMatrix encode(DType::kF32, 1, 1);
        TwinMatrix staged(DType::kU32, 1, 1);
        TwinMatrix flag(DType::kU32, 1, 1);
        Fill(from, 21, bad);
        Set(encode, given);
        Set(staged, 5u);
        Set(flag, 0u);
        const auto run = [&](Stream& stream, auto on) {
          const QuantizeCodesArgs args = {.recipe = Recipe::kDelayed,
                                          .role = role,
                                          .from = (from.*on)(),
                                          .codes = (codes.*on)(),
                                          .transposed = (transposed.*on)(),
                                          .scale = (scale.*on)(),
                                          .encode = (encode.*on)(),
                                          .staged = (staged.*on)(),
                                          .non_finite = (flag.*on)()};
          QuantizeCodes(stream, args);
          TransposeCodes(stream, {.from = (transposed.*on)(), .to = (back.*on)()});
        };
        run(cpu_, &TwinMatrix::host);
        run(gpu(), &TwinMatrix::device);
        for (TwinMatrix* made : {&codes, &transposed, &back, &scale, &staged, &flag}) {
          EXPECT_TRUE(made->Same()) << tokens << " x " << columns;
        }
        EXPECT_EQ(std::memcmp(codes.host().data, back.host().data, Size(tokens * columns)), 0);
        EXPECT_EQ(*flag.host().As<uint32_t>() != 0, bad != 0);
        QuantizeActivation(cpu_,
                           {.recipe = Recipe::kDelayed,
                            .role = role,
                            .from = from.host(),
                            .to = decoded.host(),
                            .scale = scale.host(),
                            .encode = encode.host()});
        for (int64_t i = 0; i < tokens * columns; ++i) {
          const uint32_t code = codes.host().As<uint8_t>()[i];
          const float value = role == ActivationRole::kInput ? scalar::E4M3::ValueOfCode(code)
                                                             : scalar::E5M2::ValueOfCode(code);
          const float of_bf16 = Bf16ToFloat(decoded.host().As<uint16_t>()[i]);
          ASSERT_TRUE(value == of_bf16 || (std::isnan(value) && std::isnan(of_bf16))) << i;
        }
      }
    }
  }
}

TEST_F(GpuQuantizeTest, DelayedScalesAreThoseOfTheCpu) {
  constexpr int64_t kDomains = 3;
  for (const int64_t length : {int64_t{1}, int64_t{5}, int64_t{256}, int64_t{1024}}) {
    TwinMatrix histories(DType::kF32, 3 * kDomains, length);
    TwinMatrix scales(DType::kF32, 3 * kDomains, kDelayedWords);
    TwinMatrix weights(DType::kU32, 1, kDomains);
    TwinMatrix activations(DType::kU32, kDomains, 2);
    TwinMatrix apply(DType::kI32, 1, 1);
    Fill(histories, 13);
    Fill(scales, 14);
    scales.host().As<float>()[1] = 0;  // an empty history
    scales.Send();
    for (const float staged : {0.0f, 2000.0f, 1e-40f, std::numeric_limits<float>::infinity()}) {
      for (const int32_t applies : {0, 1, 2}) {
        for (TwinMatrix* amaxes : {&weights, &activations}) {
          const TensorView view = amaxes->host();
          for (int64_t i = 0; i < view.elements(); ++i) {
            view.As<uint32_t>()[i] = i % 3 == 2 ? 0 : std::bit_cast<uint32_t>(staged);
          }
          amaxes->Send();
        }
        Set(apply, std::min(applies, 1));
        const bool loads = applies == 2;
        const auto run = [&](Stream& stream, auto on) {
          UpdateDelayedScales(stream,
                              {.weight_amax = loads ? TensorView() : (weights.*on)(),
                               .activation_amax = loads ? TensorView() : (activations.*on)(),
                               .scales = (scales.*on)(),
                               .histories = (histories.*on)(),
                               .apply = (apply.*on)(),
                               .margin = length % 3,
                               .newest = length == 5 || length == 1024,
                               .ones = length >= 256});
        };
        run(cpu_, &TwinMatrix::host);
        run(gpu(), &TwinMatrix::device);
        EXPECT_TRUE(histories.Same()) << length << " " << staged;
        EXPECT_TRUE(scales.Same()) << length << " " << staged;
        EXPECT_TRUE(activations.Same()) << length << " " << staged;
      }
    }
  }
}

TEST_F(GpuQuantizeTest, LargestWordsOfAnyNumberOfPiecesAreThoseOfTheCpu) {
  constexpr int64_t kWords = 1000;
  for (const int64_t count : {int64_t{1}, int64_t{3}, int64_t{64}, int64_t{65}, int64_t{130}}) {
    TwinMatrix pieces(DType::kU32, count, kWords);
    TwinMatrix out(DType::kU32, 1, kWords);
    const TensorView host = pieces.host();
    std::mt19937 random(static_cast<uint32_t>(InputSeed()));
    for (int64_t i = 0; i < host.elements(); ++i) {
      host.As<uint32_t>()[i] = static_cast<uint32_t>(random());
    }
    pieces.Send();
    bool accumulates = false;
    const auto run = [&](Stream& stream, auto on) {
      LargestWordsArgs args = {.pieces = {}, .out = (out.*on)()};
      for (int64_t i = 0; i < count; ++i) {
        args.pieces.push_back((pieces.*on)().template Row<uint32_t>(i));
      }
      args.accumulates = accumulates;
      LargestWords(stream, args);
    };
    for (const bool of_out : {false, true}) {
      accumulates = of_out;
      std::fill_n(out.host().As<uint32_t>(), kWords, 0xF0000000u);
      out.Send();
      run(cpu_, &TwinMatrix::host);
      run(gpu(), &TwinMatrix::device);
      EXPECT_TRUE(out.Same()) << count;
    }
  }
}

TEST_F(GpuQuantizeTest, FlagsAreCountedOnce) {
  constexpr int64_t kFlags = 700;
  TwinMatrix flags(DType::kU32, 1, kFlags);
  TwinMatrix counts(DType::kU32, kFlags, 2);  // int64
  std::memset(counts.host().data, 0, kFlags * sizeof(int64_t));
  counts.Send();
  for (const int64_t every : {3, 5}) {
    for (int64_t i = 0; i < kFlags; ++i) {
      flags.host().As<uint32_t>()[i] = i % every == 0 ? 9 : 0;
    }
    flags.Send();
    const auto run = [&](Stream& stream, auto on) {
      CountFlags(stream, {.flags = (flags.*on)(), .counts = (counts.*on)().template As<int64_t>()});
    };
    run(cpu_, &TwinMatrix::host);
    run(gpu(), &TwinMatrix::device);
    EXPECT_TRUE(counts.Same());
    EXPECT_TRUE(flags.Same());
  }
  EXPECT_EQ(counts.host().As<int64_t>()[15], 2);
  EXPECT_EQ(counts.host().As<int64_t>()[3], 1);
  EXPECT_EQ(flags.host().As<uint32_t>()[15], 0u);
}

// By cuBLASLt alone.
TEST_F(GpuQuantizeTest, ProductsOfCodesAreThoseOfTheirValues) {
  if (!TheGpu().device->no_cublas().empty()) {
    GTEST_SKIP() << TheGpu().device->no_cublas();
  }
  constexpr int64_t kM = 48;
  constexpr int64_t kN = 32;
  constexpr int64_t kK = 64;
  for (const auto& [a_type, b_type] : {std::pair(DType::kF8E4M3, DType::kF8E4M3),
                                       {DType::kF8E5M2, DType::kF8E4M3},
                                       {DType::kF8E4M3, DType::kF8E5M2}}) {
    for (const DType out : {DType::kF32, DType::kBF16}) {
      TwinMatrix a(a_type, kM, kK, 16);
      TwinMatrix b(b_type, kN, kK);
      TwinMatrix c(out, kM, kN);
      TwinMatrix scale_a(DType::kF32, 1, 1);
      TwinMatrix scale_b(DType::kF32, 1, 1);
      std::mt19937 random(static_cast<uint32_t>(InputSeed()));
      const auto value = [](const TensorView& of, int64_t row, int64_t column) {
        const uint32_t code = of.Row<uint8_t>(row)[column];
        return of.dtype == DType::kF8E5M2 ? scalar::E5M2::ValueOfCode(code)
                                          : scalar::E4M3::ValueOfCode(code);
      };
      for (TwinMatrix* matrix : {&a, &b}) {
        const TensorView view = matrix->host();
        const uint32_t one = view.dtype == DType::kF8E5M2 ? 0x3C : 0x38;
        for (int64_t row = 0; row < view.size[0]; ++row) {
          for (int64_t i = 0; i < kK; ++i) {
            view.Row<uint8_t>(row)[i] =
                static_cast<uint8_t>(one - 8 + random() % 16 + random() % 2 * 0x80);
          }
        }
        matrix->Send();
      }
      std::memset(c.host().data, 0, Size(kM * kN * DTypeBytes(out)));
      c.Send();
      Set(scale_a, 0.375f);
      Set(scale_b, 3.0f);
      Gemm(gpu(),
           {.a = a.device(),
            .b = b.device(),
            .transpose_b = Transpose::kYes,
            .c = c.device(),
            .output = Output::kAccumulate,
            .scale_a = scale_a.device(),
            .scale_b = scale_b.device()});
      const TensorView result = c.Result();
      for (int64_t i = 0; i < kM * kN; ++i) {
        double sum = 0;
        double magnitude = 0;
        for (int64_t k = 0; k < kK; ++k) {
          const double product =
              double{value(a.host(), i / kN, k)} * double{value(b.host(), i % kN, k)};
          sum += product;
          magnitude += std::abs(product);
        }
        const float x =
            out == DType::kBF16 ? Bf16ToFloat(result.As<uint16_t>()[i]) : result.As<float>()[i];
        ASSERT_NEAR(x, 1.125 * sum, 1.125 * magnitude / 1024 + std::abs(1.125 * sum) / 256) << i;
      }
    }
  }
}

// The sums of a gemm have an order of their own on each device, their scale does not.
TEST_F(GpuQuantizeTest, ScaledGemmsAreWithinRoundingOfTheCpu) {
  for (const DType out : {DType::kF32, DType::kBF16}) {
    for (const Output output : {Output::kOverwrite, Output::kAccumulate}) {
      TwinMatrix a(DType::kBF16, 70, 90);
      TwinMatrix b(DType::kBF16, 90, 100);
      TwinMatrix c(out, 70, 100);
      TwinMatrix scale_a(DType::kF32, 1, 1);
      TwinMatrix scale_b(DType::kF32, 1, 1);
      for (TwinMatrix* matrix : {&a, &b, &c}) {
        const TensorView view = matrix->host();
        std::mt19937_64 random(InputSeed());
        std::normal_distribution<float> normal;
        for (int64_t i = 0; i < view.elements(); ++i) {
          if (view.dtype == DType::kBF16) {
            view.As<uint16_t>()[i] = FloatToBf16(normal(random));
          } else {
            view.As<float>()[i] = normal(random);
          }
        }
        matrix->Send();
      }
      Set(scale_a, 0.37f);
      Set(scale_b, 3.0f);
      const auto run = [&](Stream& stream, auto on) {
        Gemm(stream,
             {.a = (a.*on)(),
              .b = (b.*on)(),
              .c = (c.*on)(),
              .output = output,
              .scale_a = (scale_a.*on)(),
              .scale_b = (scale_b.*on)()});
      };
      run(cpu_, &TwinMatrix::host);
      run(gpu(), &TwinMatrix::device);
      const TensorView device = c.Result();
      const TensorView host = c.host();
      for (int64_t i = 0; i < host.elements(); ++i) {
        const float x =
            out == DType::kBF16 ? Bf16ToFloat(device.As<uint16_t>()[i]) : device.As<float>()[i];
        const float y =
            out == DType::kBF16 ? Bf16ToFloat(host.As<uint16_t>()[i]) : host.As<float>()[i];
        ASSERT_NEAR(x, y, out == DType::kBF16 ? 0.25f : 1e-3f) << i;
      }
    }
  }
}

}  // namespace
}  // namespace ravel::kernels::testing
