#pragma once

#include <cstdint>
#include <vector>

namespace ravel::plan {

// Virtual ranks ("lanes") to physical ranks, time-major: at turn t rank r computes lane t * ranks +
// r, if there is one.
struct LaneMap {
  int64_t lanes = 1;  // V, a power of two
  int64_t ranks = 1;  // N, 1 <= N <= V

  int64_t turns() const { return (lanes + ranks - 1) / ranks; }
  // The lane of `rank` at `turn`, or -1 when it has none in the last turn.
  int64_t LaneOf(int64_t turn, int64_t rank) const {
    const int64_t lane = turn * ranks + rank;
    return lane < lanes ? lane : -1;
  }
  // Lanes computed at `turn`: [first, first + count).
  int64_t FirstLane(int64_t turn) const { return turn * ranks; }
  int64_t LaneCount(int64_t turn) const {
    const int64_t left = lanes - turn * ranks;
    return left < ranks ? left : ranks;
  }
};

// A run of lanes [first, first + 2^level), first a multiple of 2^level, whose sum is one node of
// the tree.
struct LaneBlock {
  int64_t first = 0;
  int level = 0;
  bool operator==(const LaneBlock&) const = default;
};
// The lanes of a turn as maximal aligned blocks, in lane order: N = 4 is one block of level 2, N =
// 3 at turn 0 is {0, level 1}, {2, level 0}.
std::vector<LaneBlock> BlocksOfTurn(const LaneMap& map, int64_t turn);

// The binary counter that sums blocks in the order of the fixed binary tree over the lane index.
// Slot k holds the sum of 2^k lanes. A block of level k arrives and is merged (older + newer) with
// slots k, k + 1, ... as long as those are occupied; the result lands in slot k + merges. merges =
// trailing one bits of first >> level. After all V lanes only slot log2(V) is occupied: the sum.
int CounterMerges(const LaneBlock& block);
// Most slots occupied at once: shard-size buffers that the counter needs. V = N: 1; N = 1, V = 8: 3
// (a block is added into the older buffer and never needs one of its own when it merges).
int CounterBuffers(const LaneMap& map);

// What happens to the buffers (slots of BufferKind::kMainGrad) when a block arrives.
struct CounterStep {
  LaneBlock block;
  int store = -1;  // buffer that the block's sum is stored in, or -1: it merges
  // Otherwise: add_into[0] += sum of the block, add_into[1] += add_into[0], ... (older + newer,
  // older on the left).
  std::vector<int> add_into;
};
// The steps of a turn, in order: the replayed counter with fixed buffers in [0, CounterBuffers).
// After the last turn buffer CounterRoot holds the sum of all lanes.
std::vector<CounterStep> CounterSchedule(const LaneMap& map, int64_t turn);
int CounterRoot(const LaneMap& map);

}  // namespace ravel::plan
