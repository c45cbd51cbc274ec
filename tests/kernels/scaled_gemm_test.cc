// Gemms whose sums are scaled: exactly the scaled sums of the gemm without scales, on every
// instruction set; and gemms of quantized operands against fp64.

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "common/signed_size.h"
#include "kernels/cpu/simd_ops.h"
#include "kernels/gemm.h"
#include "kernels/quantize.h"
#include "tests/kernels/quantize_oracle.h"

namespace ravel::kernels {
namespace {

using oracle::Matrix;
using oracle::Operand;
using oracle::RandomMatrix;

struct Case {
  int64_t m;
  int64_t n;
  int64_t k;
};
constexpr Case kCases[] = {{1, 1, 1}, {7, 13, 5}, {33, 65, 130}, {50, 40, 1030}, {400, 530, 24}};

float Bf16Of(float x) {
  return Bf16ToFloat(FloatToBf16(x));
}

class ScaledGemm : public ::testing::TestWithParam<cpu::SimdPath> {
 protected:
  void SetUp() override {
    if (!cpu::RunsHere(GetParam())) {
      GTEST_SKIP() << "this processor does not have the path";
    }
    cpu::UseSimdPath(GetParam());
  }
  void TearDown() override { cpu::UseBestSimdPath(); }
  CpuStream stream_;
};
INSTANTIATE_TEST_SUITE_P(Paths,
                         ScaledGemm,
                         ::testing::Values(cpu::SimdPath::kPortable,
                                           cpu::SimdPath::kAvx2,
                                           cpu::SimdPath::kAvx512));

// A matrix in memory as fp32 or bf16.
struct Stored {
  explicit Stored(const Matrix& from, DType dtype) : narrow(from, 3), wide(from) {
    view = dtype == DType::kBF16 ? narrow.view()
                                 : MatrixView(wide.values.data(), from.rows, from.columns);
  }
  Matrix Values() const { return view.dtype == DType::kBF16 ? narrow.values() : wide; }

  Operand narrow;
  Matrix wide;
  TensorView view;
};

TEST_P(ScaledGemm, IsTheScaledSumOfTheGemmWithoutScales) {
  constexpr std::array<std::array<DType, 2>, 3> kTypes = {
      {{DType::kF32, DType::kF32}, {DType::kBF16, DType::kF32}, {DType::kBF16, DType::kBF16}}};
  float scale_a = 1.7f;
  float scale_b = -0.3f;
  for (const Case& size : kCases) {
    for (const auto& [in, out] : kTypes) {
      for (const int flips : {0, 1, 2, 3}) {
        const bool flip_a = (flips & 1) != 0;
        const bool flip_b = (flips & 2) != 0;
        const Stored a(RandomMatrix(flip_a ? size.k : size.m, flip_a ? size.m : size.k, 1), in);
        const Stored b(RandomMatrix(flip_b ? size.n : size.k, flip_b ? size.k : size.n, 2), in);
        const Matrix before = RandomMatrix(size.m, size.n, 3);
        Matrix sums = before;
        GemmArgs args = {.a = a.view,
                         .transpose_a = flip_a ? Transpose::kYes : Transpose::kNo,
                         .b = b.view,
                         .transpose_b = flip_b ? Transpose::kYes : Transpose::kNo,
                         .c = MatrixView(sums.values.data(), size.m, size.n)};
        Gemm(stream_, args);
        for (const Output output : {Output::kOverwrite, Output::kAccumulate}) {
          const Stored c(before, out);
          args.c = c.view;
          args.output = output;
          args.scale_a = VectorView(&scale_a, 1);
          args.scale_b = VectorView(&scale_b, 1);
          Gemm(stream_, args);
          args.scale_a = args.scale_b = {};
          const Matrix result = c.Values();
          for (size_t i = 0; i < result.values.size(); ++i) {
            const float scaled = sums.values[i] * (scale_a * scale_b);
            const float sum = output == Output::kAccumulate ? before.values[i] + scaled : scaled;
            ASSERT_EQ(result.values[i], out == DType::kBF16 ? Bf16Of(sum) : sum)
                << size.m << " " << size.n << " " << size.k << " flips " << flips << " at " << i;
          }
        }
      }
    }
  }
}

TEST_P(ScaledGemm, OneScaleIsEnough) {
  const Stored a(RandomMatrix(9, 21, 1), DType::kBF16);
  const Stored b(RandomMatrix(21, 17, 2), DType::kBF16);
  float scale = 0.25f;
  const auto run = [&](const TensorView& scale_a, const TensorView& scale_b) {
    std::vector<float> c(9 * 17);
    Gemm(stream_,
         {.a = a.view,
          .b = b.view,
          .c = MatrixView(c.data(), 9, 17),
          .scale_a = scale_a,
          .scale_b = scale_b});
    return c;
  };
  std::vector<float> expected = run({}, {});
  std::transform(
      expected.begin(), expected.end(), expected.begin(), [](float x) { return 0.25f * x; });
  EXPECT_EQ(run(VectorView(&scale, 1), {}), expected);
  EXPECT_EQ(run({}, VectorView(&scale, 1)), expected);
}

// ---- Quantized operands.

struct QuantizedOperand {
  Matrix values;
  float scale = 0;
};
QuantizedOperand QuantizedOf(const Matrix& x,
                             plan::Recipe recipe,
                             ActivationRole role,
                             BlocksAlong along) {
  CpuStream stream;
  QuantizedOperand result;
  const Operand operand(x);
  QuantizeActivationArgs args;
  args.recipe = recipe;
  args.role = role;
  args.along = along;
  args.from = operand.view();
  args.to = operand.view();
  args.scale = VectorView(&result.scale, 1);
  args.draws = {.seed = 3, .sequence_tokens = x.rows};
  QuantizeActivation(stream, args);
  result.values = operand.values();
  return result;
}

// The weight gradient dw [n, k] = dy^T x sums over tokens, so blocks lie along rows.
std::vector<float> WeightGradient(const QuantizedOperand& dy, const QuantizedOperand& x) {
  CpuStream stream;
  const Operand a(dy.values);
  const Operand b(x.values);
  float scale_a = dy.scale;
  float scale_b = x.scale;
  std::vector<float> dw(Size(dy.values.columns * x.values.columns));
  Gemm(stream,
       {.a = a.view(),
        .transpose_a = Transpose::kYes,
        .b = b.view(),
        .c = MatrixView(dw.data(), dy.values.columns, x.values.columns),
        .scale_a = VectorView(&scale_a, 1),
        .scale_b = VectorView(&scale_b, 1)});
  return dw;
}

// At (i, j): the sum over tokens of dy * x in fp64, and that of their magnitudes.
std::array<double, 2> Exact(const Matrix& dy, const Matrix& x, int64_t i, int64_t j) {
  double sum = 0;
  double magnitude = 0;
  for (int64_t token = 0; token < x.rows; ++token) {
    const double term = static_cast<double>(dy.at(token, i)) * static_cast<double>(x.at(token, j));
    sum += term;
    magnitude += std::fabs(term);
  }
  return {sum, magnitude};
}

TEST(QuantizedGemm, IsTheGemmOfTheDecodedOperands) {
  const Matrix dy = RandomMatrix(320, 48, 5);
  const Matrix x = RandomMatrix(320, 64, 6);
  for (const plan::Recipe recipe : oracle::kRecipes) {
    const QuantizedOperand left =
        QuantizedOf(dy, recipe, ActivationRole::kGradient, BlocksAlong::kRows);
    const QuantizedOperand right =
        QuantizedOf(x, recipe, ActivationRole::kInput, BlocksAlong::kRows);
    const double scale = static_cast<double>(left.scale) * static_cast<double>(right.scale);
    const std::vector<float> dw = WeightGradient(left, right);
    for (int64_t i = 0; i < dy.columns; ++i) {
      for (int64_t j = 0; j < x.columns; ++j) {
        const auto [sum, magnitude] = Exact(left.values, right.values, i, j);
        ASSERT_NEAR(static_cast<double>(dw[Size(i * x.columns + j)]),
                    sum * scale,
                    std::ldexp(magnitude * scale, -12))
            << static_cast<int>(recipe);
      }
    }
  }
}

// Both operands of NVFP4 are transformed over tokens, which leaves their product as it is: what
// differs from the exact one is rounding, at most a quarter of a value each.
TEST(QuantizedGemm, TheTransformOfBothOperandsLeavesTheProduct) {
  std::vector<Matrix> operands = {RandomMatrix(128, 24, 7), RandomMatrix(128, 40, 8)};
  for (Matrix& operand : operands) {
    for (float& value : operand.values) {
      value = std::clamp(value, -1.0f, 1.0f);
    }
  }
  // Without rounding to codes: the transform of the oracle, and the gemm.
  const QuantizedOperand dy = {oracle::HadamardOf(operands[0]), 1.0f};
  const QuantizedOperand x = {oracle::HadamardOf(operands[1]), 1.0f};
  const std::vector<float> transformed = WeightGradient(dy, x);
  const std::vector<float> coded = WeightGradient(
      QuantizedOf(operands[0], plan::Recipe::kNvFp4, ActivationRole::kGradient, BlocksAlong::kRows),
      QuantizedOf(operands[1], plan::Recipe::kNvFp4, ActivationRole::kInput, BlocksAlong::kRows));
  double error = 0;
  double size = 0;
  for (int64_t i = 0; i < operands[0].columns; ++i) {
    for (int64_t j = 0; j < operands[1].columns; ++j) {
      const auto [sum, magnitude] = Exact(operands[0], operands[1], i, j);
      const size_t at = Size(i * operands[1].columns + j);
      // Two roundings to bf16 in each term, of values up to four times as large.
      EXPECT_NEAR(static_cast<double>(transformed[at]), sum, std::ldexp(magnitude + 1, -6));
      const double difference = static_cast<double>(coded[at]) - sum;
      error += difference * difference;
      size += sum * sum;
    }
  }
  EXPECT_LT(std::sqrt(error / size), 0.3);
}

}  // namespace
}  // namespace ravel::kernels
