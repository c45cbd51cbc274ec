#include "common/ckpt/step_layout.h"

#include <string>

#include <absl/strings/str_replace.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/ckpt/manifest_proto.h"
#include "common/crc32c.h"

namespace ravel::ckpt {
namespace {

using ::testing::HasSubstr;

TEST(StepLayoutTest, StepNames) {
  EXPECT_EQ(StepName(20), "step-0000000020");
  EXPECT_EQ(StepName(12345678901), "step-12345678901");
  EXPECT_EQ(ParseStepName("step-0000000020"), 20);
  EXPECT_EQ(ParseStepName("step-12345678901"), 12345678901);
  for (const char* name : {"step-20",
                           "step-00000000020",
                           "step-0000000020.e1.a1.tmp",
                           "step-",
                           "Step-0000000020",
                           "step--000000001"}) {
    EXPECT_FALSE(ParseStepName(name)) << name;
  }
}

TEST(StepLayoutTest, AttemptNames) {
  const AttemptKey key = {.step = 20, .epoch = 7, .attempt = 2};
  EXPECT_EQ(AttemptName(key), "step-0000000020.e7.a2.tmp");
  EXPECT_EQ(ParseAttemptName("step-0000000020.e7.a2.tmp"), key);
  for (const char* name : {"step-0000000020",
                           "step-0000000020.e7.a2",
                           "step-0000000020.e07.a2.tmp",
                           "step-20.e7.a2.tmp",
                           "step-0000000020.e7.a2.tmpx"}) {
    EXPECT_FALSE(ParseAttemptName(name)) << name;
  }
}

TEST(StepLayoutTest, AttemptNamesSayWhoseTheyAre) {
  const AttemptKey key = {.step = 300, .epoch = 1, .attempt = 1, .job_tag = 0x3f2a9c01};
  EXPECT_EQ(AttemptName(key), "step-0000000300.e1.a1.3f2a9c01.tmp");
  EXPECT_EQ(ParseAttemptName("step-0000000300.e1.a1.3f2a9c01.tmp"), key);
  EXPECT_EQ(JobTag("3f2a9c01-1111-2222-3333-444455556666"), 0x3f2a9c01U);
  EXPECT_EQ(JobTagText("3f2a9c01-1111-2222-3333-444455556666"), "3f2a9c01");
  EXPECT_NE(JobTag("job-1"), JobTag("job-2"));
  for (const char* name : {"step-0000000300.e1.a1.3f2a9c0.tmp",
                           "step-0000000300.e1.a1.3F2A9C01.tmp",
                           "step-0000000300.e1.a1.3f2a9c011.tmp",
                           "step-0000000300.e1.a1..tmp"}) {
    EXPECT_FALSE(ParseAttemptName(name)) << name;
  }
  // The id of a save does not depend on how its folder is called.
  EXPECT_EQ(MakeSaveId("a", key), MakeSaveId("a", {.step = 300, .epoch = 1, .attempt = 1}));
}

TEST(StepLayoutTest, PinNames) {
  const PinName person = {.step = 20, .holder = {}, .until_s = 0};
  const PinName job = {.step = 20, .holder = "job-3f2a9c01", .until_s = 0};
  const PinName reader = {.step = 20, .holder = "reader-0a", .until_s = 1'700'000'000};
  EXPECT_EQ(PinFileName(person), "step-0000000020");
  EXPECT_EQ(PinFileName(job), "step-0000000020.job-3f2a9c01");
  EXPECT_EQ(PinFileName(reader), "step-0000000020.reader-0a.x1700000000");
  for (const PinName& pin : {person, job, reader}) {
    EXPECT_EQ(ParsePinName(PinFileName(pin)), pin);
  }
  EXPECT_FALSE(job.Expired(INT64_MAX));
  EXPECT_FALSE(reader.Expired(1'700'000'000));
  EXPECT_TRUE(reader.Expired(1'700'000'001));
  for (const char* name : {"step-20",
                           "step-0000000020.",
                           "step-0000000020.A",
                           "README",
                           "step-0000000020.a.x",
                           "step-0000000020.3f.part"}) {
    EXPECT_FALSE(ParsePinName(name)) << name;
  }
}

TEST(StepLayoutTest, FileNames) {
  EXPECT_EQ(ShardFileName("model", 1, 1, 2), "model/shard-00001-model-00001-of-00002.safetensors");
  EXPECT_EQ(SealFileName(3), "seals/00003");
}

TEST(StepLayoutTest, SaveIdsDifferByJobAndAttempt) {
  const AttemptKey key = {20, 7, 2};
  EXPECT_EQ(MakeSaveId("a", key), MakeSaveId("a", key));
  EXPECT_NE(MakeSaveId("a", key), MakeSaveId("b", key));
  EXPECT_NE(MakeSaveId("a", key), MakeSaveId("a", {20, 7, 3}));
}

CommitRecord SomeCommit() {
  CommitRecord commit;
  commit.job = "job \"1\"";
  commit.step = 20;
  commit.save_id = {1, 2, 255};
  commit.epoch = 7;
  commit.attempt = 2;
  commit.files = 3;
  commit.bytes = 1 << 20;
  commit.manifest_bytes = 500;
  commit.manifest_crc32c = 0x00ab12cd;
  commit.manifest_sha256 = Sha256("manifest");
  return commit;
}

TEST(CommitTest, RoundTrip) {
  const auto parsed = ParseCommit(EncodeCommit(SomeCommit()));
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ(*parsed, SomeCommit());
}

TEST(CommitTest, EveryTruncationIsRefused) {
  const std::string text = EncodeCommit(SomeCommit());
  for (size_t length = 0; length + 2 < text.size(); ++length) {
    EXPECT_FALSE(ParseCommit(text.substr(0, length)).ok()) << length;
  }
}

TEST(CommitTest, FieldsAreChecked) {
  const std::string text = EncodeCommit(SomeCommit());
  const auto message = [&](const std::string& from, const std::string& to) {
    const std::string changed = absl::StrReplaceAll(text, {{from, to}});
    EXPECT_NE(changed, text) << from;
    return std::string(ParseCommit(changed).status().message());
  };
  EXPECT_THAT(message("\"version\": 1", "\"version\": 2"),
              HasSubstr("version 2; this program reads version 1"));
  EXPECT_THAT(message("ravel-checkpoint", "other"), HasSubstr("format"));
  EXPECT_THAT(message("\"step\": 20", "\"step\": -1"), HasSubstr("step: expected a whole number"));
  EXPECT_THAT(message("\"step\": 20", "\"step\": \"20\""),
              HasSubstr("step: expected a whole number"));
  EXPECT_THAT(message("\"epoch\"", "\"epoh\""), HasSubstr("epoch"));
  EXPECT_THAT(message("0102ff", "0102fg"), HasSubstr("save_id"));
  EXPECT_THAT(message("00ab12cd", "ab12cd"), HasSubstr("crc32c"));
  EXPECT_THAT(message("\"prefix\": \".\"", "\"prefix\": \"..\""), HasSubstr("prefix"));
  EXPECT_THAT(message("manifest.pb", "../manifest.pb"), HasSubstr("manifest.path"));
}

TEST(CommitTest, ALongFileIsRefused) {
  EXPECT_FALSE(ParseCommit(EncodeCommit(SomeCommit()) + std::string(5000, ' ')).ok());
}

}  // namespace
}  // namespace ravel::ckpt
