// The reference of the probe of gemms of codes: what it takes and what it names.

#include "worker/trainer/gemm_probe.h"

#include <limits>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace ravel::trainer {
namespace {

using ::testing::HasSubstr;

float ValueOf(DType type, uint8_t code) {
  return type == DType::kF8E4M3 ? Fp8E4M3ToFloat(code)
                                : Fp16ToFloat(static_cast<uint16_t>(code << 8));
}

std::vector<float> Exact(const ProbeCase& probe, const ProbeOperands& operands) {
  std::vector<float> result;
  for (int64_t i = 0; i < kProbeRows * kProbeColumns; ++i) {
    float sum = 0;
    for (int64_t k = 0; k < kProbeInner; ++k) {
      sum +=
          ValueOf(probe.a, operands.a[static_cast<size_t>(i / kProbeColumns * kProbeInner + k)]) *
          ValueOf(probe.b, operands.b[static_cast<size_t>(i % kProbeColumns * kProbeInner + k)]);
    }
    result.push_back(operands.scale_a * operands.scale_b * sum +
                     (probe.accumulates ? operands.c[static_cast<size_t>(i)] : 0.0f));
  }
  return result;
}

std::vector<ProbeCase> AllCases() {
  return ProbeCases(plan::GemmPath::kFp8Tensor, plan::FastAccumulation::kForward);
}

TEST(GemmProbe, SumsAreFastAsThePlanSays) {
  using plan::FastAccumulation;
  const auto fast_of = [](FastAccumulation fast) {
    std::vector<bool> out;
    for (const ProbeCase& probe : ProbeCases(plan::GemmPath::kFp8Tensor, fast)) {
      out.push_back(probe.fast);
    }
    return out;
  };
  EXPECT_EQ(fast_of(FastAccumulation::kNone), (std::vector<bool>{false, false, false, false}));
  EXPECT_EQ(fast_of(FastAccumulation::kForward), (std::vector<bool>{true, false, false, false}));
  EXPECT_EQ(fast_of(FastAccumulation::kForwardAndInputGradient),
            (std::vector<bool>{true, true, false, false}));
  EXPECT_TRUE(ProbeCases(plan::GemmPath::kDequantBf16, FastAccumulation::kForward).empty());
}

TEST(GemmProbe, TakesWhatIsRightAndNamesWhatIsNot) {
  for (const ProbeCase& probe : AllCases()) {
    const ProbeOperands operands = OperandsOf(probe);
    std::vector<float> result = Exact(probe, operands);
    EXPECT_TRUE(CheckProbe(probe, operands, result).ok()) << probe.name;
    for (const float wrong :
         {result[70] + 40.0f, 0.0f * result[70] + 1e6f, std::numeric_limits<float>::quiet_NaN()}) {
      std::vector<float> changed = result;
      changed[70] = wrong;
      const std::string text(CheckProbe(probe, operands, changed).message());
      EXPECT_THAT(text, HasSubstr(probe.name));
      EXPECT_THAT(text, HasSubstr("element [2, 6]"));
    }
  }
}

// A scale that is left out, and operands in the other order, are far from the reference.
TEST(GemmProbe, TellsScalesAndOperandsApart) {
  for (const ProbeCase& probe : AllCases()) {
    const ProbeOperands operands = OperandsOf(probe);
    ProbeOperands other = operands;
    other.scale_a = 1;
    EXPECT_FALSE(CheckProbe(probe, operands, Exact(probe, other)).ok());
    other = operands;
    other.scale_b = 1;
    EXPECT_FALSE(CheckProbe(probe, operands, Exact(probe, other)).ok());
    ProbeCase swapped = probe;
    swapped.a = probe.a == DType::kF8E4M3 ? DType::kF8E5M2 : DType::kF8E4M3;
    EXPECT_FALSE(CheckProbe(probe, operands, Exact(swapped, operands)).ok());
  }
}

}  // namespace
}  // namespace ravel::trainer
