#pragma once

// Time, passed in: code that decides or waits takes a Clock, so that tests hold its hands.

#include <chrono>
#include <cstdint>

namespace ravel {

// Thread-safe.
class Clock {
 public:
  virtual ~Clock() = default;
  // Milliseconds since 1970 in UTC: for people and records. May jump.
  virtual int64_t NowMs() const = 0;
  // Never goes back: for durations and deadlines.
  virtual std::chrono::steady_clock::time_point SteadyNow() const = 0;

  // SteadyNow as whole milliseconds, for state that holds plain numbers.
  int64_t SteadyMs() const {
    return std::chrono::duration_cast<std::chrono::milliseconds>(SteadyNow().time_since_epoch())
        .count();
  }
};

class SystemClock : public Clock {
 public:
  static const SystemClock& Get();
  int64_t NowMs() const override;
  std::chrono::steady_clock::time_point SteadyNow() const override;
};

}  // namespace ravel
