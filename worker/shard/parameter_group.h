#pragma once

// One rank's share of a unit's parameters: the fp32 weights it owns, their moments, and the sums of
// their gradients over lanes.

#include <cstdint>
#include <span>
#include <vector>

#include "common/plan/lane_map.h"
#include "common/plan/sharding_plan.h"
#include "kernels/stream.h"
#include "worker/shard/flat_buffer.h"

namespace ravel::shard {

// A contiguous stretch of owned elements of a shard. Padding lies between stretches and is never
// read.
struct ShardRun {
  int64_t offset = 0;
  int64_t elements = 0;
};

// Counts the steps that wrote a shard; a gathered copy carries the generation it was made from.
enum class Generation : int64_t {};

// Gradients of one call of a unit, summed over lanes in the order of the fixed tree: a binary
// counter of shard-size partial sums. Used only from the thread of its rank.
class LaneCounter {
 public:
  LaneCounter(std::vector<float*> buffers, const plan::LaneMap& lanes, std::vector<ShardRun> runs);

  // Adds the lanes of a turn; pieces[i] is this rank's slice of the gradient of lane
  // FirstLane(turn) + i.
  void AddTurn(kernels::Stream& stream, int64_t turn, std::span<const float* const> pieces);

  // The sum of all lanes, after the last turn.
  float* sum() const { return buffers_[static_cast<size_t>(root_)]; }

 private:
  void AddBlock(kernels::Stream& stream,
                const plan::CounterStep& step,
                std::span<const float* const> pieces);

  std::vector<float*> buffers_;
  plan::LaneMap lanes_;
  std::vector<ShardRun> runs_;
  std::vector<std::vector<plan::CounterStep>> schedule_;  // by turn
  int root_ = 0;
};

class ParameterGroup {
 public:
  ParameterGroup(const plan::ShardingPlan& plan, const ArenaBuffers& buffers, int unit, int rank);

  const plan::GroupLayout& layout() const { return *layout_; }
  int64_t shard_elements() const { return layout_->layout.shard_elements; }
  const std::vector<plan::OwnedPiece>& pieces() const { return pieces_; }
  const std::vector<ShardRun>& runs() const { return runs_; }

  // Each [shard_elements].
  float* main_weight() const { return main_weight_; }
  float* exp_avg() const { return exp_avg_; }
  float* exp_avg_sq() const { return exp_avg_sq_; }

  LaneCounter& counter(int call) { return counters_[static_cast<size_t>(call)]; }
  // Adds the sums of several gradient calls (a tied table: head, then embedding) into the first.
  void JoinCalls(kernels::Stream& stream);
  // The gradient of the whole step: a sum over lanes and calls, not yet divided by anything.
  float* main_grad() const { return counters_.front().sum(); }

  Generation generation() const { return generation_; }
  // After each step, also a skipped one: same bits, new number.
  void AdvanceGeneration() {
    generation_ = static_cast<Generation>(static_cast<int64_t>(generation_) + 1);
  }

 private:
  const plan::GroupLayout* layout_;
  std::vector<plan::OwnedPiece> pieces_;
  std::vector<ShardRun> runs_;
  float* main_weight_ = nullptr;
  float* exp_avg_ = nullptr;
  float* exp_avg_sq_ = nullptr;
  std::vector<LaneCounter> counters_;
  Generation generation_{};
};

}  // namespace ravel::shard
