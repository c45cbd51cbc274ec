#pragma once

// Counts how long things took, in fixed steps: what a histogram of Prometheus is made of.

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace ravel {

// Thread-safe: threads record while another one looks. A look may miss what is recorded meanwhile,
// and is whole in itself: its count is the sum of its steps.
class LatencyHistogram {
 public:
  static constexpr std::array<double, 14> kBoundsSeconds = {
      0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10};
  struct Look {
    // Number of records up to each bound and above the one before; the last: above all bounds.
    std::array<int64_t, kBoundsSeconds.size() + 1> counts = {};
    double sum_seconds = 0;
    int64_t Count() const {
      int64_t count = 0;
      for (const int64_t one : counts) {
        count += one;
      }
      return count;
    }
  };

  // A negative time counts as 0.
  void Record(double seconds);
  Look Get() const;

 private:
  std::array<std::atomic<int64_t>, kBoundsSeconds.size() + 1> counts_ = {};
  std::atomic<int64_t> sum_us_ = 0;
};

}  // namespace ravel
