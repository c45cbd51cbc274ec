#include "common/plan/program/lane_map.h"

#include <algorithm>
#include <bit>
#include <cstddef>

#include "common/check.h"
#include "common/signed_size.h"

namespace ravel::plan {

std::vector<LaneBlock> BlocksOfTurn(const LaneMap& map, int64_t turn) {
  CHECK(turn >= 0 && turn < map.turns());
  std::vector<LaneBlock> blocks;
  int64_t first = map.FirstLane(turn);
  int64_t left = map.LaneCount(turn);
  while (left > 0) {
    // The largest power of two that `first` is a multiple of and that fits.
    int level = static_cast<int>(std::bit_width(static_cast<uint64_t>(left))) - 1;
    if (first != 0) {
      level = std::min(level, std::countr_zero(static_cast<uint64_t>(first)));
    }
    blocks.push_back({.first = first, .level = level});
    first += int64_t{1} << level;
    left -= int64_t{1} << level;
  }
  return blocks;
}

int CounterMerges(const LaneBlock& block) {
  return std::countr_one(static_cast<uint64_t>(block.first >> block.level));
}

int CounterBuffers(const LaneMap& map) {
  int most = 0;
  for (int64_t turn = 0; turn < map.turns(); ++turn) {
    for (const LaneBlock& block : BlocksOfTurn(map, turn)) {
      // After the block its merges are done, and the occupied slots are the one bits of the count
      // of lanes. A block that merges is added into an occupied buffer, so the count never exceeds
      // this on the way.
      const auto lanes = static_cast<uint64_t>(block.first + (int64_t{1} << block.level));
      most = std::max(most, std::popcount(lanes));
    }
  }
  return most;
}

std::vector<CounterStep> CounterSchedule(const LaneMap& map, int64_t turn) {
  constexpr int kLevels = 63;
  std::vector<int> buffer_of_slot(kLevels, -1);
  std::vector<bool> used(Size(CounterBuffers(map)), false);
  std::vector<CounterStep> steps;
  for (int64_t t = 0; t <= turn; ++t) {
    for (const LaneBlock& block : BlocksOfTurn(map, t)) {
      CounterStep step = {.block = block, .store = -1, .add_into = {}};
      size_t slot = Size(block.level);
      for (int merge = CounterMerges(block); merge > 0; --merge) {
        if (!step.add_into.empty()) {
          At(used, step.add_into.back()) = false;
        }
        step.add_into.push_back(buffer_of_slot[slot]);
        buffer_of_slot[slot] = -1;
        ++slot;
      }
      if (step.add_into.empty()) {
        step.store = static_cast<int>(std::find(used.begin(), used.end(), false) - used.begin());
        At(used, step.store) = true;
      }
      CHECK_EQ(buffer_of_slot[slot], -1);
      buffer_of_slot[slot] = step.add_into.empty() ? step.store : step.add_into.back();
      if (t == turn) {
        steps.push_back(step);
      }
    }
  }
  return steps;
}

int CounterRoot(const LaneMap& map) {
  const CounterStep last = CounterSchedule(map, map.turns() - 1).back();
  return last.add_into.empty() ? last.store : last.add_into.back();
}

}  // namespace ravel::plan
