#pragma once

// Processor time, for bounds on work: other processes and a thread that is not scheduled count for
// nothing.

#include <ctime>

namespace ravel::testing {

inline double CpuMs(clockid_t clock) {
  timespec now = {};
  clock_gettime(clock, &now);
  return static_cast<double>(now.tv_sec) * 1e3 + static_cast<double>(now.tv_nsec) / 1e6;
}
// This thread has used so much so far.
inline double ThreadCpuMs() {
  return CpuMs(CLOCK_THREAD_CPUTIME_ID);
}
// All threads of this process have used so much so far.
inline double ProcessCpuMs() {
  return CpuMs(CLOCK_PROCESS_CPUTIME_ID);
}

}  // namespace ravel::testing
