#include "coordinator/api/job_limits_proto.h"

#include <string>

#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>
#include <gtest/gtest.h>

namespace ravel {
namespace {

// The first violation of a job, as `path: expected E, got G`.
std::string First(const v1::TrainingJob& job) {
  const std::vector<JobViolation> violations = CheckJobLimits(job);
  return violations.empty() ? "" : FormatViolation(violations[0], "");
}

TEST(JobLimits, EveryTextHasALimitAndItsFieldIsNamed) {
  v1::TrainingJob job;
  const std::string long_text(20 << 20, 'x');
  job.mutable_spec()->mutable_observability()->mutable_trace()->set_directory(long_text);
  EXPECT_EQ(First(job),
            "spec.observability.trace.directory: expected at most 4.0 KiB, got 20.0 MiB");
  job.mutable_spec()->mutable_observability()->mutable_trace()->set_directory(
      std::string(kMaxFieldBytes, '/'));
  EXPECT_EQ(First(job), "");

  job.mutable_spec()->mutable_data()->add_train()->set_path("/a");
  job.mutable_spec()->mutable_data()->add_train()->set_path(std::string(kMaxFieldBytes + 1, '/'));
  EXPECT_TRUE(absl::StartsWith(First(job), "spec.data.train[1].path: ")) << First(job);
  job.mutable_spec()->clear_data();
  job.mutable_spec()->mutable_training()->add_freeze(std::string(5000, '*'));
  EXPECT_TRUE(absl::StartsWith(First(job), "spec.training.freeze[0]: ")) << First(job);
}

TEST(JobLimits, ListsAndWholeJobsHaveLimits) {
  v1::TrainingJob job;
  for (int i = 0; i <= kMaxListEntries; ++i) {
    job.mutable_spec()->mutable_data()->add_train()->set_path("/data");
  }
  EXPECT_EQ(First(job), "spec.data.train: expected at most 1024 entries, got 1025");
  job.mutable_spec()->mutable_data()->clear_train();
  for (int i = 0; i < 300; ++i) {
    job.mutable_spec()->mutable_data()->add_train()->set_path(std::string(4000, '/'));
  }
  EXPECT_TRUE(absl::StartsWith(First(job), "spec: expected a job of at most 1.0 MiB, got "))
      << First(job);
}

TEST(JobLimits, ControlCharactersAreRefusedAndNeverRepeated) {
  v1::TrainingJob job;
  job.mutable_spec()->mutable_data()->set_tokenizer("/data/\x1b[2Jtokenizer.json");
  EXPECT_EQ(First(job),
            "spec.data.tokenizer: expected UTF-8 text without control characters, got a text with "
            "some");
  job.mutable_spec()->clear_data();
  (*job.mutable_metadata()->mutable_labels())["team\x07"] = "x";
  EXPECT_TRUE(absl::StartsWith(First(job), "metadata.labels (a key): ")) << First(job);
  job.mutable_metadata()->clear_labels();
  (*job.mutable_metadata()->mutable_annotations())["note"] = "two\nlines";
  EXPECT_EQ(First(job), "");
}

// Longer ones could be submitted, and no YAML reader would take what `get -o yaml` shows of them.
TEST(JobLimits, KeysAreNoLongerThanYamlTakesThem) {
  v1::TrainingJob job;
  (*job.mutable_metadata()->mutable_annotations())[std::string(kMaxKeyBytes, '"')] = "x";
  EXPECT_EQ(First(job), "");
  const ParsedJobFile shown = ParseJobFile(CanonicalJson(job));
  EXPECT_EQ(shown.job.metadata().annotations().size(), 1);
  (*job.mutable_metadata()->mutable_annotations())[std::string(kMaxKeyBytes + 1, 'a')] = "x";
  EXPECT_EQ(First(job), "metadata.annotations (a key): expected at most 500 B, got 501 B");
}

TEST(JobLimits, ReasonsAndNamesArePlainAndShort) {
  EXPECT_TRUE(CheckPlainText("reason", "disk is full", kMaxReasonBytes).ok());
  EXPECT_EQ(CheckPlainText("reason", std::string(1025, 'x'), kMaxReasonBytes).message(),
            "reason: expected at most 1.0 KiB, got 1.0 KiB");
  EXPECT_FALSE(CheckPlainText("reason", "\x1b]0;owned\a", kMaxReasonBytes).ok());
}

// A file that ravelctl reads gets the same answer as a job that is sent by other means, and what
// is shown of it cannot command a terminal.
TEST(JobLimits, AreTheFirstRuleOfAJobFile) {
  const ParsedJobFile parsed = ParseJobFile(absl::StrCat(
      "apiVersion: ravel/v1\nkind: TrainingJob\nmetadata: {name: \"a\\u001b[2J\"}\nspec:\n"
      "  data: {tokenizer: /",
      std::string(10'000, 'x'),
      "}\n"));
  const CanonicalJob canonical = Canonicalize(parsed.job, {});
  ASSERT_EQ(canonical.violations.size(), 2u);  // and none of what is missing
  for (const JobViolation& violation : canonical.violations) {
    EXPECT_LT(FormatViolation(violation, "job.yaml").size(), 200u);
  }
  const JobViolation hostile{"spec.\x1b[2J", 0, 0, "a known field", "'\x1b[2J'"};
  EXPECT_EQ(FormatViolation(hostile, ""), "spec.\\x1b[2J: expected a known field, got '\\x1b[2J'");
}

}  // namespace
}  // namespace ravel
