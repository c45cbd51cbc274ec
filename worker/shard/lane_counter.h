#pragma once

// Sums over lanes in the order of the fixed tree, in the flat buffers of a parameter group.

#include <cstdint>
#include <span>
#include <vector>

#include "common/plan/layout/owned_boxes.h"
#include "common/plan/program/lane_map.h"
#include "common/signed_size.h"
#include "kernels/stream.h"

namespace ravel::shard {

// A contiguous stretch of elements of a flat buffer that tensors occupy. Padding lies between
// stretches and is never read.
struct ShardRun {
  int64_t offset = 0;
  int64_t elements = 0;
  bool operator==(const ShardRun&) const = default;
};

// The stretches of pieces in buffer order.
std::vector<ShardRun> RunsOf(const std::vector<plan::OwnedPiece>& pieces);
// What of `runs` lies in [begin, end), counted from `begin`.
std::vector<ShardRun> RunsWithin(const std::vector<ShardRun>& runs, int64_t begin, int64_t end);

// older[i] += newer[i] on the runs.
void AddRuns(kernels::Stream& stream,
             const std::vector<ShardRun>& runs,
             const float* newer,
             float* older);

// Rounds fp32 values to bf16, to nearest even, into the first half of their own memory. Of hosts
// alone: a device rounds into memory of its own (device_memory.h).
void PackBf16(float* values, int64_t elements);

// One level of the tree for one gradient: a binary counter of partial sums. `lanes` is one of
// LaneMap::Local, Inner and Outer. Used only from the thread of its rank, or of its stream. On a
// device, whose launches cost more than bytes, the padding between the runs is summed along: it is
// still never read as a value.
class LaneCounter {
 public:
  LaneCounter(std::vector<float*> buffers, const plan::LaneMap& lanes, std::vector<ShardRun> runs);

  // Adds the lanes of a turn; pieces[i] is the gradient of lane FirstLane(turn) + i. A piece that
  // is the buffer in which it would be stored stays as it is.
  void AddTurn(kernels::Stream& stream, int64_t turn, std::span<const float* const> pieces);

  // The same of gradients that were rounded to bf16 for the wire; sums are fp32. The one piece of a
  // turn may have been rounded into the first half of the buffer in which it is stored.
  void AddRoundedTurn(kernels::Stream& stream,
                      int64_t turn,
                      std::span<const uint16_t* const> pieces);

  // The sum of all lanes, after the last turn.
  float* sum() const { return At(buffers_, root_); }
  const std::vector<ShardRun>& runs() const { return runs_; }
  int64_t turns() const { return lanes_.turns(); }
  int64_t contributors(int64_t turn) const { return lanes_.LaneCount(turn); }

 private:
  void AddBlock(kernels::Stream& stream,
                const plan::CounterStep& step,
                std::span<const float* const> pieces);
  // A chunk of a block: pieces[i] begins at element `begin`.
  void AddChunk(kernels::Stream& stream,
                const plan::CounterStep& step,
                const std::vector<const float*>& pieces,
                const ShardRun& chunk);
  // A block of fp32 or bf16 pieces on a device, from the first run to the end of the last.
  template <typename Piece>
  void AddBlockOnDevice(kernels::Stream& stream,
                        const plan::CounterStep& step,
                        std::span<const Piece* const> pieces);
  // The steps of a turn, each with the pieces that it adds.
  template <typename Piece, typename Add>
  void ForEachBlock(int64_t turn, std::span<const Piece* const> pieces, const Add& add) const;

  std::vector<float*> buffers_;
  plan::LaneMap lanes_;
  std::vector<ShardRun> runs_;
  std::vector<std::vector<plan::CounterStep>> schedule_;  // by turn
  int root_ = 0;
};

}  // namespace ravel::shard
