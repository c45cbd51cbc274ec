#include "common/job_token.h"

#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/crypto.h"

namespace ravel {
namespace {

const std::string kPrivate(32, 'k');
const JobToken kToken{
    .folder = JobFolderHash("team/job"), .job_tag = 0x3f2a9c01, .epoch = 7, .node = "n1.example"};

TEST(JobTokenTest, WhatIsSignedIsReadBack) {
  const std::string text = *FormatJobToken(kToken, kPrivate);
  EXPECT_LT(text.size(), 300U);
  const std::vector<std::string> keys = {PublicKeyOf(std::string(32, 'o')), PublicKeyOf(kPrivate)};
  const absl::StatusOr<JobToken> read = CheckJobToken(text, keys);
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(*read, kToken);
  JobToken small = kToken;
  small.job_tag = 1;
  EXPECT_EQ(CheckJobToken(*FormatJobToken(small, kPrivate), keys)->job_tag, 1U);
}

TEST(JobTokenTest, NoByteOfItMayChange) {
  const std::string text = *FormatJobToken(kToken, kPrivate);
  const std::vector<std::string> keys = {PublicKeyOf(kPrivate)};
  for (size_t i = 0; i < text.size(); ++i) {
    std::string other = text;
    other[i] = other[i] == '1' ? '2' : '1';
    const absl::StatusOr<JobToken> read = CheckJobToken(other, keys);
    EXPECT_TRUE(absl::IsPermissionDenied(read.status())) << i << ": " << other;
    EXPECT_THAT(std::string(read.status().message()), ::testing::Not(::testing::HasSubstr(other)));
    EXPECT_FALSE(CheckJobToken(text.substr(0, i), keys).ok()) << i;
  }
  EXPECT_FALSE(CheckJobToken(text + " ", keys).ok());
  EXPECT_FALSE(CheckJobToken(text, {}).ok());
  EXPECT_FALSE(CheckJobToken(text, {PublicKeyOf(std::string(32, 'o'))}).ok());
  EXPECT_FALSE(CheckJobToken(std::string(1 << 20, ' '), keys).ok());
}

TEST(JobTokenTest, ANodesIdCannotAddFields) {
  for (const char* node : {"", "n1 8", "n1\n"}) {
    JobToken token = kToken;
    token.node = node;
    EXPECT_TRUE(absl::IsInvalidArgument(FormatJobToken(token, kPrivate).status())) << node;
  }
}

}  // namespace
}  // namespace ravel
