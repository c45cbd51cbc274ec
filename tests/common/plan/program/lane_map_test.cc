#include "common/plan/program/lane_map.h"

#include <cmath>
#include <cstring>
#include <map>
#include <random>
#include <vector>

#include <gtest/gtest.h>

#include "tests/common/plan/plan_testing.h"

namespace ravel::plan {
namespace {

// node(h, i) = node(h - 1, 2i) + node(h - 1, 2i + 1).
float DirectTree(const std::vector<float>& leaves) {
  std::vector<float> level = leaves;
  while (level.size() > 1) {
    for (size_t i = 0; i < level.size() / 2; ++i) {
      level[i] = level[2 * i] + level[2 * i + 1];
    }
    level.resize(level.size() / 2);
  }
  return level[0];
}

float BlockSum(const std::vector<float>& leaves, const LaneBlock& block) {
  const auto first = leaves.begin() + block.first;
  return DirectTree(std::vector<float>(first, first + (std::ptrdiff_t{1} << block.level)));
}

// The counter as its header describes it, with slots.
float SlotCounter(const LaneMap& map, const std::vector<float>& leaves) {
  std::map<int, float> slots;
  for (int64_t turn = 0; turn < map.turns(); ++turn) {
    for (const LaneBlock& block : BlocksOfTurn(map, turn)) {
      float sum = BlockSum(leaves, block);
      int slot = block.level;
      for (int merge = CounterMerges(block); merge > 0; --merge, ++slot) {
        EXPECT_EQ(slots.count(slot), 1u);
        sum = slots[slot] + sum;
        slots.erase(slot);
      }
      EXPECT_EQ(slots.count(slot), 0u);
      slots[slot] = sum;
    }
  }
  EXPECT_EQ(slots.size(), 1u);
  return slots.begin()->second;
}

// The same with the planned buffers.
float BufferCounter(const LaneMap& map, const std::vector<float>& leaves) {
  std::vector<float> buffers(static_cast<size_t>(CounterBuffers(map)), 0.0f);
  for (int64_t turn = 0; turn < map.turns(); ++turn) {
    for (const CounterStep& step : CounterSchedule(map, turn)) {
      const float sum = BlockSum(leaves, step.block);
      if (step.add_into.empty()) {
        buffers.at(static_cast<size_t>(step.store)) = sum;
        continue;
      }
      float newer = sum;
      for (const int into : step.add_into) {
        float& older = buffers.at(static_cast<size_t>(into));
        older = older + newer;
        newer = older;
      }
    }
  }
  return buffers.at(static_cast<size_t>(CounterRoot(map)));
}

TEST(LaneMap, EveryRankCountGivesTheBitsOfTheDirectTree) {
  std::mt19937_64 random(testing::kSeed);
  std::normal_distribution<float> normal;
  for (int64_t lanes = 1; lanes <= 64; lanes *= 2) {
    for (int trial = 0; trial < 20; ++trial) {
      std::vector<float> leaves;
      for (int64_t i = 0; i < lanes; ++i) {
        leaves.push_back(normal(random) * std::exp(8 * normal(random)));
      }
      const float tree = DirectTree(leaves);
      for (int64_t ranks = 1; ranks <= lanes; ++ranks) {
        const LaneMap map = {.lanes = lanes, .ranks = ranks};
        const float slots = SlotCounter(map, leaves);
        const float buffers = BufferCounter(map, leaves);
        EXPECT_EQ(std::memcmp(&tree, &slots, sizeof(float)), 0) << lanes << " on " << ranks;
        EXPECT_EQ(std::memcmp(&tree, &buffers, sizeof(float)), 0) << lanes << " on " << ranks;
      }
    }
  }
}

TEST(LaneMap, BlocksAreAlignedAndCoverTheTurn) {
  for (int64_t lanes = 1; lanes <= 64; lanes *= 2) {
    for (int64_t ranks = 1; ranks <= lanes; ++ranks) {
      const LaneMap map = {.lanes = lanes, .ranks = ranks};
      int64_t next = 0;
      for (int64_t turn = 0; turn < map.turns(); ++turn) {
        EXPECT_EQ(map.FirstLane(turn), next);
        for (const LaneBlock& block : BlocksOfTurn(map, turn)) {
          EXPECT_EQ(block.first, next);
          EXPECT_EQ(block.first % (int64_t{1} << block.level), 0);
          next += int64_t{1} << block.level;
        }
        EXPECT_EQ(next, map.FirstLane(turn) + map.LaneCount(turn));
      }
      EXPECT_EQ(next, lanes);
    }
  }
}

TEST(LaneMap, Examples) {
  const std::vector<LaneBlock> four = {{.first = 0, .level = 2}};
  EXPECT_EQ(BlocksOfTurn({.lanes = 8, .ranks = 4}, 0), four);
  const std::vector<LaneBlock> three = {{.first = 0, .level = 1}, {.first = 2, .level = 0}};
  EXPECT_EQ(BlocksOfTurn({.lanes = 8, .ranks = 3}, 0), three);
  EXPECT_EQ(CounterBuffers({.lanes = 8, .ranks = 8}), 1);
  EXPECT_EQ(CounterBuffers({.lanes = 8, .ranks = 1}), 3);
  EXPECT_EQ(CounterBuffers({.lanes = 8, .ranks = 4}), 1);
  EXPECT_EQ(CounterBuffers({.lanes = 1, .ranks = 1}), 1);
}

TEST(LaneMap, RanksWithoutALaneInTheLastTurnSaySo) {
  const LaneMap map = {.lanes = 8, .ranks = 3};
  EXPECT_EQ(map.turns(), 3);
  EXPECT_EQ(map.LaneOf(2, 1), 7);
  EXPECT_EQ(map.LaneOf(2, 2), -1);
  EXPECT_EQ(map.LaneCount(2), 2);
}

}  // namespace
}  // namespace ravel::plan
