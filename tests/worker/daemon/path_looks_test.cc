#include "worker/daemon/path_looks.h"

#include <atomic>
#include <future>
#include <optional>
#include <string>

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

// The answer of a look, in the loop of this thread.
Answer Ask(PathLooks& looks,
           boost::asio::io_context& context,
           const PathQuery& query,
           milliseconds all_limit = seconds(20)) {
  Answer answer;
  looks.Start(query, all_limit, [&answer](absl::StatusOr<PathFacts> facts) {
    EXPECT_FALSE(answer.has_value()) << "answered once";
    answer = std::move(facts);
  });
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

TEST(PathLooksTest, AMountThatHangsIsNamedInTimeAndOnlySoManyMayHang) {
  std::promise<void> server_is_back;
  const std::shared_future<void> back = server_is_back.get_future().share();
  boost::asio::io_context context;
  {
    PathLooks looks(
        context, milliseconds(20), [back](const PathQuery& /*query*/, const LookHooks& hooks) {
          hooks.at({"spec.model.from", "/good/model/config.json"});
          hooks.at({"spec.data.train[3].path", "/hung/tokens"});
          back.wait();
          return PathFacts();
        });
    for (int i = 0; i < PathLooks::kMaxThreads; ++i) {
      const Answer answer = Ask(looks, context, {});
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
  PathLooks looks(context, milliseconds(20), [&](const PathQuery& query, const LookHooks& hooks) {
    ++looks_begun;
    hooks.at(query.token_files[0]);
    if (query.token_files[0].path != "/good/tokens") {
      back.wait();
    }
    return PathFacts();
  });
  const PathQuery hung{.token_files = {{"spec.data.train[0].path", "/hung/tokens"}}};
  const PathQuery beside{.token_files = {{"spec.data.train[0].path", "/hung/others"}}};
  const PathQuery good{.token_files = {{"spec.data.train[0].path", "/good/tokens"}}};
  EXPECT_EQ((*Ask(looks, context, hung))->silence, "no answer within 20 ms");
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
  boost::asio::io_context context;
  std::promise<void> abandoned;
  PathLooks looks(
      context, milliseconds(400), [&abandoned](const PathQuery& /*query*/, const LookHooks& hooks) {
        const auto start = std::chrono::steady_clock::now();
        int path = 0;
        while (!hooks.abandoned()) {  // a path answers every few microseconds, without end
          hooks.at({std::to_string(++path), "/slow/tokens"});
          if (std::chrono::steady_clock::now() - start > seconds(20)) {
            return PathFacts();
          }
        }
        abandoned.set_value();
        return PathFacts();
      });
  const auto start = std::chrono::steady_clock::now();
  const Answer answer = Ask(looks, context, {}, milliseconds(1000));
  ASSERT_TRUE(answer.has_value() && answer->ok());
  EXPECT_EQ((*answer)->silence, "no answer within 1 s");
  EXPECT_NE((*answer)->silent_field, "");
  EXPECT_GE(std::chrono::steady_clock::now() - start, milliseconds(1000));
  EXPECT_EQ(abandoned.get_future().wait_for(seconds(20)), std::future_status::ready)
      << "the thread is told that nobody waits";
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
  const absl::StatusOr<PathQuery> query = FromProto(look);
  ASSERT_TRUE(query.ok()) << query.status();
  EXPECT_EQ(query->format, TokenFormat::kFlatU32);
  ASSERT_EQ(query->token_files.size(), 2u);
  EXPECT_EQ(query->token_files[1].field, "b");
  EXPECT_EQ(query->token_files[1].path, "/b");
  EXPECT_EQ(query->tokenizer.path, "/t");
  EXPECT_EQ(query->model_directory.path, "/m");

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
}

}  // namespace
}  // namespace ravel::daemon
