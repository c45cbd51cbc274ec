// The table of op cases (tests/kernels/op_case.h) on the device, in fp32: against the oracle in
// fp64, gradients against central differences, poisoned outputs and gaps, repeated bits. Operands
// lie in pinned memory that the device reads and writes in place. Inputs differ from run to run; a
// failure prints the seed.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>

#include <gtest/gtest.h>

#include "tests/gpu/gpu.h"
#include "tests/kernels/op_case.h"

namespace ravel::kernels::testing {
namespace {

constexpr int64_t kPlaceBytes = int64_t{64} << 20;
constexpr double kTolerance = 1e-5;
constexpr size_t kProbes = 24;

class PinnedPlace final : public OperandPlace {
 public:
  explicit PinnedPlace(CudaMemory memory) : memory_(std::move(memory)) {}
  Stream& stream() override { return *TheGpu().stream; }
  void* Allocate(int64_t bytes) override {
    used_ = RoundUp(used_, 256);
    CHECK_MSG(used_ + bytes <= kPlaceBytes, "a case of more operands than the tests have memory");
    void* data = static_cast<char*>(memory_.data()) + used_;
    used_ += bytes;
    return data;
  }
  void Clear() override { used_ = 0; }
  void Finish() override {
    const absl::Status status = TheGpu().stream->Synchronize();
    CHECK_MSG(status.ok(), std::string(status.message()).c_str());
  }

 private:
  CudaMemory memory_;
  int64_t used_ = 0;
};

class GpuOpCaseTest : public ::testing::TestWithParam<OpCase> {
 protected:
  void SetUp() override {
    if (!TheGpu().missing.empty()) {
      GTEST_SKIP() << TheGpu().missing;
    }
    static PinnedPlace& place = *new PinnedPlace(*TheGpu().device->AllocatePinned(kPlaceBytes));
    UseOperandPlace(&place);
    seed_ = std::random_device()();
    RecordProperty("seed", std::to_string(seed_));
  }
  void TearDown() override { UseOperandPlace(nullptr); }

  Values Cotangents(const Values& outputs) const {
    Values cotangents;
    for (const std::vector<double>& output : outputs) {
      cotangents.push_back(
          GetParam().unit_cotangents
              ? std::vector<double>(output.size(), 1.0)
              : RandomValues(static_cast<int64_t>(output.size()), seed_ + 100 + cotangents.size()));
    }
    return cotangents;
  }
  uint64_t seed_ = 0;
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
  const Values inputs = MakeInputs(GetParam(), seed_);
  const Values expected = GetParam().oracle(inputs);
  for (const MemoryLayout layout : {MemoryLayout{}, MemoryLayout{3, 5}, MemoryLayout{4, 4}}) {
    Operands operands(layout);
    const Results results = GetParam().forward(operands, inputs);
    ASSERT_EQ(results.size(), expected.size());
    for (size_t i = 0; i < results.size(); ++i) {
      ASSERT_EQ(results[i].size(), expected[i].size());
      const double limit = kTolerance * LargestMagnitude(expected[i]);
      for (size_t j = 0; j < results[i].size(); ++j) {
        ASSERT_NEAR(static_cast<double>(results[i][j]), expected[i][j], limit)
            << "output " << i << " element " << j << " seed " << seed_;
      }
    }
    EXPECT_TRUE(operands.GapsUntouched());
  }
}

TEST_P(GpuOpCaseTest, GradientAgreesWithCentralDifferences) {
  if (!GetParam().backward) {
    GTEST_SKIP() << "the op has no gradient";
  }
  Values inputs = MakeInputs(GetParam(), seed_);
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
    const size_t step = std::max<size_t>(1, inputs[i].size() / kProbes);
    for (size_t j = 0; j < inputs[i].size(); j += step) {
      const double saved = inputs[i][j];
      constexpr double kStep = 1e-5;
      inputs[i][j] = saved + kStep;
      const double above = Contract(GetParam().oracle(inputs), cotangents);
      inputs[i][j] = saved - kStep;
      const double below = Contract(GetParam().oracle(inputs), cotangents);
      inputs[i][j] = saved;
      ASSERT_NEAR(static_cast<double>(gradient[j]),
                  (above - below) / (2 * kStep),
                  GetParam().backward_tolerance * scale)
          << GetParam().inputs[i].name << " element " << j << " seed " << seed_;
    }
  }
}

TEST_P(GpuOpCaseTest, EqualCallsGiveEqualBits) {
  const Values inputs = MakeInputs(GetParam(), seed_);
  const Values cotangents = Cotangents(GetParam().oracle(inputs));
  const auto run = [&] {
    Operands operands(MemoryLayout{});
    Results results = GetParam().forward(operands, inputs);
    if (GetParam().backward) {
      Operands others(MemoryLayout{});
      for (std::vector<float>& gradient : GetParam().backward(others, inputs, cotangents)) {
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

INSTANTIATE_TEST_SUITE_P(Table,
                         GpuOpCaseTest,
                         ::testing::ValuesIn(AllOpCases()),
                         [](const auto& row) { return row.param.name; });

}  // namespace
}  // namespace ravel::kernels::testing
