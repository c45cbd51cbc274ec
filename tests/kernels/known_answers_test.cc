// Ops whose bits are promised by formula: known answers, partitions, special values, every SIMD
// path.

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include <gtest/gtest.h>

#include "kernels/activation.h"
#include "kernels/adamw.h"
#include "kernels/cpu/simd_ops.h"
#include "kernels/digest.h"
#include "kernels/gemm.h"
#include "kernels/philox.h"
#include "kernels/row_sum.h"
#include "kernels/scalar/adamw.h"
#include "kernels/scalar/digest.h"
#include "kernels/tree_reduce.h"

namespace ravel::kernels {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

std::vector<float> RandomFloats(size_t n, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(n);
  for (float& value : values) {
    value = normal(random);
  }
  return values;
}

TensorView View(std::vector<float>& values) {
  return VectorView(values.data(), static_cast<int64_t>(values.size()));
}

bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}

// Every test runs on each path of this machine.
class KnownAnswersTest : public ::testing::TestWithParam<cpu::SimdPath> {
 protected:
  void SetUp() override {
    if (!cpu::RunsHere(GetParam())) {
      GTEST_SKIP() << "this processor lacks the instructions";
    }
    cpu::UseSimdPath(GetParam());
  }
  void TearDown() override {
    cpu::UseBestSimdPath();
    cpu::UseBestPageOrder();
  }
  CpuStream stream_;
};

constexpr cpu::PageOrder kPageOrders[] = {cpu::PageOrder::kOneByOne,
                                          cpu::PageOrder::kSeveralAtOnce};

TEST_P(KnownAnswersTest, AdamWFollowsTheSpecifiedBits) {
  struct Bits {
    uint32_t m;
    uint32_t v;
    uint32_t p;
  };
  const float gradients[] = {1e-3f, -2.5e-4f, 3e-5f};
  const auto run = [&](float gradient_scale) {
    // 11 copies, so that whole vectors and the rest are both used.
    std::vector<float> p(11, 0.02f);
    std::vector<float> m(11);
    std::vector<float> v(11);
    std::vector<Bits> history;
    for (int t = 1; t <= 3; ++t) {
      std::vector<float> g(11, gradients[t - 1]);
      const UpdateHyper hyper = {.weight_decay = 0.1, .learning_rate = 1e-3};
      AdamWUpdate(
          stream_,
          {View(p), View(g), View(m), View(v), MakeUpdateScalars(hyper, t, gradient_scale)});
      for (size_t i = 1; i < p.size(); ++i) {
        EXPECT_EQ(p[i], p[0]);
      }
      history.push_back({std::bit_cast<uint32_t>(m[0]),
                         std::bit_cast<uint32_t>(v[0]),
                         std::bit_cast<uint32_t>(p[0])});
    }
    return history;
  };
  const Bits expected[] = {{0x38d1b71b, 0x3356bf99, 0x3c9ba1b7},
                           {0x3888509e, 0x33596ecb, 0x3c97ba17},
                           {0x3880f991, 0x334ec121, 0x3c948307}};
  const std::vector<Bits> history = run(1.0f);
  for (size_t t = 0; t < 3; ++t) {
    EXPECT_EQ(history[t].m, expected[t].m) << "t = " << t + 1;
    EXPECT_EQ(history[t].v, expected[t].v) << "t = " << t + 1;
    EXPECT_EQ(history[t].p, expected[t].p) << "t = " << t + 1;
  }
  const Bits scaled = run(0.75f)[2];
  EXPECT_EQ(scaled.m, 0x38417659u);
  EXPECT_EQ(scaled.v, 0x32e89945u);
  EXPECT_EQ(scaled.p, 0x3c94830au);
}

TEST_P(KnownAnswersTest, AdamWEqualsTheScalarRuleAndLeavesNeighboursAlone) {
  for (const double decay : {0.0, 0.1}) {
    for (const size_t n : {size_t{0}, size_t{1}, size_t{7}, size_t{8}, size_t{1003}}) {
      std::vector<float> p = RandomFloats(n + 1, 1);
      std::vector<float> g = RandomFloats(n + 1, 2);
      std::vector<float> m = RandomFloats(n + 1, 3);
      std::vector<float> v = RandomFloats(n + 1, 4);
      for (float& x : v) {
        x = std::fabs(x) * 1e-3f;
      }
      const std::vector<float> before[] = {p, m, v};
      const UpdateScalars s =
          MakeUpdateScalars({.weight_decay = decay, .learning_rate = 3e-4}, 17, 0.5f);
      const auto count = static_cast<int64_t>(n);
      AdamWUpdate(stream_,
                  {VectorView(p.data(), count),
                   VectorView(g.data(), count),
                   VectorView(m.data(), count),
                   VectorView(v.data(), count),
                   s});
      for (size_t i = 0; i < n; ++i) {
        const auto e = scalar::AdamWStep(s, {before[0][i], before[1][i], before[2][i]}, g[i]);
        ASSERT_EQ(std::bit_cast<uint32_t>(e.p), std::bit_cast<uint32_t>(p[i]));
        ASSERT_EQ(std::bit_cast<uint32_t>(e.m), std::bit_cast<uint32_t>(m[i]));
        ASSERT_EQ(std::bit_cast<uint32_t>(e.v), std::bit_cast<uint32_t>(v[i]));
      }
      EXPECT_EQ(p[n], before[0][n]);
    }
  }
}

// A hundred steps beside the textbook's formulas in double, which share no code with the rule.
// Rounding to fp32 in every step leaves about sqrt(100) / 2^24.
TEST_P(KnownAnswersTest, AHundredStepsOfAdamWAreThoseOfDoubles) {
  constexpr size_t kCount = 1003;
  constexpr double kRate = 1e-3;
  constexpr double kDecay = 0.1;
  const UpdateHyper hyper = {.weight_decay = kDecay, .learning_rate = kRate};
  std::vector<float> p = RandomFloats(kCount, 1);
  std::vector<float> m(kCount);
  std::vector<float> v(kCount);
  std::vector<double> exact_p(p.begin(), p.end());
  std::vector<double> exact_m(kCount);
  std::vector<double> exact_v(kCount);
  // The rule narrows both to fp32, once.
  const double beta1 = static_cast<float>(hyper.beta1);
  const double beta2 = static_cast<float>(hyper.beta2);
  for (int t = 1; t <= 100; ++t) {
    std::vector<float> g = RandomFloats(kCount, static_cast<uint32_t>(100 + t));
    AdamWUpdate(stream_, {View(p), View(g), View(m), View(v), MakeUpdateScalars(hyper, t, 1.0f)});
    for (size_t i = 0; i < kCount; ++i) {
      const double gradient = g[i];
      exact_m[i] += (1 - beta1) * (gradient - exact_m[i]);
      exact_v[i] += (1 - beta2) * (gradient * gradient - exact_v[i]);
      const double mean = exact_m[i] / (1 - std::pow(beta1, t));
      const double square = exact_v[i] / (1 - std::pow(beta2, t));
      exact_p[i] -= kRate * (mean / (std::sqrt(square) + hyper.epsilon) + kDecay * exact_p[i]);
    }
  }
  const auto distance = [](const std::vector<float>& values, const std::vector<double>& exact) {
    double squares = 0;
    double size = 0;
    for (size_t i = 0; i < exact.size(); ++i) {
      squares += (values[i] - exact[i]) * (values[i] - exact[i]);
      size += exact[i] * exact[i];
    }
    return std::sqrt(squares / size);
  };
  EXPECT_LT(distance(p, exact_p), 1e-6);
  EXPECT_LT(distance(m, exact_m), 1e-6);
  EXPECT_LT(distance(v, exact_v), 1e-6);
}

// What batching, sharding and another blocking rest on: an element does not know its neighbours.
TEST_P(KnownAnswersTest, AnElementOfAGemmDependsOnItsRowAndColumnAlone) {
  constexpr int64_t kRows = 40;
  constexpr int64_t kColumns = 70;
  constexpr int64_t kInner = 600;
  std::vector<float> a = RandomFloats(kRows * kInner, 1);
  std::vector<float> b = RandomFloats(kColumns * kInner, 2);
  std::vector<float> all(kRows * kColumns);
  const auto multiply = [&](int64_t row, int64_t rows, int64_t column, int64_t columns, float* c) {
    Gemm(stream_,
         {.a = MatrixView(a.data() + row * kInner, rows, kInner),
          .b = MatrixView(b.data() + column * kInner, columns, kInner),
          .transpose_b = Transpose::kYes,
          .c = MatrixView(c, rows, columns)});
  };
  multiply(0, kRows, 0, kColumns, all.data());
  for (const int64_t rows : {1, 5, 12, 39}) {
    for (const int64_t columns : {1, 16, 31, 69}) {
      std::vector<float> part(static_cast<size_t>(rows * columns));
      const int64_t row = kRows - rows;
      const int64_t column = kColumns - columns;
      multiply(row, rows, column, columns, part.data());
      for (int64_t i = 0; i < rows; ++i) {
        const float* expected = all.data() + (row + i) * kColumns + column;
        ASSERT_EQ(
            std::memcmp(
                part.data() + i * columns, expected, sizeof(float) * static_cast<size_t>(columns)),
            0)
            << rows << " rows, " << columns << " columns, row " << i;
      }
    }
  }
}

TEST_P(KnownAnswersTest, DigestsOfTheFileFormat) {
  std::vector<float> values = {1, 2, 3, 4, 5, 6};
  EXPECT_EQ(DigestRange(stream_, View(values), 0), 0x2ac202f4a66e5c12u);
  std::vector<float> swapped = {4, 5, 6, 1, 2, 3};
  EXPECT_EQ(DigestRange(stream_, View(swapped), 0), 0x1d3112f9261fd8deu);
  uint8_t zeros[4] = {};
  EXPECT_EQ(
      DigestRange(stream_,
                  {.data = zeros, .dtype = DType::kU8, .rank = 1, .size = {4}, .row_stride = 1},
                  0),
      0xb281820ba9362fc2u);
  float three = 3.0f;
  EXPECT_EQ(DigestRange(stream_, {.data = &three}, 0), 0x9f53b53ff713cb15u);
  EXPECT_EQ(DigestRange(stream_, VectorView(nullptr, 0), 0), 0u);
}

TEST_P(KnownAnswersTest, DigestOfPartsAddsUpAtAnyIndex) {
  std::vector<float> values = RandomFloats(1009, 5);
  const uint64_t first = (uint64_t{1} << 40) + 3;
  const uint64_t whole = DigestRange(stream_, View(values), first);
  uint64_t element_by_element = 0;
  for (size_t i = 0; i < values.size(); ++i) {
    element_by_element += scalar::DigestElement(first + i, std::bit_cast<uint32_t>(values[i]));
  }
  EXPECT_EQ(whole, element_by_element);
  std::mt19937 random(6);
  uint64_t parts = 0;
  for (size_t begin = 0; begin < values.size();) {
    const size_t count = std::min<size_t>(random() % 60, values.size() - begin);
    parts += DigestRange(
        stream_, VectorView(values.data() + begin, static_cast<int64_t>(count)), first + begin);
    begin += count;
  }
  EXPECT_EQ(whole, parts);
}

TEST_P(KnownAnswersTest, DigestOfTwoAndEightByteElements) {
  const uint16_t halves[] = {1, 0xFFFF, 7};
  const uint64_t words[] = {1, ~uint64_t{0}, 7};
  uint64_t expected_halves = 0;
  uint64_t expected_words = 0;
  for (uint64_t i = 0; i < 3; ++i) {
    expected_halves += scalar::DigestElement(9 + i, halves[i]);
    expected_words += scalar::DigestElement(9 + i, words[i]);
  }
  const auto view = [](const void* data, DType dtype) {
    return TensorView{
        .data = const_cast<void*>(data), .dtype = dtype, .rank = 1, .size = {3}, .row_stride = 1};
  };
  EXPECT_EQ(DigestRange(stream_, view(halves, DType::kBF16), 9), expected_halves);
  EXPECT_EQ(DigestRange(stream_, view(words, DType::kI64), 9), expected_words);
}

// The definition, strand by strand.
float RowSumOracle(const float* x, size_t n) {
  std::vector<float> strands(128);
  for (size_t i = 0; i < n; ++i) {
    strands[i % 128] = std::fma(x[i], x[i], strands[i % 128]);
  }
  while (strands.size() > 1) {
    std::vector<float> next;
    for (size_t i = 0; i < strands.size(); i += 2) {
      next.push_back(strands[i] + strands[i + 1]);
    }
    strands = next;
  }
  return strands[0];
}

TEST_P(KnownAnswersTest, RowSumsFollowTheStrands) {
  for (const size_t columns : {0u, 1u, 5u, 127u, 128u, 129u, 1000u}) {
    std::vector<float> x = RandomFloats(3 * columns, 7);
    std::vector<float> sums(3, kNan);
    RowSumSquares(
        stream_, {.x = MatrixView(x.data(), 3, static_cast<int64_t>(columns)), .sums = View(sums)});
    for (size_t row = 0; row < 3; ++row) {
      EXPECT_EQ(std::bit_cast<uint32_t>(sums[row]),
                std::bit_cast<uint32_t>(RowSumOracle(x.data() + row * columns, columns)));
    }
  }
}

TEST_P(KnownAnswersTest, RowSumsCountWhatIsNotFinite) {
  std::vector<float> x = RandomFloats(2 * 301, 8);
  x[0] = kNan;
  x[200] = std::numeric_limits<float>::infinity();
  x[300] = -std::numeric_limits<float>::infinity();
  x[601] = -kNan;
  std::vector<float> sums(2);
  int64_t non_finite = 10;
  RowSumSquares(stream_,
                {.x = MatrixView(x.data(), 2, 301), .sums = View(sums), .non_finite = &non_finite});
  EXPECT_EQ(non_finite, 14);
}

float TreeOracle(const std::vector<std::vector<float>>& pieces,
                 size_t begin,
                 size_t end,
                 size_t i) {
  if (end - begin == 1) {
    return pieces[begin][i];
  }
  const size_t middle = (begin + end) / 2;
  return TreeOracle(pieces, begin, middle, i) + TreeOracle(pieces, middle, end, i);
}

TEST_P(KnownAnswersTest, TreeSumsPairNeighbours) {
  for (const size_t n : {1u, 2u, 4u, 8u, 16u, 64u}) {
    for (const size_t elements : {0u, 1u, 77u}) {
      std::vector<std::vector<float>> pieces;
      TreeSumArgs args;
      for (size_t i = 0; i < n; ++i) {
        pieces.push_back(RandomFloats(elements, static_cast<uint32_t>(100 + i)));
      }
      std::vector<std::vector<float>> storage = pieces;
      for (const auto& piece : storage) {
        args.pieces.push_back(piece.data());
      }
      args.out = View(storage[0]);  // in place of the first piece
      TreeSum(stream_, args);
      for (size_t i = 0; i < elements; ++i) {
        ASSERT_EQ(storage[0][i], TreeOracle(pieces, 0, n, i)) << n << " pieces";
      }
    }
  }
}

// Too long for the cache: written around it, whole pages and what is left of them.
TEST_P(KnownAnswersTest, LongSumsOfTwoPiecesAreExactInEveryOrderOfPages) {
  for (const size_t elements : {65536u, 65536u + 5 * 1024 + 77}) {
    const std::vector<float> a = RandomFloats(elements, 21);
    const std::vector<float> b = RandomFloats(elements, 22);
    std::vector<float> expected(elements);
    std::transform(a.begin(), a.end(), b.begin(), expected.begin(), std::plus<>());
    for (const cpu::PageOrder order : kPageOrders) {
      cpu::UsePageOrder(order);
      for (const size_t shift : {0u, 3u}) {
        std::vector<float> sum(elements + 2 * 16, 7.0f);
        TreeSum(stream_,
                {.pieces = {a.data(), b.data()},
                 .out = VectorView(sum.data() + shift, static_cast<int64_t>(elements))});
        EXPECT_TRUE(std::equal(expected.begin(), expected.end(), sum.begin() + shift));
        EXPECT_EQ(std::count(sum.begin(), sum.end(), 7.0f), 2 * 16);
      }
      std::vector<float> over_a = a;
      TreeSum(stream_, {.pieces = {over_a.data(), b.data()}, .out = View(over_a)});
      EXPECT_TRUE(SameBits(over_a, expected));
    }
  }
}

TEST_P(KnownAnswersTest, TreeAddMayWriteOverEitherOperand) {
  std::vector<float> a = RandomFloats(21, 9);
  const std::vector<float> b = RandomFloats(21, 10);
  std::vector<float> sum(21);
  for (size_t i = 0; i < 21; ++i) {
    sum[i] = a[i] + b[i];
  }
  std::vector<float> over_a = a;
  std::vector<float> over_b = b;
  TreeAdd(stream_, {View(over_a), View(over_b), View(over_a)});
  EXPECT_TRUE(SameBits(over_a, sum));
  TreeAdd(stream_, {View(a), View(over_b), View(over_b)});
  EXPECT_TRUE(SameBits(over_b, sum));
}

TEST_P(KnownAnswersTest, AddInPlaceTakesFlatAndStridedOperands) {
  std::vector<float> x = RandomFloats(12, 11);
  std::vector<float> y = RandomFloats(12, 12);
  std::vector<float> expected = y;
  for (size_t i = 0; i < 12; ++i) {
    expected[i] += x[i];
  }
  std::vector<float> flat = y;
  AddInPlace(stream_, {View(x), View(flat)});
  EXPECT_TRUE(SameBits(flat, expected));
  // The middle two columns of a 3 x 4 matrix only.
  AddInPlace(
      stream_,
      {ColumnsOf(MatrixView(x.data(), 3, 4), 1, 2), ColumnsOf(MatrixView(y.data(), 3, 4), 1, 2)});
  EXPECT_EQ(y[1], expected[1]);
  EXPECT_NE(y[0], expected[0]);
}

TEST_P(KnownAnswersTest, CopiesOfAnySizeAndAlignmentAreExact) {
  std::vector<char> source(3 << 20);
  std::mt19937 random(13);
  std::generate(source.begin(), source.end(), [&] { return static_cast<char>(random()); });
  std::vector<char> target(source.size());
  const auto check = [&](int64_t bytes, int64_t shift) {
    std::fill(target.begin(), target.end(), 'x');
    CopyBytes(stream_, {target.data() + shift, source.data() + 3, bytes});
    EXPECT_EQ(std::memcmp(target.data() + shift, source.data() + 3, static_cast<size_t>(bytes)), 0);
    EXPECT_EQ(target[static_cast<size_t>(shift + bytes)], 'x');
    EXPECT_TRUE(shift == 0 || target[static_cast<size_t>(shift - 1)] == 'x');
  };
  for (const cpu::PageOrder order : kPageOrders) {
    cpu::UsePageOrder(order);
    for (const int64_t bytes : {0, 1, 63, 4097, (1 << 20) + 77, (2 << 20)}) {
      for (const int64_t shift : {0, 1, 64, 100}) {
        check(bytes, shift);
      }
    }
  }
}

TEST_P(KnownAnswersTest, ExponentialIsWithinTwoUlpAndSaturates) {
  std::vector<float> x;
  for (int i = 0; i <= 200000; ++i) {
    x.push_back(-87.3f + 175.6f * static_cast<float>(i) / 200000.0f);
  }
  std::vector<float> y(x.size());
  cpu::OpsOf(GetParam()).exp(x.data(), y.data(), static_cast<int64_t>(x.size()));
  for (size_t i = 0; i < x.size(); ++i) {
    const double exact = std::exp(static_cast<double>(x[i]));
    ASSERT_LE(std::fabs(static_cast<double>(y[i]) - exact) / exact, 2 * 0x1p-23) << x[i];
  }
  const float infinity = std::numeric_limits<float>::infinity();
  const std::vector<float> special = {
      0.0f, -infinity, -1000.0f, -87.5f, 100.0f, infinity, kNan, -0.0f};
  std::vector<float> result(special.size());
  cpu::OpsOf(GetParam()).exp(special.data(), result.data(), static_cast<int64_t>(special.size()));
  EXPECT_EQ(result[0], 1.0f);
  EXPECT_EQ(result[1], 0.0f);
  EXPECT_EQ(result[2], 0.0f);
  EXPECT_EQ(result[3], 0.0f);
  EXPECT_GT(result[4], 2e38f);
  EXPECT_EQ(result[4], result[5]);
  EXPECT_TRUE(std::isnan(result[6]));
  EXPECT_EQ(result[7], 1.0f);
}

std::string NameOfPath(const ::testing::TestParamInfo<cpu::SimdPath>& info) {
  switch (info.param) {
    case cpu::SimdPath::kPortable:
      return "Portable";
    case cpu::SimdPath::kAvx2:
      return "Avx2";
    case cpu::SimdPath::kAvx512:
      return "Avx512";
  }
  return "";
}

INSTANTIATE_TEST_SUITE_P(Path,
                         KnownAnswersTest,
                         ::testing::Values(cpu::SimdPath::kPortable,
                                           cpu::SimdPath::kAvx2,
                                           cpu::SimdPath::kAvx512),
                         NameOfPath);

TEST(InitNormalTest, PartsOfATensorEqualTheWhole) {
  CpuStream stream;
  std::vector<float> whole(1001, kNan);
  InitNormal(stream, {.out = View(whole), .seed = 42, .site = 7, .first_index = 5});
  std::mt19937 random(1);
  for (int64_t begin = 0; begin < 1001;) {
    const int64_t count = std::min<int64_t>(1 + static_cast<int64_t>(random() % 9), 1001 - begin);
    std::vector<float> part(static_cast<size_t>(count));
    InitNormal(stream, {.out = View(part), .seed = 42, .site = 7, .first_index = 5 + begin});
    EXPECT_EQ(std::memcmp(part.data(), whole.data() + begin, part.size() * sizeof(float)), 0);
    begin += count;
  }
}

TEST(InitNormalTest, HasTheMomentsOfANormalDistributionAndDependsOnSeedAndSite) {
  CpuStream stream;
  std::vector<float> values(400000);
  InitNormal(stream, {.out = View(values), .seed = 1, .standard_deviation = 0.5f});
  double sum = 0;
  double squares = 0;
  double fourth = 0;
  for (const float value : values) {
    const double x = static_cast<double>(value) / 0.5;
    sum += x;
    squares += x * x;
    fourth += x * x * x * x;
  }
  const double n = static_cast<double>(values.size());
  EXPECT_NEAR(sum / n, 0, 0.01);
  EXPECT_NEAR(squares / n, 1, 0.01);
  EXPECT_NEAR(fourth / n, 3, 0.08);
  std::vector<float> other(8);
  InitNormal(stream, {.out = View(other), .seed = 2, .standard_deviation = 0.5f});
  EXPECT_NE(other[0], values[0]);
  InitNormal(stream, {.out = View(other), .seed = 1, .site = 1, .standard_deviation = 0.5f});
  EXPECT_NE(other[0], values[0]);
}

// The values of a tree over `count` leaves padded with +0 to `width`.
double PaddedTree(const std::vector<double>& values, size_t begin, size_t width) {
  if (width == 1) {
    return begin < values.size() ? values[begin] : 0.0;
  }
  return PaddedTree(values, begin, width / 2) + PaddedTree(values, begin + width / 2, width / 2);
}

TEST(TreeSumDoubleTest, EqualsTheTreeWithMissingRowsAsZero) {
  std::mt19937_64 random(2);
  std::normal_distribution<double> normal;
  for (size_t n = 0; n <= 70; ++n) {
    std::vector<double> values(n);
    std::generate(values.begin(), values.end(), [&] { return normal(random); });
    const double expected = n == 0 ? 0.0 : PaddedTree(values, 0, std::bit_ceil(n));
    EXPECT_EQ(TreeSumDouble(values.data(), static_cast<int64_t>(n)), expected);
  }
}

TEST(AdamWScalarsTest, CorrectionsComeFromPowersInDouble) {
  const UpdateScalars s = MakeUpdateScalars({}, 1000, 0.25f);
  EXPECT_EQ(s.one_minus_beta1, 1.0f - 0.9f);
  EXPECT_EQ(s.inverse_correction1, 1.0f);
  EXPECT_EQ(s.gradient_scale, 0.25f);
  const double beta2 = static_cast<double>(0.95f);
  EXPECT_EQ(MakeUpdateScalars({}, 3, 1.0f).inverse_correction2,
            static_cast<float>(1.0 / (1.0 - beta2 * beta2 * beta2)));
}

}  // namespace
}  // namespace ravel::kernels
