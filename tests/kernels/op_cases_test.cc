// Every row of the op-case table: against its oracle in fp64, its gradient against central
// differences of that oracle, and its bits against other layouts of memory and other SIMD paths.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>

#include <gtest/gtest.h>

#include "kernels/cpu/simd_ops.h"
#include "tests/kernels/op_case.h"

namespace ravel::kernels::testing {
namespace {

constexpr uint64_t kSeed = 20240607;
// Central differences are taken for at most so many elements of an input.
constexpr size_t kProbes = 24;

class OpCaseTest : public ::testing::TestWithParam<OpCase> {
 protected:
  void TearDown() override { cpu::UseBestSimdPath(); }

  Values Cotangents(const Values& outputs) const {
    Values cotangents;
    for (const std::vector<double>& output : outputs) {
      const auto n = static_cast<int64_t>(output.size());
      cotangents.push_back(GetParam().unit_cotangents
                               ? std::vector<double>(output.size(), 1.0)
                               : RandomValues(n, kSeed + 100 + cotangents.size()));
    }
    return cotangents;
  }
};

// The rows whose op has a gradient op.
class OpGradientTest : public OpCaseTest {};

std::vector<OpCase> CasesWithGradient() {
  std::vector<OpCase> cases = AllOpCases();
  std::erase_if(cases, [](const OpCase& c) { return !c.backward; });
  return cases;
}

double LargestMagnitude(const std::vector<double>& values) {
  double largest = 0;
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

void ExpectSameBits(const Results& a, const Results& b, const char* what) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    ASSERT_EQ(a[i].size(), b[i].size());
    EXPECT_EQ(a[i].empty() ? 0 : std::memcmp(a[i].data(), b[i].data(), a[i].size() * sizeof(float)),
              0)
        << what << ", result " << i;
  }
}

TEST_P(OpCaseTest, ForwardAgreesWithTheOracle) {
  const Values inputs = MakeInputs(GetParam(), kSeed);
  const Values expected = GetParam().oracle(inputs);
  Operands operands({.offset = 3, .row_gap = 5});
  const Results results = GetParam().forward(operands, inputs);
  ASSERT_EQ(results.size(), expected.size());
  for (size_t i = 0; i < results.size(); ++i) {
    ASSERT_EQ(results[i].size(), expected[i].size());
    const double limit =
        GetParam().forward_tolerance * std::max(1.0, LargestMagnitude(expected[i]));
    for (size_t j = 0; j < results[i].size(); ++j) {
      ASSERT_NEAR(static_cast<double>(results[i][j]), expected[i][j], limit)
          << "output " << i << " element " << j;
    }
  }
  EXPECT_TRUE(operands.GapsUntouched());
}

TEST_P(OpGradientTest, AgreesWithCentralDifferences) {
  Values inputs = MakeInputs(GetParam(), kSeed);
  const Values cotangents = Cotangents(GetParam().oracle(inputs));
  Operands operands({.offset = 1, .row_gap = 2});
  const Results gradients = GetParam().backward(operands, inputs, cotangents);
  EXPECT_TRUE(operands.GapsUntouched());
  size_t result = 0;
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (GetParam().inputs[i].kind != InputSpec::Kind::kReal) {
      continue;
    }
    const std::vector<float>& gradient = gradients[result++];
    ASSERT_EQ(gradient.size(), inputs[i].size());
    const double scale = LargestMagnitude({gradient.begin(), gradient.end()});
    std::mt19937_64 random(kSeed);
    const size_t step = std::max<size_t>(1, inputs[i].size() / kProbes);
    for (size_t base = 0; base < inputs[i].size(); base += step) {
      const size_t j = std::min(base + random() % step, inputs[i].size() - 1);
      const double saved = inputs[i][j];
      constexpr double kStep = 1e-5;
      inputs[i][j] = saved + kStep;
      const double above = Contract(GetParam().oracle(inputs), cotangents);
      inputs[i][j] = saved - kStep;
      const double below = Contract(GetParam().oracle(inputs), cotangents);
      inputs[i][j] = saved;
      ASSERT_NEAR(static_cast<double>(gradient[j]),
                  (above - below) / (2 * kStep),
                  GetParam().backward_tolerance * std::max(1.0, scale))
          << GetParam().inputs[i].name << " element " << j;
    }
  }
}

TEST_P(OpCaseTest, BitsDoNotDependOnWhereOperandsLie) {
  const Values inputs = MakeInputs(GetParam(), kSeed);
  const Values cotangents = Cotangents(GetParam().oracle(inputs));
  Operands plain({});
  const Results forward = GetParam().forward(plain, inputs);
  const Results backward =
      GetParam().backward ? GetParam().backward(plain, inputs, cotangents) : Results{};
  for (const MemoryLayout layout : {MemoryLayout{},
                                    MemoryLayout{1, 0},
                                    MemoryLayout{5, 0},
                                    MemoryLayout{2, 3},
                                    MemoryLayout{0, 16}}) {
    Operands operands(layout);
    ExpectSameBits(GetParam().forward(operands, inputs), forward, "forward");
    if (GetParam().backward) {
      ExpectSameBits(GetParam().backward(operands, inputs, cotangents), backward, "backward");
    }
  }
}

TEST_P(OpCaseTest, SimdPathsGiveTheSameBits) {
  const Values inputs = MakeInputs(GetParam(), kSeed);
  const Values cotangents = Cotangents(GetParam().oracle(inputs));
  const auto run = [&](cpu::SimdPath path, Results& forward, Results& backward) {
    cpu::UseSimdPath(path);
    Operands operands({.offset = 1, .row_gap = 1});
    forward = GetParam().forward(operands, inputs);
    if (GetParam().backward) {
      backward = GetParam().backward(operands, inputs, cotangents);
    }
  };
  Results forward;
  Results backward;
  run(cpu::SimdPath::kPortable, forward, backward);
  for (const cpu::SimdPath path : {cpu::SimdPath::kAvx2, cpu::SimdPath::kAvx512}) {
    if (cpu::RunsHere(path)) {
      Results other_forward;
      Results other_backward;
      run(path, other_forward, other_backward);
      ExpectSameBits(other_forward, forward, "forward");
      ExpectSameBits(other_backward, backward, "backward");
    }
  }
}

std::string NameOfCase(const ::testing::TestParamInfo<OpCase>& info) {
  return info.param.name;
}

INSTANTIATE_TEST_SUITE_P(Table, OpCaseTest, ::testing::ValuesIn(AllOpCases()), NameOfCase);
INSTANTIATE_TEST_SUITE_P(Table,
                         OpGradientTest,
                         ::testing::ValuesIn(CasesWithGradient()),
                         NameOfCase);

}  // namespace
}  // namespace ravel::kernels::testing
