#pragma once

// Time, passed in: code that decides or waits takes a Clock, so that tests hold its hands.

#include <cstdint>

namespace ravel {

// Thread-safe.
class Clock {
 public:
  virtual ~Clock() = default;
  // Milliseconds since 1970 in UTC: for people and records. May jump.
  virtual int64_t WallMs() const = 0;
  // Milliseconds since some start; never goes back: for durations and deadlines.
  virtual int64_t MonotonicMs() const = 0;
};

class SystemClock : public Clock {
 public:
  static const SystemClock& Get();
  int64_t WallMs() const override;
  int64_t MonotonicMs() const override;
};

}  // namespace ravel
