// Quantized matrices whose optimizer's state is in memory of the device's host.

#include <gtest/gtest.h>

#include "tests/gpu/engine_device.h"
#include "tests/testing/device_runs.h"

namespace ravel::trainer {
namespace {

class GpuOffloadRecipes : public GpuEngine {};

// Codes follow main weights that the host has updated. What has its own kernel on the device, with
// states of any type and on both sides of a cut, is on the host the ops that it stands for.
TEST_F(GpuOffloadRecipes, GiveTheSameBits) {
  using plan::Recipe;
  struct Case {
    Recipe recipe;
    plan::StateTypes states;
    StrategyCase strategy;
  };
  for (const Case& tested :
       {Case{Recipe::kMxFp8, plan::kF32States, {.strategy = "ZeRO3", .width = 2}},
        Case{Recipe::kMxFp8, plan::kFp8States, {.strategy = "ZeRO1", .width = 2}},
        Case{Recipe::kMxFp8, plan::kBf16States, {.strategy = "ZeRO3", .tensor = 2}},
        Case{Recipe::kCurrent, {DType::kF8E4M3, DType::kBF16}, {.strategy = "ZeRO3"}}}) {
    RecordArgs args = DeviceSteps(tested.strategy, "recipes");
    args.spec.compute = plan::ComputeType::kBF16;
    args.spec.recipe = {
        .recipe = tested.recipe, .keep_bf16 = {}, .emulation = {plan::GemmPath::kDequantBf16}};
    args.spec.optimizer.state_types = tested.states;
    args.evaluate_every_step = false;
    args.last_step = 2;
    const Recording whole = RecordOn(gpu(), args);
    args.spec.optimizer.offload.fraction = 1;
    EXPECT_EQ(FirstDifference(whole, RecordOn(gpu(), args)), "")
        << plan::RecipeName(tested.recipe) << plan::StateTypesText(tested.states);
  }
}

}  // namespace
}  // namespace ravel::trainer
