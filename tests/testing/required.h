#pragma once

// Means that a developer's machine may lack and CI's may not. RAVEL_REQUIRE lists those that must
// be there, such as "namespaces,tbf"; a test that lacks one of them fails instead of being skipped.

#include <algorithm>
#include <cstdlib>
#include <iterator>

#include <absl/strings/str_split.h>
#include <absl/strings/string_view.h>
#include <gtest/gtest.h>

namespace ravel::testing {

// namespaces: network and mount namespaces, and ip. tbf: the qdisc that slows a link. mounts: a
// tmpfs of the test's own. moto: tests/testing/moto.sh. swift: its Debian packages. cuda: a build
// with the toolkit. corpus: the quickstart's text. Scripts of tests/deploy ask for the last three.
inline constexpr absl::string_view kMeans[] = {"namespaces",
                                               "tbf",
                                               "mounts",
                                               "fuse",
                                               "landlock",
                                               "moto",
                                               "swift",
                                               "cuda",
                                               "systemd",
                                               "promtool",
                                               "corpus"};

// A name in RAVEL_REQUIRE that is not one of kMeans fails the test.
inline bool IsRequired(absl::string_view means) {
  const char* const listed = std::getenv("RAVEL_REQUIRE");
  bool required = false;
  for (const absl::string_view name :
       absl::StrSplit(listed == nullptr ? "" : listed, ',', absl::SkipEmpty())) {
    EXPECT_NE(std::find(std::begin(kMeans), std::end(kMeans), name), std::end(kMeans))
        << "RAVEL_REQUIRE: there are no means '" << name << "'";
    required = required || name == means;
  }
  return required;
}

// Skips the test, or fails it where the means are required. The caller returns.
inline void SkipWithout(absl::string_view means, absl::string_view why) {
  ASSERT_FALSE(IsRequired(means)) << why << "; RAVEL_REQUIRE lists " << means;
  GTEST_SKIP() << why;
}

}  // namespace ravel::testing
