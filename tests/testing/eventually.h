#pragma once

// Waiting for the world in tests: a condition is asked again and again until it holds or the
// deadline passes.

#include <chrono>

#include <poll.h>

namespace ravel::testing {

// Pauses between two looks at the world; never a way to wait for something to have happened.
inline void PauseBetweenLooks(std::chrono::milliseconds pause) {
  ::poll(nullptr, 0, static_cast<int>(pause.count()));
}

// True as soon as condition() is; false when it was still false at the deadline.
template <typename Condition>
bool Eventually(std::chrono::milliseconds deadline, Condition condition) {
  const auto end = std::chrono::steady_clock::now() + deadline;
  while (!condition()) {
    if (std::chrono::steady_clock::now() >= end) {
      return false;
    }
    PauseBetweenLooks(std::chrono::milliseconds(10));
  }
  return true;
}

}  // namespace ravel::testing
