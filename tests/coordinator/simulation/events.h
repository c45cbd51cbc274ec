#pragma once

// Virtual time and chance of a simulation: a queue of things that will happen, and numbers that
// follow from a seed.

#include <cstdint>
#include <functional>
#include <queue>
#include <utility>
#include <vector>

#include "common/clock.h"

namespace ravel::coordinator::simulation {

// The same numbers for the same seed on every machine (SplitMix64).
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t Next() {
    uint64_t mixed = (state_ += 0x9E3779B97F4A7C15ULL);
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9ULL;
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EBULL;
    return mixed ^ (mixed >> 31);
  }
  // Both ends count.
  int64_t Between(int64_t low, int64_t high) {
    return low + static_cast<int64_t>(Next() % static_cast<uint64_t>(high - low + 1));
  }
  bool Chance(double probability) {
    return static_cast<double>(Next() >> 11) * 0x1.0p-53 < probability;
  }
  template <typename Value>
  const Value& Pick(const std::vector<Value>& values) {
    return values[static_cast<size_t>(Between(0, static_cast<int64_t>(values.size()) - 1))];
  }

 private:
  uint64_t state_;
};

// Things happen in the order of their time, and of being announced when that is equal.
class Events : public Clock {
 public:
  int64_t WallMs() const override { return kWallStartMs + wall_step_ms_ + now_us_ / 1000; }
  int64_t MonotonicMs() const override { return 1000 + now_us_ / 1000; }
  int64_t now_us() const { return now_us_; }
  int64_t handled() const { return handled_; }
  void StepWallClock(int64_t ms) { wall_step_ms_ += ms; }

  void At(int64_t delay_us, std::function<void()> work) {
    queue_.push({now_us_ + (delay_us < 0 ? 0 : delay_us), announced_++, std::move(work)});
  }
  // False: nothing will ever happen again.
  bool RunOne() {
    if (queue_.empty()) {
      return false;
    }
    // The order does not look at the work, so it may be moved out.
    std::function<void()> work = std::move(const_cast<Thing&>(queue_.top()).work);
    now_us_ = queue_.top().at_us;
    queue_.pop();
    ++handled_;
    work();
    return true;
  }

 private:
  static constexpr int64_t kWallStartMs = 1'700'000'000'000;
  struct Thing {
    int64_t at_us;
    uint64_t number;
    std::function<void()> work;
    bool operator<(const Thing& other) const {
      return std::make_pair(at_us, number) > std::make_pair(other.at_us, other.number);
    }
  };
  std::priority_queue<Thing> queue_;
  int64_t now_us_ = 0;
  int64_t wall_step_ms_ = 0;
  int64_t handled_ = 0;
  uint64_t announced_ = 0;
};

}  // namespace ravel::coordinator::simulation
