// A step whose gradients are not finite changes nothing but the cursor.

#include <bit>
#include <limits>

#include <gtest/gtest.h>

#include "tests/testing/training_cases.h"
#include "worker/optim/stored_state.h"

namespace ravel::trainer {
namespace {

std::vector<uint32_t> StateBits(RankEngine& engine) {
  std::vector<uint32_t> bits;
  for (const shard::ParameterGroup& group : engine.groups()) {
    for (const shard::ShardRun& run : group.runs()) {
      for (const float* state : {group.main_weight(),
                                 optim::StoredFloats(group, plan::StateRole::kExpAvg),
                                 optim::StoredFloats(group, plan::StateRole::kExpAvgSq)}) {
        for (int64_t i = 0; i < run.elements; ++i) {
          bits.push_back(std::bit_cast<uint32_t>(state[run.offset + i]));
        }
      }
    }
  }
  return bits;
}

TEST(SkippedStep, ChangesNoStateOnAnyRankAndTrainingGoesOn) {
  for (const int ranks : {1, 3}) {
    const auto body = [&](RankEngine& engine, int) -> absl::Status {
      RETURN_IF_ERROR(engine.InitializeWeights());
      for (int64_t step = 0; step < 3; ++step) {
        RETURN_IF_ERROR(engine.TrainStep(step).status());
      }
      // One weight of one rank makes every lane's loss NaN.
      shard::ParameterGroup& embed = engine.groups()[0];
      const bool owns_first = !embed.pieces().empty() && embed.pieces()[0].range.begin == 0;
      float* first = embed.main_weight() + (owns_first ? embed.pieces()[0].shard_offset : 0);
      const float kept = *first;
      std::vector<float> row;
      if (owns_first) {
        for (int64_t i = 0; i < embed.runs()[0].elements; ++i) {
          row.push_back(first[i]);
          first[i] = std::numeric_limits<float>::quiet_NaN();
        }
      }
      const std::vector<uint32_t> before = StateBits(engine);
      const auto skipped = engine.TrainStep(3);
      RETURN_IF_ERROR(skipped.status());
      EXPECT_TRUE(skipped->skipped);
      EXPECT_GT(skipped->non_finite, 0);
      EXPECT_EQ(StateBits(engine), before);
      EXPECT_EQ(engine.updates(), 3);
      if (owns_first) {
        std::copy(row.begin(), row.end(), first);
        EXPECT_EQ(*first, kept);
      }
      const auto next = engine.TrainStep(4);
      RETURN_IF_ERROR(next.status());
      EXPECT_FALSE(next->skipped);
      EXPECT_EQ(engine.updates(), 4);
      return absl::OkStatus();
    };
    const absl::Status status = RunLocalRanks(
        {.spec = CaseJob("odd_tied", OwnFolder("ravel_skip")), .ranks = ranks, .body = body});
    EXPECT_TRUE(status.ok()) << status;
  }
}

}  // namespace
}  // namespace ravel::trainer
