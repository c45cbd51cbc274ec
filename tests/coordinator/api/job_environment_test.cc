// Rules of spec.environment and spec.communication.

#include <string>

#include <absl/strings/str_cat.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "coordinator/api/job_file_proto.h"

namespace ravel {
namespace {

using ::testing::HasSubstr;

CanonicalJob WithEnvironment(const std::string& lines) {
  const ParsedJobFile file = ParseJobFile(absl::StrCat(
      "apiVersion: ravel/v1\nkind: TrainingJob\nmetadata: {name: a}\nspec:\n",
      "  model: {config: {vocabSize: 97, hiddenSize: 36, intermediateSize: 52, numHiddenLayers: 1,",
      " numAttentionHeads: 6, maxPositionEmbeddings: 64}}\n",
      "  data: {train: [{path: /data/a}], format: flat_u16}\n",
      "  training: {steps: 4, globalBatch: 8, optimizer: {lr: 0.01}}\n",
      "  devices: {kind: cpu, count: 1}\n  checkpoint: {store: /stores/a}\n",
      lines));
  CanonicalJob canonical = Canonicalize(file.job, {});
  canonical.violations.insert(
      canonical.violations.begin(), file.violations.begin(), file.violations.end());
  return canonical;
}

std::string EnvironmentViolations(const std::string& lines) {
  std::string text;
  for (const JobViolation& violation : WithEnvironment(lines).violations) {
    absl::StrAppend(&text, FormatViolation(violation, ""), "\n");
  }
  return text;
}

TEST(JobEnvironmentRulesTest, VariablesAndTheNetworkReachTheSpec) {
  const CanonicalJob job = WithEnvironment(
      "  environment:\n"
      "    - {name: NCCL_DEBUG, value: INFO}\n"
      "    - {name: EMPTY, value: ''}\n"
      "    - {name: RAVEL_S3_SECRET_ACCESS_KEY, secret: team-s3/secret-key}\n"
      "  communication: {network: fast}\n");
  ASSERT_TRUE(job.ok()) << FormatViolation(job.violations.front(), "");
  ASSERT_EQ(job.spec.environment.size(), 3u);
  EXPECT_EQ(job.spec.environment[0], (plan::EnvironmentVariable{"NCCL_DEBUG", "INFO", ""}));
  EXPECT_EQ(job.spec.environment[2],
            (plan::EnvironmentVariable{"RAVEL_S3_SECRET_ACCESS_KEY", "", "team-s3/secret-key"}));
  EXPECT_EQ(job.spec.network, "fast");
  EXPECT_EQ(CanonicalJson(Canonicalize(job.job, {}).job), CanonicalJson(job.job));
  EXPECT_THAT(CanonicalJson(job.job), HasSubstr("team-s3/secret-key"));
  EXPECT_FALSE(WithEnvironment("").job.spec().has_communication());
}

TEST(JobEnvironmentRulesTest, EachFaultIsNamedByItsField) {
  const auto one = [](const std::string& variable) {
    return EnvironmentViolations(absl::StrCat("  environment: [", variable, "]\n"));
  };
  EXPECT_THAT(one("{name: LD_PRELOAD, value: /x.so}"), HasSubstr("spec.environment[0].name: "));
  EXPECT_THAT(one("{name: 'A B', value: x}"), HasSubstr("spec.environment[0].name: "));
  EXPECT_THAT(one("{name: A}"), HasSubstr("exactly one of value and secret, got neither"));
  EXPECT_THAT(one("{name: A, value: b, secret: c/d}"), HasSubstr("got both"));
  const std::string secret = one("{name: MY_TOKEN, value: hidden7}");
  EXPECT_THAT(secret, HasSubstr("spec.environment[0].value: "));
  EXPECT_THAT(secret, ::testing::Not(HasSubstr("hidden7")));
  const std::string reference = one("{name: A, secret: hidden7}");
  EXPECT_THAT(reference, HasSubstr("spec.environment[0].secret: expected SECRET/KEY"));
  EXPECT_THAT(reference, ::testing::Not(HasSubstr("hidden7")));
  EXPECT_THAT(one("{name: A, secret: ../b}"), HasSubstr("spec.environment[0].secret: "));
  EXPECT_THAT(one("{name: NCCL_DEBUG, secret: a/b}"), HasSubstr("that no library prints"));
  EXPECT_THAT(one("{name: A, value: b}, {name: A, value: c}"),
              HasSubstr("spec.environment[1].name: expected each name once"));
  std::string many;
  for (int i = 0; i < 65; ++i) {
    absl::StrAppend(&many, i == 0 ? "" : ", ", "{name: A", i, ", value: b}");
  }
  EXPECT_THAT(one(many), HasSubstr("spec.environment: expected at most 64 variables, got 65"));
  EXPECT_THAT(EnvironmentViolations("  communication: {network: '../x'}\n"),
              HasSubstr("spec.communication.network: expected the name of a network"));
}

}  // namespace
}  // namespace ravel
