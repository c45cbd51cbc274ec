#include "common/clock.h"

namespace ravel {

const SystemClock& SystemClock::Get() {
  static const SystemClock clock;
  return clock;
}

int64_t SystemClock::NowMs() const {
  return std::chrono::duration_cast<std::chrono::milliseconds>(
             std::chrono::system_clock::now().time_since_epoch())
      .count();
}

std::chrono::steady_clock::time_point SystemClock::SteadyNow() const {
  return std::chrono::steady_clock::now();
}

}  // namespace ravel
