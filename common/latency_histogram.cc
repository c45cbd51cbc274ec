#include "common/latency_histogram.h"

#include <algorithm>
#include <cmath>

namespace ravel {
namespace {

constexpr double kMostSeconds = 1e6;  // what is longer would overflow the sum, and means nothing

}  // namespace

void LatencyHistogram::Record(double seconds) {
  // NaN compares false with everything, and counts as 0 too.
  const double taken = seconds > 0 ? std::min(seconds, kMostSeconds) : 0;
  const auto* const bound = std::lower_bound(kBoundsSeconds.begin(), kBoundsSeconds.end(), taken);
  counts_[static_cast<size_t>(bound - kBoundsSeconds.begin())].fetch_add(1);
  sum_us_.fetch_add(std::llround(taken * 1e6));
}

LatencyHistogram::Look LatencyHistogram::Get() const {
  Look look;
  for (size_t i = 0; i < counts_.size(); ++i) {
    look.counts[i] = counts_[i].load();
  }
  look.sum_seconds = static_cast<double>(sum_us_.load()) / 1e6;
  return look;
}

}  // namespace ravel
