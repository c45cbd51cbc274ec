// The reference of the probe of gemms of codes: what it takes and what it names.

#include "worker/trainer/gemm_probe.h"

#include <algorithm>
#include <limits>
#include <string>
#include <vector>

#include <absl/strings/str_cat.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace ravel::trainer {
namespace {

using ::testing::HasSubstr;

float ValueOf(DType type, const std::vector<uint8_t>& codes, int64_t at) {
  if (type == DType::kU8) {
    constexpr float kMagnitudes[] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
    const uint32_t byte = codes[static_cast<size_t>(at / 2)];
    const uint32_t code = at % 2 == 0 ? byte % 16 : byte / 16;
    return (code >= 8 ? -1.0f : 1.0f) * kMagnitudes[code % 8];
  }
  const uint8_t code = codes[static_cast<size_t>(at)];
  return type == DType::kF8E4M3 ? Fp8E4M3ToFloat(code)
                                : Fp16ToFloat(static_cast<uint16_t>(code << 8));
}

float ScaleAt(
    const std::vector<float>& scales, ScaleForm form, int64_t inner, int64_t row, int64_t i) {
  return form == ScaleForm::kTensor
             ? scales[0]
             : scales[static_cast<size_t>(row * ScaleBlocks(form, inner) + i / CodesOfScale(form))];
}

std::vector<float> Exact(const ProbeCase& probe, const ProbeOperands& operands) {
  std::vector<float> result;
  for (int64_t i = 0; i < probe.rows * probe.columns; ++i) {
    const int64_t row = i / probe.columns;
    const int64_t column = i % probe.columns;
    double sum = 0;
    for (int64_t k = 0; k < probe.inner; ++k) {
      sum += double{operands.whole_a} * double{operands.whole_b} *
             double{ValueOf(probe.a, operands.a, row * probe.inner + k)} *
             double{ScaleAt(operands.scale_a, probe.form_a, probe.inner, row, k)} *
             double{ValueOf(probe.b, operands.b, column * probe.inner + k)} *
             double{ScaleAt(operands.scale_b, probe.form_b, probe.inner, column, k)};
    }
    result.push_back(static_cast<float>(sum) +
                     (probe.accumulates ? operands.c[static_cast<size_t>(i)] : 0.0f));
  }
  return result;
}

std::vector<ProbeCase> AllCases() {
  std::vector<ProbeCase> all;
  for (const plan::GemmPath path : {plan::GemmPath::kFp8Tensor,
                                    plan::GemmPath::kFp8Block,
                                    plan::GemmPath::kMxFp8,
                                    plan::GemmPath::kNvFp4}) {
    const std::vector<ProbeCase> cases = ProbeCases(path, plan::FastAccumulation::kForward);
    all.insert(all.end(), cases.begin(), cases.end());
  }
  return all;
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
      EXPECT_THAT(
          text,
          HasSubstr(absl::StrCat("element [", 70 / probe.columns, ", ", 70 % probe.columns, "]")));
    }
  }
}

// A scale that is left out, and operands in the other order, are far from the reference.
TEST(GemmProbe, TellsScalesAndOperandsApart) {
  for (const ProbeCase& probe : AllCases()) {
    const ProbeOperands operands = OperandsOf(probe);
    ProbeOperands other = operands;
    std::fill(other.scale_a.begin(), other.scale_a.end(), 1.0f);
    EXPECT_FALSE(CheckProbe(probe, operands, Exact(probe, other)).ok());
    other = operands;
    std::fill(other.scale_b.begin(), other.scale_b.end(), 1.0f);
    EXPECT_FALSE(CheckProbe(probe, operands, Exact(probe, other)).ok());
    if (probe.form_a != ScaleForm::kTensor) {
      // Scales of rows and blocks in another order.
      other = operands;
      std::reverse(other.scale_a.begin(), other.scale_a.end());
      EXPECT_FALSE(CheckProbe(probe, operands, Exact(probe, other)).ok()) << probe.name;
      if (probe.form_a == ScaleForm::kBlocks16) {
        other = operands;
        other.whole_a = 1;
        EXPECT_FALSE(CheckProbe(probe, operands, Exact(probe, other)).ok()) << probe.name;
        other = operands;
        other.a.front() = static_cast<uint8_t>(other.a.front() >> 4 | other.a.front() << 4);
        std::rotate(other.a.begin(), other.a.begin() + 1, other.a.end());
        EXPECT_FALSE(CheckProbe(probe, operands, Exact(probe, other)).ok()) << probe.name;
      }
      continue;  // both operands are of one type
    }
    ProbeCase swapped = probe;
    swapped.a = probe.a == DType::kF8E4M3 ? DType::kF8E5M2 : DType::kF8E4M3;
    EXPECT_FALSE(CheckProbe(probe, operands, Exact(swapped, operands)).ok());
  }
}

}  // namespace
}  // namespace ravel::trainer
