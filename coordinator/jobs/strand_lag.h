#pragma once

// Measures the time that work waits for the controller's strand, and the longest turn on it: the
// wait is the one number that shows whether the coordinator keeps up.

#include <array>
#include <cstdint>
#include <string>

#include <absl/base/thread_annotations.h>

#include "common/mutex.h"

namespace ravel::coordinator {

struct LagSummary {
  int64_t turns = 0;
  double p50_ms = 0;
  double p99_ms = 0;
  double max_ms = 0;
  double longest_turn_ms = 0;
  std::string longest_turn;  // its name
};

// Thread-safe.
class LagMeter {
 public:
  // One turn: how long it waited and took. `now_us` is monotonic. Logs an alarm when a turn took
  // more than kTurnAlarmUs or the last minute's p99 is above kLagAlarmUs, at most every 10 s.
  void Record(const char* name, int64_t waited_us, int64_t took_us, int64_t now_us);
  LagSummary LastMinute() const;  // of the minute before this one and of this one
  LagSummary Total() const;
  int64_t alarms() const;

  static constexpr int64_t kLagAlarmUs = 50'000;
  static constexpr int64_t kTurnAlarmUs = 250'000;

 private:
  // Upper bounds are powers of sqrt(2) microseconds: a percentile is right within 42 %, which tells
  // 5 ms from 50.
  static constexpr size_t kBuckets = 64;
  struct Histogram {
    std::array<int64_t, kBuckets> counts{};
    int64_t turns = 0;
    int64_t max_us = 0;
    int64_t longest_us = 0;
    const char* longest = "";
    void Add(const char* name, int64_t waited_us, int64_t took_us);
    void Add(const Histogram& other);
    double PercentileMs(double part) const;
    LagSummary Summary() const;
  };

  mutable Mutex mutex_;
  Histogram now_ ABSL_GUARDED_BY(mutex_);  // since minute_us_
  Histogram before_ ABSL_GUARDED_BY(mutex_);
  Histogram total_ ABSL_GUARDED_BY(mutex_);
  int64_t minute_us_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t alarm_us_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t alarms_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace ravel::coordinator
