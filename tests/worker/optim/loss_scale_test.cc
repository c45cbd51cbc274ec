// The loss scale of fp16: its rule against torch's GradScaler, its bounds, its entry in a
// checkpoint, and the one division that takes it out of a step.

#include "worker/optim/loss_scale.h"

#include <cmath>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/field_error.h"
#include "worker/optim/decide_step.h"

namespace ravel::optim {
namespace {

using ::testing::HasSubstr;

// Made by make_loss_scales.py, beside this file, with torch 2.15.0: `x` is a step whose gradients
// are not finite.
constexpr char kTorchSteps[] = "...x....xx.............xxx...x.......";
constexpr double kTorchScales[] = {
    32768, 32768, 65536, 32768, 32768, 32768,  65536,  65536,  32768,  16384,  16384,  16384, 32768,
    32768, 32768, 65536, 65536, 65536, 131072, 131072, 131072, 262144, 262144, 131072, 65536, 32768,
    32768, 32768, 65536, 32768, 32768, 32768,  65536,  65536,  65536,  131072, 131072};

TEST(LossScale, FollowsTorchsGradScaler) {
  const plan::LossScaleSpec spec = {
      .initial = 32768, .growth_interval = 3, .maximum = plan::kMostLossScale};
  LossScale scale = FirstLossScale(spec);
  for (size_t i = 0; kTorchSteps[i] != '\0'; ++i) {
    scale = NextLossScale(spec, scale, kTorchSteps[i] == '.');
    EXPECT_EQ(scale.scale, kTorchScales[i]) << "step " << i;
  }
}

TEST(LossScale, StaysWithinItsBounds) {
  const plan::LossScaleSpec spec = {.initial = 16,
                                    .growth_factor = 8,
                                    .backoff_factor = 0.25,
                                    .growth_interval = 1,
                                    .minimum = 2,
                                    .maximum = 64};
  LossScale scale = FirstLossScale(spec);
  EXPECT_EQ(scale, (LossScale{.scale = 16}));
  scale = NextLossScale(spec, scale, true);
  EXPECT_EQ(scale, (LossScale{.scale = 64}));
  EXPECT_EQ(NextLossScale(spec, scale, true), scale);
  for (const double lower : {16, 4, 2, 2}) {
    scale = NextLossScale(spec, scale, false);
    EXPECT_EQ(scale, (LossScale{.scale = lower}));
  }
  const plan::LossScaleSpec fixed = {.initial = 1024, .minimum = 1024, .maximum = 1024};
  EXPECT_EQ(NextLossScale(fixed, FirstLossScale(fixed), false).scale, 1024);
  EXPECT_EQ(NextLossScale(fixed, {.scale = 1024, .good_steps = 1999}, true),
            (LossScale{.scale = 1024}));
}

TEST(LossScale, GoodStepsAreInARow) {
  const plan::LossScaleSpec spec = {.initial = 8, .growth_interval = 3};
  LossScale scale = FirstLossScale(spec);
  for (const bool applied : {true, true, false, true, true}) {
    scale = NextLossScale(spec, scale, applied);
  }
  EXPECT_EQ(scale, (LossScale{.scale = 4, .good_steps = 2}));
  EXPECT_EQ(NextLossScale(spec, scale, true), (LossScale{.scale = 8}));
}

TEST(LossScale, ASaveGivesItBackBitByBit) {
  const plan::LossScaleSpec spec;
  for (const LossScale& scale :
       {LossScale{.scale = 1}, LossScale{.scale = 32768, .good_steps = 1998}}) {
    const auto read = ParseLossScale(LossScaleText(scale), spec);
    ASSERT_TRUE(read.ok()) << read.status();
    EXPECT_EQ(*read, scale);
  }
  EXPECT_EQ(LossScaleText({.scale = 16777216, .good_steps = 3}),
            R"({"scale":16777216,"good_steps":3})");
  // Under other settings it is brought within their bounds.
  const LossScale large = {.scale = 65536, .good_steps = 7};
  EXPECT_EQ(*ParseLossScale(LossScaleText(large), spec),
            (LossScale{.scale = 32768, .good_steps = 7}));
  EXPECT_EQ(*ParseLossScale(LossScaleText(large), {.growth_interval = 3}),
            (LossScale{.scale = 32768, .good_steps = 2}));
  for (const char* wrong : {"",
                            "[]",
                            "{}",
                            R"({"scale":3,"good_steps":0})",
                            R"({"scale":-2,"good_steps":0})",
                            R"({"scale":0,"good_steps":0})",
                            R"({"scale":"2","good_steps":0})",
                            R"({"scale":2})",
                            R"({"scale":2,"good_steps":-1})",
                            R"({"scale":2,"good_steps":0.5})"}) {
    EXPECT_FALSE(ParseLossScale(wrong, spec).ok()) << wrong;
  }
}

TEST(LossScale, SettingsAreRefusedByField) {
  EXPECT_TRUE(plan::CheckLossScale({}).ok());
  struct Case {
    const char* field;
    plan::LossScaleSpec spec;
  };
  for (const Case& wrong : {Case{"initial", {.initial = 3}},
                            Case{"initial", {.initial = 65536}},
                            Case{"initial", {.initial = std::nan("")}},
                            Case{"growthFactor", {.growth_factor = 1}},
                            Case{"growthFactor", {.growth_factor = 1.5}},
                            Case{"backoffFactor", {.backoff_factor = 1}},
                            Case{"backoffFactor", {.backoff_factor = 0}},
                            Case{"growthInterval", {.growth_interval = 0}},
                            Case{"minimum", {.minimum = 0.5}},
                            Case{"initial", {.initial = 4, .minimum = 8}},
                            Case{"maximum", {.minimum = 4096, .maximum = 1024}},
                            Case{"maximum", {.maximum = 33554432}}}) {
    const absl::Status status = plan::CheckLossScale(wrong.spec);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    const std::string path = std::string("precision.lossScale.") + wrong.field;
    ASSERT_EQ(FieldErrorsOf(status).size(), 1u) << path;
    EXPECT_EQ(FieldErrorsOf(status)[0].path, path);
  }
}

TEST(LossScaleDecision, TheScaleIsPartOfTheDenominator) {
  const StepTotals plain = {.squared_norm = 48.0, .target_tokens = 5, .loss_sum = 10.0};
  for (const double clip : {0.0, 1.0}) {
    const StepDecision expected = DecideStep(plain, clip);
    for (const double scale : {1.0, 1024.0, 32768.0, 16777216.0}) {
      StepTotals scaled = plain;
      scaled.squared_norm *= scale * scale;
      scaled.loss_scale = scale;
      const StepDecision decision = DecideStep(scaled, clip);
      EXPECT_TRUE(decision.apply);
      EXPECT_EQ(decision.loss, expected.loss);
      EXPECT_EQ(decision.grad_norm, expected.grad_norm);
      EXPECT_EQ(decision.gradient_scale * static_cast<float>(scale), expected.gradient_scale);
    }
  }
}

}  // namespace
}  // namespace ravel::optim
