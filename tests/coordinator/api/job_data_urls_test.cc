// Jobs whose data and model are in stores: no store is asked here.

#include <string>

#include <absl/strings/str_cat.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "coordinator/api/job_file_proto.h"

namespace ravel {
namespace {

using ::testing::HasSubstr;

std::string UrlJob(const std::string& data, const std::string& model) {
  return absl::StrCat(R"(apiVersion: ravel/v1
kind: TrainingJob
metadata: {name: demo}
spec:
  model: {)",
                      model,
                      R"(}
  data: {)",
                      data,
                      R"(}
  training: {steps: 10, globalBatch: 8, optimizer: {lr: 3e-4}}
  devices: {kind: cpu, count: 2}
  checkpoint: {store: /data/checkpoints, everySteps: 10}
)");
}

constexpr char kInlineModel[] =
    "config: {vocabSize: 257, hiddenSize: 64, intermediateSize: 128, numHiddenLayers: 2, "
    "numAttentionHeads: 4, maxPositionEmbeddings: 32}";

std::string UrlViolations(const CanonicalJob& job) {
  std::string out;
  for (const JobViolation& violation : job.violations) {
    absl::StrAppend(&out, FormatViolation(violation, ""), "\n");
  }
  return out;
}

TEST(JobDataUrls, NodesAreAskedForThemAsForPaths) {
  const v1::TrainingJob job =
      ParseJobFile(UrlJob("train: [{path: \"ravel://alpha:7080/sets/web/web\"}], "
                          "validation: [{path: \"s3://bucket/web/web.validation\"}]",
                          "from: \"s3://bucket/models/tiny/\""))
          .job;
  const CanonicalJob bare = Canonicalize(job, {});
  EXPECT_EQ(UrlViolations(bare), "");
  const PathQuery query = PathsOf(bare);
  ASSERT_EQ(query.token_files.size(), 2u);
  EXPECT_EQ(query.token_files[0].path, "s3://bucket/web/web.validation");
  EXPECT_EQ(query.token_files[1].path, "ravel://alpha:7080/sets/web/web");
  EXPECT_EQ(query.tokenizer.path, "ravel://alpha:7080/sets/web/web.tokenizer.json");
  EXPECT_EQ(query.model_directory.path, "s3://bucket/models/tiny");
}

TEST(JobDataUrls, TheirFactsMakeTheJobAndItIsItsOwnCanonicalForm) {
  const std::string tokenizer = "ravel://alpha:7080/sets/web/web.tokenizer.json";
  const v1::TrainingJob job =
      ParseJobFile(UrlJob("train: [{path: \"ravel://alpha:7080/sets/web/web\"}]", kInlineModel))
          .job;
  const PathFacts facts{.token_files = {{.tokens = 26'000, .largest_id = 256}}, .tokenizer = true};
  const CanonicalJob known = Canonicalize(job, {.facts = &facts});
  EXPECT_EQ(UrlViolations(known), "");
  EXPECT_EQ(known.spec.data.train[0].tokens, 26'000);
  EXPECT_EQ(known.spec.data.tokenizer, tokenizer);
  const CanonicalJob again = Canonicalize(known.job, {.facts = &facts});
  EXPECT_EQ(again.job.SerializeAsString(), known.job.SerializeAsString());
  EXPECT_EQ(PathsOf(again).tokenizer.field, "spec.data.tokenizer");
  EXPECT_EQ(PathsOf(again).tokenizer.path, tokenizer);
}

TEST(JobDataUrls, UrlsThatAreNoneAreNamed) {
  for (const char* url : {"ftp://host/web",
                          "ravel://alpha/sets/web",
                          "ravel://alpha:7080/../web",
                          "ravel://alpha:7080/sets/web/",
                          "s3://"}) {
    const std::string found = UrlViolations(Canonicalize(
        ParseJobFile(UrlJob(absl::StrCat("train: [{path: \"", url, "\"}]"), kInlineModel)).job,
        {}));
    EXPECT_THAT(found,
                HasSubstr("spec.data.train[0].path: expected an absolute path, "
                          "ravel://HOST:PORT/PATH/NAME or s3://BUCKET/PATH/NAME"))
        << url;
  }
  const std::string model = UrlViolations(Canonicalize(
      ParseJobFile(UrlJob("train: [{path: /web}]", "from: \"gs://bucket/x\"")).job, {}));
  EXPECT_THAT(model,
              HasSubstr("spec.model.from: expected an absolute path, ravel://HOST:PORT/PATH or "
                        "s3://BUCKET/PATH"));
}

}  // namespace
}  // namespace ravel
