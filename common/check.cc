#include "common/check.h"

namespace ravel {

void CheckFailed(const char* file, int line, const char* condition, const char* message) {
  std::fprintf(stderr, "%s:%d: CHECK failed: %s %s\n", file, line, condition, message);
  std::fflush(stderr);
  std::abort();
}

int64_t DivExact(int64_t a, int64_t b) {
  CHECK(b != 0 && a % b == 0);
  return a / b;
}

}  // namespace ravel
