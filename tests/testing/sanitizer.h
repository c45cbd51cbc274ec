#pragma once

// Tells whether a sanitizer watches this program. It makes a test 3 to 15 times as slow, and looks
// at code, not at numbers: tests of many random cases take a part of them then.

namespace ravel::testing {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif

// The number of cases that run of `count`: count / part, at least one, under a sanitizer; else all.
template <typename Number>
constexpr Number Fewer(Number count, Number part) {
  return !kSanitized ? count : count / part > 1 ? count / part : 1;
}

}  // namespace ravel::testing
