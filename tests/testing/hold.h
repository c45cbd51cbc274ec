#pragma once

// Delays that fakes add on purpose, so that threads drift apart. A test that waits for something to
// happen takes eventually.h.

#include <chrono>
#include <cstdint>
#include <thread>

#include <sys/prctl.h>

#include "common/mutex.h"

namespace ravel::testing {

// Sleeps until `end`, so that other threads have the processor.
inline void HoldUntil(std::chrono::steady_clock::time_point end) {
  // The kernel rounds a short wait up to 50 us otherwise.
  thread_local const int precise = prctl(PR_SET_TIMERSLACK, 1UL, 0UL, 0UL, 0UL);
  static_cast<void>(precise);
  Mutex mutex;
  CondVar never;
  const MutexLock lock(mutex);
  for (auto now = std::chrono::steady_clock::now(); now < end;
       now = std::chrono::steady_clock::now()) {
    never.WaitFor(mutex, end - now);
  }
}

// Short delays yield: going to sleep and waking up would cost as much as they last.
inline void HoldFor(std::chrono::microseconds delay) {
  constexpr std::chrono::microseconds kYields{10};
  const auto end = std::chrono::steady_clock::now() + delay;
  if (delay > kYields) {
    HoldUntil(end);
    return;
  }
  while (std::chrono::steady_clock::now() < end) {
    std::this_thread::yield();
  }
}

// Bits that look random and depend on `value` alone: the finalizer of splitmix64. A generator with
// a large state costs more to seed than most delays last.
inline uint64_t ScatteredBits(uint64_t value) {
  value += 0x9E3779B97F4A7C15U;
  value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9U;
  value = (value ^ (value >> 27)) * 0x94D049BB133111EBU;
  return value ^ (value >> 31);
}

}  // namespace ravel::testing
