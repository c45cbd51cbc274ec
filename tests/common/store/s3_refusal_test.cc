// Answers of S3 as AWS documents them, in the words that people read.

#include "common/store/s3_refusal.h"

#include <string>

#include <absl/strings/str_cat.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace ravel::store {
namespace {

using ::testing::HasSubstr;

S3Answer Answer(long code, const std::string& error, const std::string& more = "") {
  return {.code = code,
          .headers = {},
          .body = absl::StrCat("<?xml version=\"1.0\"?><Error><Code>",
                               error,
                               "</Code><Message>m</Message>",
                               more,
                               "</Error>")};
}

S3Setup OfTheNode() {
  return {.url = "s3://bucket",
          .endpoint = "https://s3.us-east-1.amazonaws.com",
          .region = "us-east-1",
          .keys_file = "/etc/ravel/credentials"};
}

std::string Text(const absl::Status& status) {
  return std::string(status.message());
}

TEST(S3RefusalTest, KeysThatEndedAreRenewedWhereTheyStand) {
  const absl::Status node =
      S3Refusal("put s3://bucket/a", Answer(400, "ExpiredToken"), OfTheNode());
  EXPECT_TRUE(absl::IsPermissionDenied(node));
  EXPECT_EQ(RefusalOf(node), RefusalCause::kKeys);
  EXPECT_EQ(Text(node),
            "put s3://bucket/a: HTTP 400 ExpiredToken: the keys were lent and have ended: renew "
            "them, with aws_session_token in /etc/ravel/credentials (RAVEL_S3_CREDENTIALS)");
  S3Setup job = OfTheNode();
  job.keys_file.clear();
  job.job_keys = true;
  const absl::Status own = S3Refusal("put s3://bucket/a", Answer(400, "ExpiredToken"), job);
  EXPECT_EQ(RefusalOf(own), RefusalCause::kJobKeys);
  EXPECT_THAT(Text(own), HasSubstr("with RAVEL_S3_SESSION_TOKEN of the job's environment"));
  job.job_keys = false;
  EXPECT_THAT(Text(S3Refusal("x", Answer(403, "InvalidAccessKeyId"), job)),
              HasSubstr("does not know the access key: correct RAVEL_S3_ACCESS_KEY_ID of this"));
}

TEST(S3RefusalTest, ARightThatIsMissingIsNotAWrongKey) {
  const absl::Status denied =
      S3Refusal("put s3://bucket/a", Answer(403, "AccessDenied"), OfTheNode());
  EXPECT_TRUE(absl::IsPermissionDenied(denied));
  EXPECT_THAT(Text(denied), HasSubstr("the keys may not do this in s3://bucket: give their owner"));
  // HEAD has no body.
  const absl::Status head = S3Refusal("head s3://bucket/a", {403, {}, ""}, OfTheNode());
  EXPECT_TRUE(absl::IsPermissionDenied(head));
  EXPECT_EQ(RefusalOf(head), RefusalCause::kKeys);
}

TEST(S3RefusalTest, ABucketOfAnotherRegionIsToldInEachFormThatAwsHas) {
  S3Answer moved = {.code = 301, .headers = {{"x-amz-bucket-region", "eu-west-1"}}, .body = ""};
  for (const S3Answer& answer :
       {moved,
        Answer(400, "AuthorizationHeaderMalformed", "<Region>eu-west-1</Region>"),
        Answer(400, "IllegalLocationConstraintException", "<Region>eu-west-1</Region>")}) {
    const absl::Status status = S3Refusal("list s3://bucket/", answer, OfTheNode());
    EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
    EXPECT_EQ(RefusalOf(status), RefusalCause::kSettings);
    EXPECT_THAT(Text(status),
                HasSubstr("signed for the region us-east-1: set RAVEL_S3_REGION to "
                          "eu-west-1"));
  }
  EXPECT_THAT(Text(S3Refusal("list s3://bucket/", {301, {}, ""}, OfTheNode())),
              HasSubstr("set RAVEL_S3_REGION to that of the bucket"));
}

TEST(S3RefusalTest, AClockIsComparedWithTheServers) {
  S3Setup setup = OfTheNode();
  setup.now_ms = 1'772'368'200'000;  // 2026-03-01T12:30:00Z
  S3Answer answer = Answer(403, "RequestTimeTooSkewed");
  answer.headers["date"] = "Sun, 01 Mar 2026 12:00:00 GMT";
  EXPECT_THAT(Text(S3Refusal("x", answer, setup)), HasSubstr("not the server's by 1800 s: set it"));
  answer.headers["date"] = "whatever";
  EXPECT_THAT(Text(S3Refusal("x", answer, setup)), HasSubstr("not the server's: set it"));
}

TEST(S3RefusalTest, OtherAnswersAreWhatTheirCodesSay) {
  EXPECT_TRUE(absl::IsNotFound(S3Refusal("x", Answer(404, "NoSuchKey"), OfTheNode())));
  EXPECT_TRUE(
      absl::IsAlreadyExists(S3Refusal("x", Answer(412, "PreconditionFailed"), OfTheNode())));
  const absl::Status other = S3Refusal("x", Answer(400, "InvalidRequest"), OfTheNode());
  EXPECT_TRUE(absl::IsFailedPrecondition(other));
  EXPECT_EQ(RefusalOf(other), RefusalCause::kNone);
  EXPECT_EQ(Text(other), "x: HTTP 400 InvalidRequest");
  EXPECT_EQ(RefusalOf(absl::OkStatus()), RefusalCause::kNone);
  // Context keeps the mark.
  EXPECT_EQ(RefusalOf(Annotate(S3Refusal("x", Answer(403, "InvalidToken"), OfTheNode()), "field")),
            RefusalCause::kKeys);
}

}  // namespace
}  // namespace ravel::store
