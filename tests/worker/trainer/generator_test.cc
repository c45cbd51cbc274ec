#include "worker/trainer/generator.h"

#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace ravel::trainer {
namespace {

using ::testing::ElementsAre;
using ::testing::StartsWith;

TEST(GenerateRequestTest, EveryFieldIsTaken) {
  const absl::StatusOr<GenerateRequest> request = ParseGenerateRequest(
      R"({"tokens":[1,2147483647],"maxNewTokens":5,"temperature":0.5,"topK":3,"seed":9,)"
      R"("stopToken":2147483647})");
  ASSERT_TRUE(request.ok()) << request.status();
  EXPECT_THAT(request->tokens, ElementsAre(1, 2147483647));
  EXPECT_EQ(request->max_new_tokens, 5);
  EXPECT_EQ(request->temperature, 0.5);
  EXPECT_EQ(request->top_k, 3);
  EXPECT_EQ(request->seed, 9u);
  EXPECT_EQ(request->stop_token, 2147483647);
}

TEST(GenerateRequestTest, WhatAFieldCannotHoldIsRefusedByItsName) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {R"({"tokens":[2147483648]})", "tokens: "},
      {R"({"tokens":[-1]})", "tokens: "},
      {R"({"tokens":[]})", "tokens: "},
      {R"({"tokens":[1],"stopToken":2147483648})", "stopToken: "},
      {R"({"tokens":[1],"stopToken":-2})", "stopToken: "},
      {R"({"tokens":[1],"maxNewTokens":-1})", "maxNewTokens: "},
      {R"({"tokens":[1],"temperature":-0.5})", "temperature: "},
      {R"({"tokens":[1],"topK":-1})", "topK: "},
      {R"({"tokens":[1],"seed":-1})", "seed: "},
      {R"({"tokens":[1],"more":1})", "more: "}};
  for (const auto& [text, field] : cases) {
    EXPECT_THAT(std::string(ParseGenerateRequest(text).status().message()), StartsWith(field))
        << text;
  }
}

}  // namespace
}  // namespace ravel::trainer
