#include "coordinator/api/job_retry_proto.h"

#include <string>
#include <vector>

#include <absl/strings/str_cat.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace ravel {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// Two ranks share each layer, whose sums are in four parts.
v1::TrainingJob SharedJob(const std::string& parallelism, const std::string& elastic) {
  const ParsedJobFile parsed = ParseJobFile(absl::StrCat(
      R"(apiVersion: ravel/v1
kind: TrainingJob
metadata: {name: demo}
spec:
  model: {config: {modelType: llama, vocabSize: 64, hiddenSize: 32, intermediateSize: 64, numHiddenLayers: 1,
                   numAttentionHeads: 4, numKeyValueHeads: 4, maxPositionEmbeddings: 32}}
  data: {train: [{path: /data/tokens}], sequenceLength: 32}
  training: {steps: 10, globalBatch: 8, optimizer: {lr: 1e-3}}
  devices: {kind: cpu, count: 4}
  determinism: {tensorParts: 4, virtualRanks: 8}
  checkpoint: {store: "file:///store", everySteps: 10}
  parallelism: {)",
      parallelism,
      "}\n  elastic: {",
      elastic,
      "}\n"));
  EXPECT_TRUE(parsed.violations.empty());
  const CanonicalJob job = Canonicalize(parsed.job, {});
  EXPECT_TRUE(job.ok()) << FormatViolation(job.violations[0], "");
  return job.job;
}

RetriedJob Retried(const v1::TrainingJob& job, int64_t tensor, bool allow = false) {
  v1::RetryJobRequest request;
  request.set_tensor(tensor);
  request.set_allow_numerics_change(allow);
  return ApplyRetry(request, job);
}

TEST(JobRetry, ChangesHowManyRanksShareALayer) {
  const v1::TrainingJob job =
      SharedJob("tensor: 2, sequenceParallel: true, tensorChunks: 2", "sizes: [2, 4, 6]");
  const RetriedJob alone = Retried(job, 1);
  ASSERT_TRUE(alone.violations.empty()) << FormatViolation(alone.violations[0], "");
  EXPECT_EQ(alone.spec.tensor, 1);
  EXPECT_FALSE(alone.spec.sequence_parallel) << "one rank has all tokens";
  EXPECT_EQ(alone.spec.tensor_chunks, 1);
  EXPECT_THAT(alone.spec.elastic.sizes, ElementsAre(2, 4, 6));
  EXPECT_EQ(alone.spec.tensor_parts, 4) << "the bits stay";
  EXPECT_EQ(alone.job.spec().parallelism().tensor(), 1);

  const RetriedJob four = Retried(job, 4);
  ASSERT_TRUE(four.violations.empty()) << FormatViolation(four.violations[0], "");
  EXPECT_TRUE(four.spec.sequence_parallel);
  EXPECT_EQ(four.spec.tensor_chunks, 2);
  EXPECT_THAT(four.spec.elastic.sizes, ElementsAre(4)) << "whole groups only";
  EXPECT_EQ(four.spec.device_count, 4);
  EXPECT_EQ(four.spec.virtual_ranks, 8);
}

// A retry cannot change the micro-batch, and chunks need tokens of every rank.
TEST(JobRetry, ExchangesInAsManyChunksAsTheTokensHave) {
  const v1::TrainingJob job = SharedJob("tensor: 2, tensorChunks: 16", "sizes: [4]");
  const RetriedJob four = Retried(job, 4);
  ASSERT_TRUE(four.violations.empty()) << FormatViolation(four.violations[0], "");
  EXPECT_EQ(four.spec.tensor, 4);
  EXPECT_EQ(four.spec.micro_batch * four.spec.data.sequence_length % (4 * four.spec.tensor_chunks),
            0);
  EXPECT_EQ(four.spec.tensor_chunks, 8) << "of 32 tokens";
}

TEST(JobRetry, WantsTheLargestCountOfWholeGroups) {
  v1::TrainingJob job = SharedJob("tensor: 2", "sizes: [2, 4, 6]");
  job.mutable_spec()->mutable_devices()->set_count(6);
  const RetriedJob four = Retried(job, 4);
  ASSERT_TRUE(four.violations.empty()) << FormatViolation(four.violations[0], "");
  EXPECT_EQ(four.spec.device_count, 4);
}

TEST(JobRetry, ThatChangesNothingElseKeepsTheSharing) {
  const RetriedJob same =
      Retried(SharedJob("tensor: 2, sequenceParallel: true", "sizes: [4]"), 0, true);
  ASSERT_TRUE(same.violations.empty());
  EXPECT_EQ(same.spec.tensor, 2);
  EXPECT_TRUE(same.spec.sequence_parallel);
  EXPECT_TRUE(same.spec.checkpoint.allow_numerics_change);
}

TEST(JobRetry, RefusesByField) {
  const v1::TrainingJob job = SharedJob("tensor: 2", "sizes: [2, 4]");
  const struct {
    int64_t tensor;
    const char* path;
    const char* text;
  } refused[] = {{-1, "tensor", "a power of two up to 16"},
                 {32, "tensor", "a power of two up to 16"},
                 {3, "tensor", "whole groups of 3"},
                 {8, "tensor", "(2, 4)"}};
  for (const auto& one : refused) {
    const RetriedJob retried = Retried(job, one.tensor);
    ASSERT_FALSE(retried.violations.empty()) << one.tensor;
    EXPECT_EQ(retried.violations[0].path, one.path);
    EXPECT_THAT(FormatViolation(retried.violations[0], ""), HasSubstr(one.text));
  }
  // Four parts are not for eight ranks, and sums in two are not for four.
  v1::TrainingJob two = SharedJob("tensor: 2", "sizes: [4]");
  two.mutable_spec()->mutable_determinism()->set_tensor_parts(2);
  const RetriedJob retried = Retried(two, 4);
  ASSERT_FALSE(retried.violations.empty());
  EXPECT_EQ(retried.violations[0].path, "spec.determinism.tensorParts");
}

}  // namespace
}  // namespace ravel
