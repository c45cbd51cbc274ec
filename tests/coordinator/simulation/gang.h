#pragma once

// The collectives of one epoch: no rank leaves a step that a peer has not entered. What the ranks
// agree on with a step (the newest save that one of them was asked for) is the maximum of what each
// brought.

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <utility>

namespace ravel::coordinator::simulation {

struct Agreed {
  int64_t save_sequence = 0;
  bool stop = false;
};

// Weights are a number that follows from the steps that were taken, each exactly once and in order.
inline uint64_t InitialWeights() {
  return 0x5EED;
}
inline uint64_t AfterStep(uint64_t weights, int64_t step) {
  return (weights ^ static_cast<uint64_t>(step)) * 0x9E3779B97F4A7C15ULL + 1;
}
inline uint64_t WeightsOf(int64_t step) {
  uint64_t weights = InitialWeights();
  for (int64_t done = 1; done <= step; ++done) {
    weights = AfterStep(weights, done);
  }
  return weights;
}

class Gang {
 public:
  using Finish = std::function<void(const Agreed&)>;
  // `rank` begins `step`; `finish` is called when all ranks have. False: others are at another
  // step.
  bool Enter(int64_t rank, int64_t step, int64_t world_size, Agreed brings, Finish finish) {
    if (!waiting_.empty() && step != step_) {
      return false;
    }
    step_ = step;
    agreed_.save_sequence = std::max(agreed_.save_sequence, brings.save_sequence);
    agreed_.stop = agreed_.stop || brings.stop;
    if (!waiting_.emplace(rank, std::move(finish)).second) {
      return false;
    }
    if (static_cast<int64_t>(waiting_.size()) == world_size) {
      const Agreed agreed = std::exchange(agreed_, Agreed());
      const std::map<int64_t, Finish> all = std::exchange(waiting_, {});
      for (const auto& [member, done] : all) {
        done(agreed);
      }
    }
    return true;
  }
  bool Waits(int64_t rank) const { return waiting_.contains(rank); }

 private:
  int64_t step_ = 0;
  Agreed agreed_;
  std::map<int64_t, Finish> waiting_;
};

}  // namespace ravel::coordinator::simulation
