#include "coordinator/access/store_tokens.h"

#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include "common/job_token.h"
#include "tests/testing/process.h"

namespace ravel::coordinator {
namespace {

TEST(StoreTokensTest, TheKeyIsKeptAndIsTheOwnersAlone) {
  const testing::ScratchFolder state;
  const auto first = StoreTokens::Open(state.path());
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_EQ(StoreTokens::Open(state.path())->public_key(), first->public_key());
  struct stat facts = {};
  ASSERT_EQ(stat((state.path() + "/store-tokens.key").c_str(), &facts), 0);
  EXPECT_EQ(facts.st_mode & 0777, 0600U);
  const testing::ScratchFolder other;
  EXPECT_NE(StoreTokens::Open(other.path())->public_key(), first->public_key());
}

TEST(StoreTokensTest, ADamagedKeyIsNamedAndNotReplaced) {
  const testing::ScratchFolder state;
  for (const char* text : {"", "00", "no key"}) {
    testing::WriteText(state.path() + "/store-tokens.key", text);
    const absl::Status status = StoreTokens::Open(state.path()).status();
    EXPECT_TRUE(absl::IsDataLoss(status)) << status;
    EXPECT_THAT(std::string(status.message()), ::testing::HasSubstr("store-tokens.key"));
  }
}

TEST(StoreTokensTest, WhatItSignsItsKeyVerifies) {
  const testing::ScratchFolder state;
  const StoreTokens tokens = *StoreTokens::Open(state.path());
  const JobToken token{
      .folder = JobFolderHash("team/job"), .job_tag = 0x3f2a9c01, .epoch = 7, .node = "n1"};
  EXPECT_EQ(*CheckJobToken(*tokens.Sign(token), {tokens.public_key()}), token);
}

}  // namespace
}  // namespace ravel::coordinator
