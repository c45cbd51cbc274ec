#pragma once

// Durations of the newest steps of an epoch, and their p99: the longest that still is usual.

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

namespace ravel::coordinator {

class StepTimes {
 public:
  // The first steps take what they take: caches fill, gemms are measured.
  static constexpr int64_t kFirstSteps = 5;

  void Add(double seconds) {
    newest_[static_cast<size_t>(count_) % newest_.size()] = seconds;
    ++count_;
  }
  bool warm() const { return count_ >= kFirstSteps; }
  // Seconds of the 99th percentile of the newest 128 steps; 0: nothing is known yet.
  double P99() const {
    if (!warm()) {
      return 0;
    }
    const size_t known = std::min(static_cast<size_t>(count_), newest_.size());
    std::array<double, 128> sorted = newest_;
    const size_t rank = (known * 99 + 99) / 100 - 1;
    std::nth_element(sorted.begin(), sorted.begin() + rank, sorted.begin() + known);
    return sorted[rank];
  }

 private:
  std::array<double, 128> newest_{};
  int64_t count_ = 0;
};

}  // namespace ravel::coordinator
