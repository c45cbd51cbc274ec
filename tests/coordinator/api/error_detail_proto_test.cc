#include "coordinator/api/error_detail_proto.h"

#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>
#include <gtest/gtest.h>

namespace ravel::coordinator {
namespace {

std::vector<JobViolation> Missing(int count) {
  std::vector<JobViolation> violations;
  for (int i = 0; i < count; ++i) {
    violations.push_back(
        {absl::StrCat("spec.data.train[", i, "].path"),
         0,
         0,
         "a token file",
         absl::StrCat("/data/corpus/part-", i, ".idx: No such file or directory")});
  }
  return violations;
}

TEST(ErrorDetail, ManyRefusalsFitIntoMetadata) {
  const v1::ErrorDetail few = MakeErrorDetail("demo", Missing(3));
  EXPECT_EQ(few.violations_size(), 3);
  EXPECT_EQ(few.more(), 0);
  for (const int count : {120, 100'000}) {
    const v1::ErrorDetail detail = MakeErrorDetail("demo", Missing(count));
    EXPECT_LE(detail.SerializeAsString().size(), kMaxDetailBytes);
    EXPECT_GE(detail.violations_size(), 20);
    EXPECT_EQ(detail.violations_size() + detail.more(), count);
    const std::string text = ViolationText(Missing(count));
    EXPECT_LE(text.size(), kMaxMessageBytes);
    EXPECT_TRUE(absl::EndsWith(text, " more")) << text;
  }
}

TEST(ErrorDetail, LongTextsAreCutAtACharacter) {
  std::vector<JobViolation> violations = Missing(1);
  violations[0].got = std::string(1 << 20, 'x');
  EXPECT_EQ(MakeErrorDetail(std::string(1 << 20, 'n'), violations).violations_size(), 1);
  EXPECT_EQ(CutMessage("abcdef", 6), "abcdef");
  EXPECT_EQ(CutMessage("abcdefg", 6), "abc...");
  // A character beyond ASCII takes three times its bytes as metadata.
  EXPECT_EQ(CutMessage("aü東京", 13), "aü...");
}

}  // namespace
}  // namespace ravel::coordinator
