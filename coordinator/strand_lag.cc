#include "coordinator/strand_lag.h"

#include <algorithm>
#include <cmath>

#include <absl/strings/str_format.h>

#include "common/logging.h"

namespace ravel::coordinator {
namespace {

constexpr int64_t kMinuteUs = 60'000'000;
constexpr int64_t kAlarmEveryUs = 10'000'000;
constexpr int64_t kFewTurns = 100;  // a p99 of fewer is one turn

size_t BucketOf(int64_t us, size_t buckets) {
  const double bucket = us <= 1 ? 0 : 2 * std::log2(static_cast<double>(us));
  return std::min(static_cast<size_t>(std::ceil(bucket)), buckets - 1);
}

}  // namespace

void LagMeter::Histogram::Add(const char* name, int64_t waited_us, int64_t took_us) {
  waited_us = std::max<int64_t>(waited_us, 0);
  ++counts[BucketOf(waited_us, kBuckets)];
  ++turns;
  max_us = std::max(max_us, waited_us);
  if (took_us > longest_us) {
    longest_us = took_us;
    longest = name;
  }
}

void LagMeter::Histogram::Add(const Histogram& other) {
  for (size_t i = 0; i < kBuckets; ++i) {
    counts[i] += other.counts[i];
  }
  turns += other.turns;
  max_us = std::max(max_us, other.max_us);
  if (other.longest_us > longest_us) {
    longest_us = other.longest_us;
    longest = other.longest;
  }
}

double LagMeter::Histogram::PercentileMs(double part) const {
  int64_t left = static_cast<int64_t>(std::ceil(part * static_cast<double>(turns)));
  for (size_t i = 0; i < kBuckets; ++i) {
    left -= counts[i];
    if (left <= 0) {
      return std::min(std::exp2(static_cast<double>(i) / 2), static_cast<double>(max_us)) / 1000;
    }
  }
  return static_cast<double>(max_us) / 1000;
}

LagSummary LagMeter::Histogram::Summary() const {
  return {turns,
          PercentileMs(0.5),
          PercentileMs(0.99),
          static_cast<double>(max_us) / 1000,
          static_cast<double>(longest_us) / 1000,
          longest};
}

void LagMeter::Record(const char* name, int64_t waited_us, int64_t took_us, int64_t now_us) {
  std::string alarm;
  {
    MutexLock lock(mutex_);
    if (minute_us_ == 0 || now_us - minute_us_ >= kMinuteUs) {
      const bool gap = now_us - minute_us_ >= 2 * kMinuteUs;
      before_ = gap ? Histogram() : now_;
      now_ = Histogram();
      minute_us_ = now_us;
    }
    now_.Add(name, waited_us, took_us);
    total_.Add(name, waited_us, took_us);
    const bool long_turn = took_us > kTurnAlarmUs;
    // The percentile is looked at now and then: it costs a walk over the buckets.
    const bool look = long_turn || (waited_us > kLagAlarmUs && now_.turns >= kFewTurns);
    if (look && (alarm_us_ == 0 || now_us - alarm_us_ >= kAlarmEveryUs)) {
      const LagSummary recent = now_.Summary();
      if (long_turn || recent.p99_ms * 1000 > kLagAlarmUs) {
        alarm_us_ = now_us;
        ++alarms_;
        alarm = absl::StrFormat(
            "the coordinator does not keep up: work waits p50 %.1f ms, p99 %.1f ms, max %.0f ms; "
            "the longest turn took %.0f ms (%s)",
            recent.p50_ms,
            recent.p99_ms,
            recent.max_ms,
            recent.longest_turn_ms,
            recent.longest_turn);
      }
    }
  }
  if (!alarm.empty()) {
    log::Warning(alarm);
  }
}

LagSummary LagMeter::LastMinute() const {
  MutexLock lock(mutex_);
  Histogram both = before_;
  both.Add(now_);
  return both.Summary();
}

LagSummary LagMeter::Total() const {
  MutexLock lock(mutex_);
  return total_.Summary();
}

int64_t LagMeter::alarms() const {
  MutexLock lock(mutex_);
  return alarms_;
}

}  // namespace ravel::coordinator
