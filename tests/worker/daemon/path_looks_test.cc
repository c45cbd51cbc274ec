#include "worker/daemon/path_looks.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <filesystem>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <string>

#include <absl/strings/str_replace.h>
#include <boost/asio/io_context.hpp>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/testing/eventually.h"
#include "tests/testing/process.h"
#include "worker/daemon/look_messages_proto.h"

namespace ravel::daemon {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::HasSubstr;

using Answer = std::optional<absl::StatusOr<PathFacts>>;

// The answer of a look, in the loop of this thread. The loop judges the look: it does so when
// `there` says that the look has come to where the test wants it.
Answer Ask(
    PathLooks& looks,
    boost::asio::io_context& context,
    const PathQuery& query,
    milliseconds all_limit = seconds(20),
    const std::function<bool()>& there = [] { return true; }) {
  Answer answer;
  looks.Start(query, all_limit, [&answer](absl::StatusOr<PathFacts> facts) {
    EXPECT_FALSE(answer.has_value()) << "answered once";
    answer = std::move(facts);
  });
  EXPECT_TRUE(testing::Eventually(seconds(20), there));
  context.restart();
  while (!answer && context.run_one_for(seconds(20)) > 0) {
  }
  return answer;
}

TEST(PathLooksTest, FactsComeFromAThreadOfTheirOwn) {
  testing::ScratchFolder scratch;
  testing::WriteText(scratch.path() + "/tokens.bin", std::string("\1\0\2\0", 4));
  boost::asio::io_context context;
  PathLooks looks(context, seconds(20));
  const Answer answer =
      Ask(looks,
          context,
          {.token_files = {{"spec.data.train[0].path", scratch.path() + "/tokens.bin"}},
           .format = TokenFormat::kFlatU16});
  ASSERT_TRUE(answer.has_value() && answer->ok());
  ASSERT_EQ((*answer)->token_files.size(), 1u);
  EXPECT_EQ((*answer)->token_files[0].tokens, 2);
  EXPECT_EQ((*answer)->token_files[0].largest_id, 2);
  EXPECT_EQ((*answer)->silent_field, "");
}

TEST(PathLooksTest, OutsideOfTheRootsNothingTellsWhatIsThere) {
  testing::ScratchFolder scratch;
  std::filesystem::create_directories(scratch.path() + "/data");
  std::filesystem::create_directories(scratch.path() + "/model");
  testing::WriteText(scratch.path() + "/tokens.bin", std::string("\1\0\2\0", 4));
  testing::WriteText(scratch.path() + "/data/tokens.bin", std::string("\1\0\2\0", 4));
  testing::WriteText(scratch.path() + "/tokenizer.json", "{}");
  testing::WriteText(scratch.path() + "/model/config.json", "{}");
  std::filesystem::create_symlink("../tokens.bin", scratch.path() + "/data/link");
  boost::asio::io_context context;
  PathLooks looks(
      context, seconds(20), LookBeneath(*PathRoots::Create({.read = {scratch.path() + "/data"}})));
  const auto told = [&](const std::string& token_file, const std::string& rest) {
    const Answer answer =
        Ask(looks,
            context,
            {.token_files = {{"spec.data.train[0].path", scratch.path() + "/data/tokens.bin"},
                             {"spec.data.train[1].path", scratch.path() + token_file}},
             .format = TokenFormat::kFlatU16,
             .tokenizer = {"spec.data.tokenizer", scratch.path() + "/tokenizer" + rest},
             .model_directory = {"spec.model.from", scratch.path() + "/model" + rest}});
    EXPECT_TRUE(answer.has_value() && answer->ok());
    const PathFacts& facts = **answer;
    EXPECT_EQ(facts.token_files[0].tokens, 2) << "beneath a root";
    EXPECT_EQ(facts.token_files[1].tokens, 0);
    EXPECT_EQ(facts.model.config, "");
    EXPECT_FALSE(facts.tokenizer);
    return absl::StrReplaceAll(facts.token_files[1].error + facts.model.error,
                               {{token_file, "PATH"}, {rest, ""}});
  };
  const std::string there = told("/tokens.bin", ".json");
  EXPECT_THAT(there, HasSubstr("outside of the folders that this node opens for jobs"));
  EXPECT_EQ(there, told("/absent.bin", ".absent"));
  EXPECT_THAT(told("/data/link", ".json"), HasSubstr("symbolic link"));
}

TEST(PathLooksTest, AJobWhoseNeedsAreRefusedIsNotLookedAt) {
  boost::asio::io_context context;
  PathLooks looks(
      context, seconds(20), LookBeneath(PathRoots(), LaunchRules{.allowed = {"NCCL_*"}}));
  PathQuery query{.token_files = {{"spec.data.train[0].path", "/nowhere/tokens.bin"}},
                  .needs = {.namespace_name = "team", .environment = {{"MY_KEY", "s3/key"}}}};
  Answer answer = Ask(looks, context, query);
  ASSERT_TRUE(answer.has_value() && answer->ok());
  EXPECT_EQ((*answer)->refused_field, "environment[0].name");
  EXPECT_THAT((*answer)->refusal, HasSubstr("MY_KEY: this node allows no variable"));
  EXPECT_TRUE((*answer)->token_files.empty());
  query.needs.environment = {{"NCCL_DEBUG"}};
  answer = Ask(looks, context, query);
  ASSERT_TRUE(answer.has_value() && answer->ok());
  EXPECT_EQ((*answer)->refused_field, "");
  EXPECT_EQ((*answer)->token_files.size(), 1u);
}

TEST(PathLooksTest, SecretsThatHangAreAskedForOnce) {
  std::promise<void> mount_is_back;
  const std::shared_future<void> back = mount_is_back.get_future().share();
  const auto hung = std::make_shared<std::atomic<int>>(0);
  const PathQuery secret{.needs = {.environment = {{"MY_KEY", "s3/key"}}}};
  boost::asio::io_context context;
  {
    const PathLooks::LookFunction beneath = LookBeneath(PathRoots(), {});
    PathLooks looks(context, milliseconds(20), [=](const PathQuery& query, const LookHooks& hooks) {
      return beneath(query, {.at = [&](const NamedPath& path) {
                       hooks.at(path);
                       ++*hung;
                       back.wait();
                     }});
    });
    for (int i = 0; i < 2 * PathLooks::kMaxThreads; ++i) {
      const Answer answer = Ask(looks, context, secret, seconds(20), [&] { return *hung == 1; });
      ASSERT_TRUE(answer.has_value() && answer->ok()) << answer->status();
      EXPECT_EQ((*answer)->silent_field, "spec.environment");
      EXPECT_THAT((*answer)->silence,
                  HasSubstr(i == 0 ? "no answer within" : "at the secrets of jobs still hangs"));
    }
  }
  mount_is_back.set_value();
}

TEST(PathLooksTest, AMountThatHangsIsNamedInTimeAndOnlySoManyMayHang) {
  std::promise<void> server_is_back;
  const std::shared_future<void> back = server_is_back.get_future().share();
  const auto hung = std::make_shared<std::atomic<int>>(0);
  boost::asio::io_context context;
  {
    PathLooks looks(context,
                    milliseconds(20),
                    [back, hung](const PathQuery& /*query*/, const LookHooks& hooks) {
                      hooks.at({"spec.model.from", "/good/model/config.json"});
                      hooks.at({"spec.data.train[3].path", "/hung/tokens"});
                      ++*hung;
                      back.wait();
                      return PathFacts();
                    });
    for (int i = 0; i < PathLooks::kMaxThreads; ++i) {
      const Answer answer = Ask(looks, context, {}, seconds(20), [&] { return *hung == i + 1; });
      ASSERT_TRUE(answer.has_value() && answer->ok());
      EXPECT_EQ((*answer)->silent_field, "spec.data.train[3].path");
      EXPECT_EQ((*answer)->silence, "no answer within 20 ms");
    }
    const Answer refused = Ask(looks, context, {});
    EXPECT_TRUE(absl::IsResourceExhausted(refused->status())) << refused->status();
    EXPECT_THAT(std::string(refused->status().message()), HasSubstr("still hang"));
  }
  server_is_back.set_value();  // after their owner's end: they find the gate closed
}

// A dead mount that is named again and again uses up no threads.
TEST(PathLooksTest, AFolderInWhichALookHangsIsNotLookedAtAgainUntilItAnswers) {
  std::promise<void> server_is_back;
  const std::shared_future<void> back = server_is_back.get_future().share();
  std::atomic<int> looks_begun = 0;
  boost::asio::io_context context;
  PathLooks looks(context, seconds(20), [&](const PathQuery& query, const LookHooks& hooks) {
    hooks.at(query.token_files[0]);
    ++looks_begun;
    if (query.token_files[0].path != "/good/tokens") {
      back.wait();
    }
    return PathFacts();
  });
  const PathQuery hung{.token_files = {{"spec.data.train[0].path", "/hung/tokens"}}};
  const PathQuery beside{.token_files = {{"spec.data.train[0].path", "/hung/others"}}};
  const PathQuery good{.token_files = {{"spec.data.train[0].path", "/good/tokens"}}};
  EXPECT_EQ(
      (*Ask(looks, context, hung, milliseconds(20), [&] { return looks_begun == 1; }))->silence,
      "no answer within 20 ms");
  for (int i = 0; i < 2 * PathLooks::kMaxThreads; ++i) {
    const Answer answer = Ask(looks, context, beside);
    EXPECT_EQ((*answer)->silent_field, "spec.data.train[0].path");
    EXPECT_EQ((*answer)->silence, "no answer: an earlier look at /hung still hangs");
  }
  EXPECT_EQ((*Ask(looks, context, good))->silent_field, "");
  EXPECT_EQ(looks_begun, 2);
  server_is_back.set_value();
  EXPECT_TRUE(testing::Eventually(seconds(20), [&] {
    return (*Ask(looks, context, hung))->silent_field.empty();
  })) << "the thread came back";
}

// The limit is for each path: many that answer may take longer together.
TEST(PathLooksTest, ATimeLimitBeginsAnewWithEachPathAndEndsTheWorkOfAll) {
  using Clock = std::chrono::steady_clock;
  constexpr milliseconds kEach{400};
  // A thread that does not run for that long has not answered in time: such a try proves nothing.
  Clock::duration longest_pause = kEach;
  for (int i = 0; i < 20 && longest_pause >= kEach; ++i) {
    boost::asio::io_context context;
    std::promise<Clock::duration> abandoned;
    const auto start = Clock::now();
    PathLooks looks(
        context, kEach, [&abandoned, start](const PathQuery& /*query*/, const LookHooks& hooks) {
          Clock::duration longest{};
          Clock::time_point before = start;
          int path = 0;
          while (!hooks.abandoned()) {  // a path answers every few microseconds, without end
            hooks.at({std::to_string(++path), "/slow/tokens"});
            longest = std::max(longest, Clock::now() - before);
            before = Clock::now();
            if (before - start > seconds(20)) {
              break;
            }
          }
          abandoned.set_value(std::max(longest, Clock::now() - before));
          return PathFacts();
        });
    const Answer answer = Ask(looks, context, {}, milliseconds(1000));
    ASSERT_TRUE(answer.has_value() && answer->ok());
    EXPECT_NE((*answer)->silent_field, "");
    std::future<Clock::duration> pause = abandoned.get_future();
    ASSERT_EQ(pause.wait_for(seconds(30)), std::future_status::ready)
        << "the thread is told that nobody waits";
    longest_pause = pause.get();
    if (longest_pause < kEach) {
      EXPECT_EQ((*answer)->silence, "no answer within 1 s");
      EXPECT_GE(Clock::now() - start, milliseconds(1000));
    }
  }
  EXPECT_LT(longest_pause, kEach) << "no try could run";
}

TEST(LookMessagesTest, AQueryAndItsFactsAreCarriedWhole) {
  v1::Look look;
  look.set_token_format(static_cast<int>(TokenFormat::kFlatU32));
  for (const char* name : {"a", "b"}) {
    look.add_token_files()->set_field(name);
    look.mutable_token_files(look.token_files_size() - 1)->set_path(std::string("/") + name);
  }
  look.mutable_tokenizer()->set_path("/t");
  look.mutable_model_directory()->set_field("spec.model.from");
  look.mutable_model_directory()->set_path("/m");
  v1::JobNeeds& needs = *look.mutable_needs();
  needs.set_namespace_("team");
  needs.set_network("fast");
  needs.add_environment()->set_name("MY_KEY");
  needs.mutable_environment(0)->set_secret("s3/key");
  const absl::StatusOr<PathQuery> query = FromProto(look);
  ASSERT_TRUE(query.ok()) << query.status();
  EXPECT_EQ(query->format, TokenFormat::kFlatU32);
  ASSERT_EQ(query->token_files.size(), 2u);
  EXPECT_EQ(query->token_files[1].field, "b");
  EXPECT_EQ(query->token_files[1].path, "/b");
  EXPECT_EQ(query->tokenizer.path, "/t");
  EXPECT_EQ(query->model_directory.path, "/m");
  EXPECT_EQ(query->needs.namespace_name, "team");
  EXPECT_EQ(query->needs.network, "fast");
  ASSERT_EQ(query->needs.environment.size(), 1u);
  EXPECT_EQ(query->needs.environment[0].name, "MY_KEY");
  EXPECT_EQ(query->needs.environment[0].secret, "s3/key");

  const v1::LookResult result =
      ToProto(7,
              PathFacts{.token_files = {{.error = "bad"}, {.tokens = 5, .largest_id = 3}},
                        .tokenizer = true,
                        .model = {.error = "", .config = "\xff{}", .weights = true}});
  EXPECT_EQ(result.look_id(), 7);
  EXPECT_EQ(result.token_files(0).error(), "bad");
  EXPECT_EQ(result.token_files(1).tokens(), 5);
  EXPECT_EQ(result.token_files(1).largest_id(), 3);
  EXPECT_TRUE(result.tokenizer());
  EXPECT_EQ(result.model_config(), "\xff{}") << "what users write need not be UTF-8";
  EXPECT_TRUE(result.model_weights());
  EXPECT_EQ(ToProto(8, absl::ResourceExhaustedError("busy")).refused(), "busy");
  const v1::LookResult refused = ToProto(9, PathFacts{.refused_field = "f", .refusal = "why"});
  EXPECT_EQ(refused.refused_field(), "f");
  EXPECT_EQ(refused.refusal(), "why");
}

TEST(LookMessagesTest, WhatIsOverItsLimitIsRefused) {
  const auto refusal = [](const v1::Look& look) {
    return std::string(FromProto(look).status().message());
  };
  v1::Look many;
  for (int i = 0; i < 2049; ++i) {
    many.add_token_files()->set_path("/a");
  }
  EXPECT_THAT(refusal(many), HasSubstr("look.token_files"));
  v1::Look relative;
  relative.mutable_tokenizer()->set_path("tokenizer.json");
  EXPECT_THAT(refusal(relative), HasSubstr("look.tokenizer: expected an absolute path"));
  v1::Look large;
  large.mutable_model_directory()->set_path("/" + std::string(10'000, 'x'));
  EXPECT_THAT(refusal(large), HasSubstr("look.model_directory: expected at most"));
  v1::Look format;
  format.set_token_format(99);
  EXPECT_THAT(refusal(format), HasSubstr("look.token_format"));
  v1::Look variables;
  for (int i = 0; i < 65; ++i) {
    variables.mutable_needs()->add_environment()->set_name("A");
  }
  EXPECT_THAT(refusal(variables), HasSubstr("look.needs: expected at most 64 variables"));
  v1::Look network;
  network.mutable_needs()->set_network(std::string(10'000, 'x'));
  EXPECT_THAT(refusal(network), HasSubstr("look.needs: expected texts of at most"));
}

}  // namespace
}  // namespace ravel::daemon
