#include "common/plan/layer_drop.h"

#include <algorithm>
#include <cmath>
#include <set>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/common/plan/plan_testing.h"

namespace ravel::plan {
namespace {

ModelInventory OptionalLayers(int64_t layers) {
  ModelInventory inventory =
      BuildInventory(testing::Llama(64, layers, 96, 257), {.sequences = 1, .sequence_tokens = 4});
  MakeLayersOptional(inventory);
  return inventory;
}

TEST(LayerDrop, OnlyLayersAreLeftOutAndAboutAsOftenAsAskedFor) {
  const ModelInventory inventory = OptionalLayers(8);
  EXPECT_TRUE(UsedUnits(inventory, {.seed = 3}).empty());
  for (const double probability : {0.1, 0.5, 0.9}) {
    int64_t left_out = 0;
    for (int64_t step = 0; step < 1000; ++step) {
      const auto used = UsedUnits(inventory, {.seed = 3, .probability = probability, .step = step});
      EXPECT_TRUE(used.front());
      EXPECT_TRUE(used.back());
      left_out += std::count(used.begin(), used.end(), false);
    }
    // Four standard deviations.
    EXPECT_NEAR(static_cast<double>(left_out) / 8000,
                probability,
                4 * std::sqrt(probability * (1 - probability) / 8000));
  }
}

// Fails when a part of the key is not in the counter: the draws would repeat.
TEST(LayerDrop, SeedStepLaneMicroBatchAndLayerEachHaveDrawsOfTheirOwn) {
  const ModelInventory inventory = OptionalLayers(64);
  std::set<std::vector<bool>> seen;
  const auto draw = [&](LayerDraw key) {
    key.probability = 0.5;
    return seen.insert(UsedUnits(inventory, key)).second;
  };
  EXPECT_TRUE(draw({}));
  EXPECT_FALSE(draw({}));
  for (int64_t i = 1; i < 20; ++i) {
    EXPECT_TRUE(draw({.seed = static_cast<uint64_t>(i)}));
    EXPECT_TRUE(draw({.seed = static_cast<uint64_t>(i) << 32}));
    EXPECT_TRUE(draw({.step = i}));
    EXPECT_TRUE(draw({.lane = i}));
    EXPECT_TRUE(draw({.micro_batch = i}));
  }
}

TEST(LayerDrop, NothingIsDrawnForUnitsThatAreNotOptional) {
  ModelInventory inventory = OptionalLayers(2);
  for (UnitSpec& unit : inventory.units) {
    unit.optional = false;
  }
  EXPECT_THAT(UsedUnits(inventory, {.probability = 0.99}), ::testing::Each(true));
}

TEST(LayerDrop, ProbabilitiesAreWrittenInFewDigits) {
  EXPECT_EQ(LayerDropText(0), "0");
  EXPECT_EQ(LayerDropText(0.1), "0.1");
  EXPECT_EQ(LayerDropText(0.30000000000000004), "0.30000000000000004");
}

TEST(LayerDrop, PlansRefuseWhatIsNoProbability) {
  JobSpec spec = testing::SpecOf(testing::Llama(64, 2, 96, 257), 4);
  for (const double probability : {-0.1, 1.0, std::nan("")}) {
    spec.layer_drop = probability;
    EXPECT_THAT(std::string(BuildShardingPlan({.spec = spec, .ranks = 2}).status().message()),
                ::testing::HasSubstr("training.layerDrop: expected from 0 to below 1"));
  }
}

}  // namespace
}  // namespace ravel::plan
