#pragma once

#include <cstdint>
#include <vector>

namespace ravel::plan {

// Virtual ranks ("lanes") to physical ranks, time-major: at turn t rank r computes lane t * ranks +
// r, if there is one.
struct LaneMap {
  int64_t lanes = 1;     // V, a power of two
  int64_t ranks = 1;     // R = replicas * width, at most V
  int64_t replicas = 1;  // O, a power of two: replica o computes the o-th aligned block of lanes
  bool blocks = false;   // each rank computes an aligned block of lanes; R divides V
  int64_t micro_batches = 1;  // k of each lane, summed in order

  int64_t width() const { return ranks / replicas; }
  int64_t lanes_per_replica() const { return lanes / replicas; }
  int64_t turns() const {
    return blocks ? lanes / ranks : (lanes_per_replica() + width() - 1) / width();
  }
  // Programs that a step runs.
  int64_t programs() const { return turns() * micro_batches; }
  // The lane of `rank` at `turn`, or -1 when it has none in the last turn.
  int64_t LaneOf(int64_t turn, int64_t rank) const {
    if (blocks) {
      return rank * turns() + turn;
    }
    const int64_t lane = turn * width() + rank % width();
    return lane < lanes_per_replica() ? rank / width() * lanes_per_replica() + lane : -1;
  }

  // The fixed tree over all lanes as up to three binary counters, each over a map of one replica
  // without blocks: over the lanes of a rank, where it sums them before any exchange; over the
  // ranks of a replica; over replicas.
  LaneMap Local() const { return {.lanes = blocks ? turns() : 1, .ranks = 1}; }
  LaneMap Inner() const {
    return {.lanes = blocks ? width() : lanes_per_replica(), .ranks = width()};
  }
  LaneMap Outer() const { return {.lanes = replicas, .ranks = replicas}; }

  // For one replica without blocks. Lanes computed at `turn`: [first, first + count).
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
