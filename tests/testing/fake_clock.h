#pragma once

#include <atomic>
#include <cstdint>

#include "common/clock.h"

namespace ravel::testing {

// Stands still until told to advance. Thread-safe.
class FakeClock : public Clock {
 public:
  int64_t WallMs() const override { return kStartMs + elapsed_ms_.load(); }
  int64_t MonotonicMs() const override { return 1000 + elapsed_ms_.load(); }
  void AdvanceMs(int64_t ms) { elapsed_ms_ += ms; }

 private:
  static constexpr int64_t kStartMs = 1'700'000'000'000;
  std::atomic<int64_t> elapsed_ms_{0};
};

}  // namespace ravel::testing
