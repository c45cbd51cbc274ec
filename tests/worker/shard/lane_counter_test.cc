// The sum over lanes is one fixed binary tree for every number of ranks, and padding is never read.

#include <bit>
#include <cmath>
#include <limits>
#include <random>

#include <gtest/gtest.h>

#include "worker/shard/parameter_group.h"

namespace ravel::shard {
namespace {

constexpr int64_t kElements = 5000;  // more than one chunk of the counter

std::vector<std::vector<float>> LaneGradients(int64_t lanes) {
  std::mt19937 random(12);
  std::normal_distribution<float> normal;
  std::vector<std::vector<float>> gradients(static_cast<size_t>(lanes));
  for (std::vector<float>& gradient : gradients) {
    gradient.resize(kElements);
    for (float& value : gradient) {
      value = normal(random);
    }
  }
  return gradients;
}

// node(h, i) = node(h-1, 2i) + node(h-1, 2i+1)
float Tree(const std::vector<std::vector<float>>& lanes,
           size_t element,
           size_t first,
           size_t count) {
  if (count == 1) {
    return lanes[first][element];
  }
  return Tree(lanes, element, first, count / 2) +
         Tree(lanes, element, first + count / 2, count / 2);
}

TEST(LaneCounter, AddsInTheOrderOfTheTreeForEveryNumberOfRanks) {
  kernels::CpuStream stream;
  const std::vector<ShardRun> runs = {{.offset = 0, .elements = 300},
                                      {.offset = 512, .elements = kElements - 512}};
  for (const int64_t lane_count : {1, 2, 8, 16}) {
    std::vector<std::vector<float>> gradients = LaneGradients(lane_count);
    for (std::vector<float>& gradient : gradients) {  // padding between the runs
      std::fill(gradient.begin() + 300,
                gradient.begin() + 512,
                std::numeric_limits<float>::signaling_NaN());
    }
    for (int64_t ranks = 1; ranks <= lane_count; ++ranks) {
      const plan::LaneMap map = {.lanes = lane_count, .ranks = ranks};
      std::vector<std::vector<float>> storage(static_cast<size_t>(plan::CounterBuffers(map)),
                                              std::vector<float>(kElements, 42.0f));
      std::vector<float*> buffers;
      for (std::vector<float>& buffer : storage) {
        buffers.push_back(buffer.data());
      }
      LaneCounter counter(buffers, map, runs);
      for (int64_t turn = 0; turn < map.turns(); ++turn) {
        std::vector<const float*> pieces;
        for (int64_t i = 0; i < map.LaneCount(turn); ++i) {
          pieces.push_back(gradients[static_cast<size_t>(map.FirstLane(turn) + i)].data());
        }
        counter.AddTurn(stream, turn, pieces);
      }
      for (size_t i = 0; i < static_cast<size_t>(kElements); ++i) {
        if (i >= 300 && i < 512) {
          ASSERT_EQ(counter.sum()[i], 42.0f) << "padding was written";
          continue;
        }
        const float expected = Tree(gradients, i, 0, static_cast<size_t>(lane_count));
        ASSERT_EQ(std::bit_cast<uint32_t>(counter.sum()[i]), std::bit_cast<uint32_t>(expected))
            << lane_count << " lanes on " << ranks << " ranks, element " << i;
      }
    }
  }
}

// The counter of one lane, whose buffer holds the lane itself.
TEST(LaneCounter, ALaneThatIsStagedInItsSumStaysThere) {
  kernels::CpuStream stream;
  const std::vector<ShardRun> runs = {{.offset = 0, .elements = kElements}};
  const std::vector<float> lane = LaneGradients(1).front();
  std::vector<float> sum = lane;
  LaneCounter counter({sum.data()}, {.lanes = 1, .ranks = 1}, runs);
  const std::vector<const float*> pieces = {sum.data()};
  counter.AddTurn(stream, 0, pieces);
  EXPECT_EQ(sum, lane);
}

// Rounded for the wire into the first half of that buffer, as from memory of its own.
TEST(LaneCounter, ALaneThatIsRoundedInItsSumHasTheBitsOfOneThatIsRoundedApart) {
  kernels::CpuStream stream;
  const std::vector<ShardRun> runs = {{.offset = 0, .elements = 300},
                                      {.offset = 512, .elements = 20000}};
  std::mt19937 random(5);
  std::normal_distribution<float> normal;
  std::vector<float> lane(20736);
  for (float& value : lane) {
    value = normal(random);
  }
  lane[7] = std::numeric_limits<float>::quiet_NaN();
  const auto elements = static_cast<int64_t>(lane.size());
  const plan::LaneMap one = {.lanes = 1, .ranks = 1};

  std::vector<float> packed = lane;
  PackBf16(packed.data(), elements);
  std::vector<float> apart(lane.size(), 42.0f);
  const std::vector<const uint16_t*> of_packed = {reinterpret_cast<const uint16_t*>(packed.data())};
  LaneCounter({apart.data()}, one, runs).AddRoundedTurn(stream, 0, of_packed);

  std::vector<float> in_sum = lane;
  PackBf16(in_sum.data(), elements);
  const std::vector<const uint16_t*> of_sum = {reinterpret_cast<const uint16_t*>(in_sum.data())};
  LaneCounter({in_sum.data()}, one, runs).AddRoundedTurn(stream, 0, of_sum);

  for (const ShardRun& run : runs) {
    for (int64_t i = run.offset; i < run.offset + run.elements; ++i) {
      const auto at = static_cast<size_t>(i);
      ASSERT_EQ(std::bit_cast<uint32_t>(apart[at]), std::bit_cast<uint32_t>(in_sum[at])) << i;
    }
  }
}

}  // namespace
}  // namespace ravel::shard
