#include "common/clock.h"

#include <chrono>

namespace ravel {
namespace {

template <typename TimePoint>
int64_t Milliseconds(TimePoint time) {
  return std::chrono::duration_cast<std::chrono::milliseconds>(time.time_since_epoch()).count();
}

}  // namespace

const SystemClock& SystemClock::Get() {
  static const SystemClock clock;
  return clock;
}

int64_t SystemClock::WallMs() const {
  return Milliseconds(std::chrono::system_clock::now());
}

int64_t SystemClock::MonotonicMs() const {
  return Milliseconds(std::chrono::steady_clock::now());
}

}  // namespace ravel
