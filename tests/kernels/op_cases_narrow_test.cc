// The table of op cases on the CPU in bf16 and in fp16: operands of that type, gradients of weights
// of fp32, against the oracle in fp64 and its central differences within one rounding of the
// result, and equal bits on every SIMD path and wherever operands lie. Then with gradients of
// weights of bf16.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <vector>

#include <gtest/gtest.h>

#include "kernels/activation.h"
#include "kernels/bias.h"
#include "kernels/cpu/simd_ops.h"
#include "kernels/gemm.h"
#include "tests/kernels/op_case.h"
#include "tests/testing/sanitizer.h"

namespace ravel::kernels::testing {
namespace {

constexpr uint64_t kNarrowSeed = 20240607;
constexpr size_t kNarrowProbes = 24;

// Operands on the heap.
class HeapPlace final : public OperandPlace {
 public:
  explicit HeapPlace(const OperandTypes& types) : types_(types) {}
  OperandTypes types() const override { return types_; }
  Stream& stream() override { return stream_; }
  void* Allocate(int64_t bytes) override {
    constexpr int64_t kWord = sizeof(uint64_t);
    const auto words = static_cast<size_t>(DivCeil(bytes, kWord));
    return blocks_.emplace_back(std::make_unique<uint64_t[]>(words)).get();
  }
  char* HostOf(const void* data) override {
    return const_cast<char*>(static_cast<const char*>(data));
  }
  void Send(const void*, int64_t) override {}
  void Receive() override {}
  void Clear() override { blocks_.clear(); }

 private:
  const OperandTypes types_;
  CpuStream stream_;
  std::vector<std::unique_ptr<uint64_t[]>> blocks_;
};

struct NarrowCase {
  OpCase op;
  OperandTypes types;

  bool fp16() const { return types.activations == DType::kF16; }
  // A value of eight significant bits, or of eleven, is off by at most this part of it.
  double rounding() const { return fp16() ? 0x1p-11 : 0x1p-8; }
  // Besides, where an op reads again what it has rounded (a residual sum, attention's output,
  // logits), relative to the largest magnitude.
  double rounded_within() const { return fp16() ? 2.5e-3 : 2e-2; }

  bool rounds_within() const {
    const auto named = [&](const char* name) { return op.name.starts_with(name); };
    return named("LinearCrossEntropy") || named("Attention") ||
           (named("RmsNorm") && op.name.ends_with("_residual"));
  }
};

Values Rounded(const NarrowCase& tested, Values values) {
  for (std::vector<double>& each : values) {
    for (double& value : each) {
      const float wide = static_cast<float>(value);
      value = static_cast<double>(tested.fp16() ? Fp16ToFloat(FloatToFp16(wide))
                                                : Bf16ToFloat(FloatToBf16(wide)));
    }
  }
  return values;
}

double LargestOf(const std::vector<double>& values) {
  double largest = 1.0;
  for (const double value : values) {
    largest = std::max(largest, std::fabs(value));
  }
  return largest;
}

double WeightedSum(const Values& outputs, const Values& cotangents) {
  double sum = 0;
  for (size_t i = 0; i < outputs.size(); ++i) {
    for (size_t j = 0; j < outputs[i].size(); ++j) {
      sum += outputs[i][j] * cotangents[i][j];
    }
  }
  return sum;
}

class NarrowOpCaseTest : public ::testing::TestWithParam<NarrowCase> {
 protected:
  NarrowOpCaseTest() : place_(GetParam().types) { UseOperandPlace(&place_); }
  ~NarrowOpCaseTest() override {
    UseOperandPlace(nullptr);
    cpu::UseBestSimdPath();
  }

  const OpCase& op() const { return GetParam().op; }
  // Ids are small enough to be exact.
  Values Inputs() const { return Rounded(GetParam(), MakeInputs(op(), kNarrowSeed)); }
  Values Cotangents(const Values& outputs) const {
    Values cotangents;
    for (const std::vector<double>& output : outputs) {
      cotangents.push_back(op().unit_cotangents
                               ? std::vector<double>(output.size(), 1.0)
                               : RandomValues(static_cast<int64_t>(output.size()),
                                              kNarrowSeed + 100 + cotangents.size()));
    }
    return Rounded(GetParam(), std::move(cotangents));
  }
  // How far a result may be from `expected`, one of values up to `largest`.
  double Limit(double expected, double largest, double noise) const {
    const NarrowCase& tested = GetParam();
    return tested.rounding() * std::fabs(expected) +
           (tested.rounds_within() ? tested.rounded_within() : noise) * largest;
  }
  // Results of both directions.
  Results Run(const MemoryLayout& layout, const Values& inputs, const Values& cotangents) const {
    Operands operands(layout);
    Results results = op().forward(operands, inputs);
    EXPECT_TRUE(operands.GapsUntouched());
    if (op().backward) {
      Operands others(layout);
      for (std::vector<float>& gradient : op().backward(others, inputs, cotangents)) {
        results.push_back(std::move(gradient));
      }
      EXPECT_TRUE(others.GapsUntouched());
    }
    return results;
  }

 private:
  HeapPlace place_;
};

void ExpectEqualResults(const Results& a, const Results& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    ASSERT_EQ(a[i].size(), b[i].size());
    EXPECT_TRUE(a[i].empty() ||
                std::memcmp(a[i].data(), b[i].data(), a[i].size() * sizeof(float)) == 0)
        << "result " << i;
  }
}

TEST_P(NarrowOpCaseTest, ForwardIsTheOracleRoundedOnce) {
  const Values inputs = Inputs();
  const Values expected = op().oracle(inputs);
  Operands operands({.offset = 3, .row_gap = 5});
  const Results results = op().forward(operands, inputs);
  ASSERT_EQ(results.size(), expected.size());
  for (size_t i = 0; i < results.size(); ++i) {
    ASSERT_EQ(results[i].size(), expected[i].size());
    const double largest = LargestOf(expected[i]);
    for (size_t j = 0; j < results[i].size(); ++j) {
      ASSERT_NEAR(static_cast<double>(results[i][j]),
                  expected[i][j],
                  Limit(expected[i][j], largest, op().forward_tolerance))
          << "output " << i << " element " << j;
    }
  }
  EXPECT_TRUE(operands.GapsUntouched());
}

// The rows whose op has a gradient op.
class NarrowGradientTest : public NarrowOpCaseTest {};

TEST_P(NarrowGradientTest, IsTheCentralDifferenceRoundedOnce) {
  Values inputs = Inputs();
  const Values cotangents = Cotangents(op().oracle(inputs));
  Operands operands({.offset = 1, .row_gap = 2});
  const Results gradients = op().backward(operands, inputs, cotangents);
  EXPECT_TRUE(operands.GapsUntouched());
  size_t result = 0;
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (op().inputs[i].kind != InputSpec::Kind::kReal) {
      continue;
    }
    const std::vector<float>& gradient = gradients[result++];
    ASSERT_EQ(gradient.size(), inputs[i].size());
    const double largest = LargestOf({gradient.begin(), gradient.end()});
    const size_t step = std::max<size_t>(1, inputs[i].size() / kNarrowProbes);
    for (size_t j = 0; j < inputs[i].size(); j += step) {
      const double saved = inputs[i][j];
      constexpr double kStep = 1e-5;
      inputs[i][j] = saved + kStep;
      const double above = WeightedSum(op().oracle(inputs), cotangents);
      inputs[i][j] = saved - kStep;
      const double below = WeightedSum(op().oracle(inputs), cotangents);
      inputs[i][j] = saved;
      const double expected = (above - below) / (2 * kStep);
      ASSERT_NEAR(static_cast<double>(gradient[j]),
                  expected,
                  Limit(expected, largest, op().backward_tolerance))
          << op().inputs[i].name << " element " << j;
    }
  }
}

TEST_P(NarrowOpCaseTest, BitsDependNeitherOnTheSimdPathNorOnWhereOperandsLie) {
  const Values inputs = Inputs();
  const Values cotangents = Cotangents(op().oracle(inputs));
  cpu::UseSimdPath(cpu::SimdPath::kPortable);
  const Results expected = Run({}, inputs, cotangents);
  for (const cpu::SimdPath path :
       {cpu::SimdPath::kPortable, cpu::SimdPath::kAvx2, cpu::SimdPath::kAvx512}) {
    if (!cpu::RunsHere(path)) {
      continue;
    }
    cpu::UseSimdPath(path);
    for (const MemoryLayout layout : {MemoryLayout{2, 3}, MemoryLayout{1, 0}, MemoryLayout{}}) {
      ExpectEqualResults(Run(layout, inputs, cotangents), expected);
      if (ravel::testing::kSanitized) {
        break;  // one that is aligned to nothing
      }
    }
  }
}

std::vector<NarrowCase> CasesOf(DType activations) {
  std::vector<NarrowCase> cases;
  for (const OpCase& op : AllOpCases()) {
    cases.push_back({op, {.activations = activations, .gradients = DType::kF32}});
  }
  return cases;
}

std::vector<NarrowCase> WithGradient(std::vector<NarrowCase> cases) {
  std::erase_if(cases, [](const NarrowCase& c) { return !c.op.backward; });
  return cases;
}

// Gradients of weights in bf16, too, where ops write them so: tables and their heads do not.
std::vector<NarrowCase> CasesToBf16() {
  std::vector<NarrowCase> cases;
  for (const OpCase& op : AllOpCases()) {
    const auto named = [&](const char* name) { return op.name.starts_with(name); };
    if (!named("Embedding") && !named("AddPositions") && !named("LinearCrossEntropy")) {
      cases.push_back({op, {.activations = DType::kBF16, .gradients = DType::kBF16}});
    }
  }
  return cases;
}

const auto kNameOfCase = [](const auto& row) { return row.param.op.name; };
INSTANTIATE_TEST_SUITE_P(Bf16,
                         NarrowOpCaseTest,
                         ::testing::ValuesIn(CasesOf(DType::kBF16)),
                         kNameOfCase);
INSTANTIATE_TEST_SUITE_P(Bf16,
                         NarrowGradientTest,
                         ::testing::ValuesIn(WithGradient(CasesOf(DType::kBF16))),
                         kNameOfCase);
INSTANTIATE_TEST_SUITE_P(ToBf16, NarrowOpCaseTest, ::testing::ValuesIn(CasesToBf16()), kNameOfCase);
INSTANTIATE_TEST_SUITE_P(ToBf16,
                         NarrowGradientTest,
                         ::testing::ValuesIn(WithGradient(CasesToBf16())),
                         kNameOfCase);
INSTANTIATE_TEST_SUITE_P(Fp16,
                         NarrowOpCaseTest,
                         ::testing::ValuesIn(CasesOf(DType::kF16)),
                         kNameOfCase);
INSTANTIATE_TEST_SUITE_P(Fp16,
                         NarrowGradientTest,
                         ::testing::ValuesIn(WithGradient(CasesOf(DType::kF16))),
                         kNameOfCase);

TEST(NarrowOperands, OfTwoTypesAreRefused) {
  CpuStream stream;
  std::vector<float> memory(64);
  const TensorView wide = MatrixView(memory.data(), 4, 4);
  TensorView narrow = wide;
  narrow.dtype = DType::kBF16;
  EXPECT_DEATH(Gemm(stream, {.a = narrow, .b = wide, .c = wide}), "wrong element type");
  EXPECT_DEATH(Gemm(stream, {.a = wide, .b = wide, .c = narrow}), "a gemm of fp32 is fp32");
  EXPECT_DEATH(AddInPlace(stream, {.x = narrow, .y = wide}), "wrong element type");
  TensorView fp16 = narrow;
  fp16.dtype = DType::kF16;
  EXPECT_DEATH(Gemm(stream, {.a = narrow, .b = narrow, .c = fp16}), "wrong element type");
  EXPECT_DEATH(Gemm(stream, {.a = fp16, .b = narrow, .c = wide}), "wrong element type");
  EXPECT_DEATH(AddInPlace(stream, {.x = fp16, .y = narrow}), "wrong element type");
  EXPECT_DEATH(SwiGluForward(stream, {.gate = narrow, .up = narrow, .y = wide}),
               "wrong element type");
  TensorView db = narrow;
  db.rank = 1;
  db.size = {4};
  EXPECT_DEATH(BiasGradient(stream, {.dy = wide, .db = db}), "wrong element type");
}

}  // namespace
}  // namespace ravel::kernels::testing
