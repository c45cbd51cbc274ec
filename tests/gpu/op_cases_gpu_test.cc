// The table of op cases (tests/kernels/op_case.h) on the device, in fp32, in bf16, and in bf16 and
// fp16 with gradients of weights in fp32: against the oracle in fp64, gradients against central
// differences, poisoned outputs and gaps, repeated bits. Operands lie in device memory. A failure
// prints the seed of the inputs.

#include <algorithm>
#include <cmath>
#include <cstring>

#include <gtest/gtest.h>

#include "tests/gpu/gpu.h"
#include "tests/kernels/op_case.h"

namespace ravel::kernels::testing {
namespace {

constexpr int64_t kPlaceBytes = int64_t{64} << 20;
constexpr double kTolerance = 1e-5;
// Of bf16, about three times the largest error of some 250 seeds: 0.0083 forward, 0.0145 backward,
// where operands are small and what is rounded on the way cancels (a row of scores, of
// probabilities).
constexpr double kBf16Tolerance = 2.5e-2;
constexpr double kBf16GradientTolerance = 4e-2;
// Three more bits.
constexpr double kFp16Tolerance = kBf16Tolerance / 8;
constexpr double kFp16GradientTolerance = kBf16GradientTolerance / 8;
constexpr size_t kProbes = 24;

class DevicePlace final : public OperandPlace {
 public:
  OperandTypes types() const override { return types_; }
  void UseTypes(const OperandTypes& types) { types_ = types; }
  Stream& stream() override { return *TheGpu().stream; }
  void* Allocate(int64_t bytes) override {
    used_ = RoundUp(used_, 256);
    CHECK_MSG(used_ + bytes <= kPlaceBytes, "a case of more operands than the tests have memory");
    void* data = static_cast<char*>(memory_.device()) + used_;
    used_ += bytes;
    return data;
  }
  char* HostOf(const void* data) override {
    return static_cast<char*>(memory_.host()) + OffsetOf(data);
  }
  void Send(const void* data, int64_t bytes) override { memory_.Send(OffsetOf(data), bytes); }
  void Receive() override { memory_.Receive(used_); }
  void Clear() override {
    memory_.Receive(0);
    used_ = 0;
  }

 private:
  int64_t OffsetOf(const void* data) const {
    return static_cast<const char*>(data) - static_cast<const char*>(memory_.device());
  }
  Mirror memory_{kPlaceBytes};
  int64_t used_ = 0;
  OperandTypes types_;
};

struct GpuCase {
  OpCase op;
  OperandTypes types;

  bool bf16() const { return types.activations == DType::kBF16; }
  bool fp16() const { return types.activations == DType::kF16; }
  double forward_tolerance() const {
    return bf16() ? kBf16Tolerance : fp16() ? kFp16Tolerance : kTolerance;
  }
  double backward_tolerance() const {
    return bf16()   ? kBf16GradientTolerance
           : fp16() ? kFp16GradientTolerance
                    : op.backward_tolerance;
  }
  double Rounded(double value) const {
    const auto narrow = static_cast<float>(value);
    return bf16()   ? static_cast<double>(Bf16ToFloat(FloatToBf16(narrow)))
           : fp16() ? static_cast<double>(Fp16ToFloat(FloatToFp16(narrow)))
                    : value;
  }
};

// Rounded to the type of the operands.
Values Exact(const GpuCase& gpu_case, Values values) {
  for (std::vector<double>& each : values) {
    for (double& value : each) {
      value = gpu_case.Rounded(value);
    }
  }
  return values;
}

class GpuOpCaseTest : public ::testing::TestWithParam<GpuCase> {
 protected:
  void SetUp() override {
    if (!TheGpu().missing.empty()) {
      GTEST_SKIP() << TheGpu().missing;
    }
    static DevicePlace& place = *new DevicePlace;
    place.UseTypes(GetParam().types);
    UseOperandPlace(&place);
  }
  void TearDown() override { UseOperandPlace(nullptr); }

  const OpCase& op() const { return GetParam().op; }
  Values Inputs() const { return Exact(GetParam(), MakeInputs(op(), seed_)); }
  Values Cotangents(const Values& outputs) const {
    Values cotangents;
    for (const std::vector<double>& output : outputs) {
      cotangents.push_back(op().unit_cotangents ? std::vector<double>(output.size(), 1.0)
                                                : RandomValues(static_cast<int64_t>(output.size()),
                                                               seed_ + 100 + cotangents.size()));
    }
    return Exact(GetParam(), cotangents);
  }
  const uint64_t seed_ = InputSeed();
};

double LargestMagnitude(const std::vector<double>& values) {
  double largest = 1.0;
  for (const double value : values) {
    largest = std::max(largest, std::fabs(value));
  }
  return largest;
}

double Contract(const Values& outputs, const Values& cotangents) {
  double sum = 0;
  for (size_t i = 0; i < outputs.size(); ++i) {
    for (size_t j = 0; j < outputs[i].size(); ++j) {
      sum += outputs[i][j] * cotangents[i][j];
    }
  }
  return sum;
}

TEST_P(GpuOpCaseTest, ForwardAgreesWithTheOracle) {
  const Values inputs = Inputs();
  const Values expected = op().oracle(inputs);
  for (const MemoryLayout layout : {MemoryLayout{}, MemoryLayout{3, 5}, MemoryLayout{8, 8}}) {
    Operands operands(layout);
    const Results results = op().forward(operands, inputs);
    ASSERT_EQ(results.size(), expected.size());
    for (size_t i = 0; i < results.size(); ++i) {
      ASSERT_EQ(results[i].size(), expected[i].size());
      const double limit = GetParam().forward_tolerance() * LargestMagnitude(expected[i]);
      for (size_t j = 0; j < results[i].size(); ++j) {
        ASSERT_NEAR(static_cast<double>(results[i][j]), expected[i][j], limit)
            << "output " << i << " element " << j << " seed " << seed_;
      }
    }
    EXPECT_TRUE(operands.GapsUntouched());
  }
}

TEST_P(GpuOpCaseTest, GradientAgreesWithCentralDifferences) {
  if (!op().backward) {
    GTEST_SKIP() << "the op has no gradient";
  }
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
    const double scale = LargestMagnitude({gradient.begin(), gradient.end()});
    const size_t step = std::max<size_t>(1, inputs[i].size() / kProbes);
    for (size_t j = 0; j < inputs[i].size(); j += step) {
      const double saved = inputs[i][j];
      constexpr double kStep = 1e-5;
      inputs[i][j] = saved + kStep;
      const double above = Contract(op().oracle(inputs), cotangents);
      inputs[i][j] = saved - kStep;
      const double below = Contract(op().oracle(inputs), cotangents);
      inputs[i][j] = saved;
      ASSERT_NEAR(static_cast<double>(gradient[j]),
                  (above - below) / (2 * kStep),
                  GetParam().backward_tolerance() * scale)
          << op().inputs[i].name << " element " << j << " seed " << seed_;
    }
  }
}

TEST_P(GpuOpCaseTest, EqualCallsGiveEqualBits) {
  const Values inputs = Inputs();
  const Values cotangents = Cotangents(op().oracle(inputs));
  const auto run = [&] {
    Operands operands(MemoryLayout{});
    Results results = op().forward(operands, inputs);
    if (op().backward) {
      Operands others(MemoryLayout{});
      for (std::vector<float>& gradient : op().backward(others, inputs, cotangents)) {
        results.push_back(std::move(gradient));
      }
    }
    return results;
  };
  const Results first = run();
  const Results second = run();
  for (size_t i = 0; i < first.size(); ++i) {
    ASSERT_EQ(first[i].size(), second[i].size());
    EXPECT_TRUE(first[i].empty() ||
                std::memcmp(first[i].data(), second[i].data(), first[i].size() * 4) == 0)
        << "result " << i << " seed " << seed_;
  }
}

std::vector<GpuCase> CasesOf(const OperandTypes& types) {
  std::vector<GpuCase> cases;
  for (const OpCase& op : AllOpCases()) {
    cases.push_back({op, types});
  }
  return cases;
}

// Without the largest sizes, which cost most on an emulated device: the kernels are those of bf16,
// of another type.
std::vector<GpuCase> Fp16Cases() {
  std::vector<GpuCase> cases = CasesOf({DType::kF16, DType::kF32});
  std::erase_if(cases, [](const GpuCase& tested) {
    const std::string& name = tested.op.name;
    return name.starts_with("Gemm_200x530x600") || name.starts_with("Gemm_1551x530x10") ||
           name.starts_with("Attention_1x200");
  });
  return cases;
}

const auto kNameOfCase = [](const auto& row) { return row.param.op.name; };
INSTANTIATE_TEST_SUITE_P(Table, GpuOpCaseTest, ::testing::ValuesIn(CasesOf({})), kNameOfCase);
INSTANTIATE_TEST_SUITE_P(Bf16,
                         GpuOpCaseTest,
                         ::testing::ValuesIn(CasesOf({DType::kBF16, DType::kBF16})),
                         kNameOfCase);
INSTANTIATE_TEST_SUITE_P(Bf16WithFp32Gradients,
                         GpuOpCaseTest,
                         ::testing::ValuesIn(CasesOf({DType::kBF16, DType::kF32})),
                         kNameOfCase);
INSTANTIATE_TEST_SUITE_P(Fp16WithFp32Gradients,
                         GpuOpCaseTest,
                         ::testing::ValuesIn(Fp16Cases()),
                         kNameOfCase);

}  // namespace
}  // namespace ravel::kernels::testing
