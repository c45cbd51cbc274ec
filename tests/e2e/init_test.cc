// `ravel-coordinator init` makes a whole cluster or none, also when it is killed, or when two begin
// at once.

#include <chrono>
#include <filesystem>
#include <string>

#include <absl/strings/ascii.h>
#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_replace.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/testing/eventually.h"
#include "tests/testing/mini_cluster.h"
#include "tests/testing/process.h"

namespace ravel::testing {
namespace {

using std::chrono::seconds;
using ::testing::HasSubstr;

bool HasEntry(const std::string& folder, const std::string& start) {
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(folder, error)) {
    if (absl::StartsWith(entry.path().filename().string(), start)) {
      return true;
    }
  }
  return false;
}

// Killed as soon as a file is there, an init has made a whole cluster, or is made again: never one
// with an authority and without an administrator.
TEST(InitTest, OneThatIsKilledIsMadeAgain) {
  for (const char* sign : {"tls.part-", "access.db", "store-tokens.key", "admin.context.json"}) {
    const ScratchFolder scratch;
    const std::string state = scratch.path() + "/state";
    const ProcessOptions init = {
        .arguments =
            {BinaryPath("ravel-coordinator"), "init", "--state-dir", state, "--name", "127.0.0.1"},
        .output_path = scratch.path() + "/killed.out",
        .error_path = scratch.path() + "/killed.err"};
    const auto killed = ChildProcess::Start(init);
    ASSERT_TRUE(killed.ok()) << killed.status();
    while ((*killed)->Running() && !HasEntry(state, sign)) {
    }
    (*killed)->Kill();
    const bool whole = std::filesystem::exists(state + "/tls");
    const RunResult again = RunProgram(init, scratch.path(), seconds(30));
    EXPECT_EQ(again.exit_code == 0, !whole) << sign << ": " << again.err;
    EXPECT_FALSE(HasEntry(state, "tls.part-")) << sign;
    const std::string authority = ReadText(state + "/tls/ca.pem");
    EXPECT_FALSE(authority.empty()) << sign;
    EXPECT_THAT(ReadText(state + "/admin.context.json"),
                HasSubstr(absl::StrReplaceAll(authority, {{"\n", "\\n"}})))
        << sign << ": the administrator is of another authority";
  }
}

// Both begin before either has written anything, or one when the other has written a part.
TEST(InitTest, OneOfTwoAtOnceMakesTheClusterAndTheOtherSaysSo) {
  const ScratchFolder scratch;
  for (const char* sign : {"", "tls.part-", "access.db", "admin.context.json"}) {
    const std::string state = absl::StrCat(scratch.path(), "/state-", sign);
    const auto init = [&](int which) {
      return ProcessOptions{.arguments = {BinaryPath("ravel-coordinator"),
                                          "init",
                                          "--state-dir",
                                          state,
                                          "--name",
                                          "127.0.0.1"},
                            .output_path = absl::StrCat(state, which, ".out"),
                            .error_path = absl::StrCat(state, which, ".err")};
    };
    const auto first = ChildProcess::Start(init(1));
    ASSERT_TRUE(first.ok()) << first.status();
    while (*sign != 0 && (*first)->Running() && !HasEntry(state, sign)) {
    }
    const auto second = ChildProcess::Start(init(2));
    ASSERT_TRUE(second.ok()) << second.status();
    const int codes[] = {(*first)->Wait(seconds(30)).value_or(-1),
                         (*second)->Wait(seconds(30)).value_or(-1)};
    ASSERT_NE(codes[0] == 0, codes[1] == 0) << sign << ": " << codes[0] << " and " << codes[1];
    const std::string refused = ReadText(absl::StrCat(state, codes[0] == 0 ? 2 : 1, ".err"));
    EXPECT_THAT(refused,
                ::testing::AnyOf(HasSubstr("another `init` is at work there"),
                                 HasSubstr("has an authority already")))
        << sign;
    EXPECT_FALSE(HasEntry(state, "tls.part-")) << sign;

    // Whole: the administrator is known to the coordinator of this state.
    const std::string ports = state + ".port";
    const auto coordinator = ChildProcess::Start({.arguments = {BinaryPath("ravel-coordinator"),
                                                                "--listen",
                                                                "127.0.0.1:0",
                                                                "--state-dir",
                                                                state,
                                                                "--port-file",
                                                                ports},
                                                  .error_path = state + ".log"});
    ASSERT_TRUE(coordinator.ok()) << coordinator.status();
    ASSERT_TRUE(Eventually(seconds(30), [&] { return !ReadText(ports).empty(); }))
        << ReadText(state + ".log");
    const std::string port(absl::StripAsciiWhitespace(ReadText(ports)));
    const RunResult who = RunProgram({.arguments = {BinaryPath("ravelctl"),
                                                    "--context",
                                                    state + "/admin.context.json",
                                                    "--coordinator",
                                                    "127.0.0.1:" + port,
                                                    "whoami"},
                                      .environment = {{"RAVEL_CONFIG_DIR", scratch.path()}}},
                                     scratch.path(),
                                     seconds(30));
    EXPECT_EQ(who.exit_code, 0) << sign << ": " << who.err;
    EXPECT_THAT(who.out, HasSubstr("admin")) << sign;
  }
}

}  // namespace
}  // namespace ravel::testing
