#pragma once

// CHECK: for our own bugs, kept in release builds; the world's faults are absl::Status
// (common/status.h). Standard library only, so that device launchers may include it.

#include <cstdint>
#include <cstdio>
#include <cstdlib>

namespace ravel {

// Prints `file:line: CHECK failed: condition message` to stderr and aborts. Trainers map this to
// exit code 70.
[[noreturn]] void CheckFailed(const char* file,
                              int line,
                              const char* condition,
                              const char* message);

// a / b for a that b divides; anything else is a bug.
int64_t DivExact(int64_t a, int64_t b);
// The smallest integer >= a / b, for a >= 0 and b > 0.
constexpr int64_t DivCeil(int64_t a, int64_t b) {
  return a / b + (a % b == 0 ? 0 : 1);
}
// The smallest multiple of b that is >= a, for a >= 0 and b > 0.
constexpr int64_t RoundUp(int64_t a, int64_t b) {
  return DivCeil(a, b) * b;
}

}  // namespace ravel

#define RAVEL_CHECK_MESSAGE(condition, message)                      \
  do {                                                               \
    if (!(condition)) {                                              \
      ::ravel::CheckFailed(__FILE__, __LINE__, #condition, message); \
    }                                                                \
  } while (false)
#define CHECK(condition) RAVEL_CHECK_MESSAGE(condition, "")
// With a C string that says what the reader needs to know.
#define CHECK_MSG(condition, message) RAVEL_CHECK_MESSAGE(condition, message)
#define CHECK_EQ(a, b) CHECK((a) == (b))
#define CHECK_NE(a, b) CHECK((a) != (b))
#define CHECK_LE(a, b) CHECK((a) <= (b))
#define CHECK_LT(a, b) CHECK((a) < (b))
#define CHECK_GE(a, b) CHECK((a) >= (b))
#define CHECK_GT(a, b) CHECK((a) > (b))
