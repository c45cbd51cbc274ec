// The job file's fields of sharding: strategies, replicas, recompute, wire, frozen tensors,
// micro-batches.

#include <string>

#include <absl/strings/str_cat.h>
#include <gtest/gtest.h>

#include "coordinator/api/job_file_proto.h"

namespace ravel {
namespace {

// `parallelism`, `training` and `elastic` are flow mappings without their braces.
struct Parts {
  std::string parallelism = "";
  std::string training = "";
  std::string elastic = "sizes: [2, 4, 8]";
  std::string count = "8";
};

CanonicalJob Make(const Parts& parts) {
  const std::string text = absl::StrCat(R"(apiVersion: ravel/v1
kind: TrainingJob
metadata: {name: demo}
spec:
  model:
    config: {vocabSize: 257, hiddenSize: 64, intermediateSize: 128, numHiddenLayers: 2,
             numAttentionHeads: 4, maxPositionEmbeddings: 32}
  data: {train: [{path: /data/train}]}
  training: {steps: 100, globalBatch: 32, optimizer: {lr: 3e-4})",
                                        parts.training.empty() ? "" : ", ",
                                        parts.training,
                                        "}\n  devices: {kind: cpu, count: ",
                                        parts.count,
                                        "}\n  elastic: {",
                                        parts.elastic,
                                        "}\n  checkpoint: {store: /data/checkpoints}\n",
                                        "  parallelism: {",
                                        parts.parallelism,
                                        "}\n");
  const ParsedJobFile parsed = ParseJobFile(text);
  EXPECT_TRUE(parsed.violations.empty())
      << text << FormatViolation(parsed.violations.front(), "job.yaml");
  return Canonicalize(parsed.job, {});
}

std::string Violations(const Parts& parts) {
  std::string out;
  for (const JobViolation& violation : Make(parts).violations) {
    absl::StrAppend(&out, FormatViolation(violation, ""), "\n");
  }
  return out;
}

TEST(JobParallelism, TensorPartsAreAPowerOfTwoAndOneByDefault) {
  EXPECT_EQ(Make({}).spec.tensor_parts, 1);
  const auto with = [](const char* parts) {
    return Parts{.parallelism = absl::StrCat("}\n  determinism: {tensorParts: ", parts)};
  };
  EXPECT_EQ(Make(with("4")).spec.tensor_parts, 4);
  EXPECT_EQ(Violations(with("6")),
            "spec.determinism.tensorParts: expected a power of two up to 16, got 6\n");
  EXPECT_EQ(Violations(with("-2")),
            "spec.determinism.tensorParts: expected a power of two up to 16, got -2\n");
}

TEST(JobParallelism, TensorPartsAreTensorByDefaultAndAMultipleOfIt) {
  const auto with = [](const char* parts) {
    return Parts{.parallelism = absl::StrCat("tensor: 2}\n  determinism: {", parts),
                 .elastic = "sizes: [4, 8]"};
  };
  EXPECT_EQ(Make(with("")).spec.tensor_parts, 2);
  EXPECT_EQ(Make(with("tensorParts: 4")).spec.tensor_parts, 4);
  Parts wide = with("tensorParts: 2");
  wide.parallelism.replace(wide.parallelism.find("tensor: 2"), 9, "tensor: 4");
  EXPECT_EQ(Violations(wide),
            "spec.determinism.tensorParts: expected a multiple of parallelism.tensor 4, got 2\n");
}

TEST(JobParallelism, DefaultsAreOneReplicaThatKeepsItsActivations) {
  const CanonicalJob job = Make({});
  ASSERT_TRUE(job.ok()) << FormatViolation(job.violations[0], "");
  EXPECT_EQ(job.spec.strategy, plan::Strategy::kOptimGradsParams);
  EXPECT_EQ(job.spec.replicate_strategy, plan::Strategy::kNoShard);
  EXPECT_EQ(job.spec.replicas, 1);
  EXPECT_EQ(job.spec.recompute, plan::RecomputePolicy::kNone);
  EXPECT_EQ(job.spec.gradient_wire, plan::WireType::kF32);
  EXPECT_EQ(job.spec.communication_blocks, 0);
  EXPECT_FALSE(job.spec.allow_padding);
  EXPECT_TRUE(job.spec.freeze.empty());
}

TEST(JobParallelism, EveryFieldReachesTheSpec) {
  const CanonicalJob job = Make({.parallelism = "strategy: hfsdp, replicas: 2, recompute: block, "
                                                "gradientWire: bf16, allowPadding: true, "
                                                "communicationBlocks: 8, "
                                                "gatherWindow: 1MiB, stagingWindow: 2MiB",
                                 .training = "microBatch: 4, freeze: ['model.layers.0.*']"});
  ASSERT_TRUE(job.ok()) << FormatViolation(job.violations[0], "");
  EXPECT_EQ(job.spec.strategy, plan::Strategy::kOptimGradsParams);
  EXPECT_EQ(job.spec.replicate_strategy, plan::Strategy::kOptim);
  EXPECT_EQ(job.spec.replicas, 2);
  EXPECT_EQ(job.spec.recompute, plan::RecomputePolicy::kBlock);
  EXPECT_EQ(job.spec.gradient_wire, plan::WireType::kBF16);
  EXPECT_EQ(job.spec.communication_blocks, 8);
  EXPECT_TRUE(job.spec.allow_padding);
  EXPECT_EQ(job.spec.gather_window_bytes, 1 << 20);
  EXPECT_EQ(job.spec.staging_window_bytes, 2 << 20);
  EXPECT_EQ(job.spec.micro_batch, 4);
  EXPECT_EQ(job.spec.freeze, (std::vector<std::string>{"model.layers.0.*"}));
  const CanonicalJob again = Canonicalize(job.job, {});
  ASSERT_TRUE(again.ok());
  EXPECT_EQ(CanonicalJson(job.job), CanonicalJson(again.job));
}

TEST(JobParallelism, StrategiesAndTheirAliases) {
  struct Case {
    const char* text;
    const char* name;
    plan::Strategy shard;
    plan::Strategy replicate;
  };
  using plan::Strategy;
  const Case cases[] = {
      {"strategy: ZeRO-0", "no_shard", Strategy::kNoShard, Strategy::kNoShard},
      {"strategy: zero1", "optim", Strategy::kOptim, Strategy::kNoShard},
      {"strategy: Zero_2", "optim_grads", Strategy::kOptimGrads, Strategy::kNoShard},
      {"strategy: ZERO3", "optim_grads_params", Strategy::kOptimGradsParams, Strategy::kNoShard},
      {"strategy: HSDP, replicas: 2", "hsdp", Strategy::kOptimGradsParams, Strategy::kNoShard},
      {"strategy: hfsdp, replicas: 2", "hfsdp", Strategy::kOptimGradsParams, Strategy::kOptim},
      {"strategy: optim_grads, replicas: 2, replicateStrategy: optim",
       "optim_grads",
       Strategy::kOptimGrads,
       Strategy::kOptim},
      {"strategy: zero1, replicas: 2", "optim", Strategy::kOptim, Strategy::kNoShard},
  };
  for (const Case& test : cases) {
    const CanonicalJob job = Make({.parallelism = test.text});
    ASSERT_TRUE(job.ok()) << test.text << FormatViolation(job.violations[0], "");
    EXPECT_EQ(job.job.spec().parallelism().strategy(), test.name);
    EXPECT_EQ(job.spec.strategy, test.shard) << test.text;
    EXPECT_EQ(job.spec.replicate_strategy, test.replicate) << test.text;
  }
}

TEST(JobParallelism, UnitsReachTheSpecAndStayInTheCanonicalJob) {
  using plan::Strategy;
  const CanonicalJob job = Make(
      {.parallelism = "replicas: 2, replicateStrategy: zero2, units: [{match: embed, strategy: "
                      "ZeRO-1, replicateStrategy: zero0}, {match: 'layers.*', strategy: ZERO_3}]"});
  ASSERT_TRUE(job.ok()) << FormatViolation(job.violations[0], "");
  EXPECT_EQ(job.spec.units,
            (std::vector<plan::UnitStrategy>{
                {.match = "embed", .strategy = Strategy::kOptim, .replicate = Strategy::kNoShard},
                {.match = "layers.*", .strategy = Strategy::kOptimGradsParams, .replicate = {}}}));
  EXPECT_EQ(job.job.spec().parallelism().replicate_strategy(), "optim_grads");
  EXPECT_EQ(job.job.spec().parallelism().units(0).strategy(), "optim");
  EXPECT_EQ(job.job.spec().parallelism().units(0).replicate_strategy(), "no_shard");
  EXPECT_EQ(job.job.spec().parallelism().units(1).strategy(), "optim_grads_params");
  EXPECT_EQ(job.job.spec().parallelism().units(1).replicate_strategy(), "");
  const CanonicalJob again = Canonicalize(job.job, {});
  ASSERT_TRUE(again.ok());
  EXPECT_EQ(again.spec.units, job.spec.units);
  EXPECT_EQ(CanonicalJson(job.job), CanonicalJson(again.job));
}

TEST(JobParallelism, UnitsAreAtMost256) {
  std::string units;
  for (int i = 0; i < 257; ++i) {
    absl::StrAppend(&units, units.empty() ? "" : ", ", "{match: embed, strategy: optim}");
  }
  const Parts parts = {.parallelism = absl::StrCat("units: [", units, "]")};
  EXPECT_EQ(Violations(parts), "spec.parallelism.units: expected at most 256 entries, got 257\n");
}

TEST(JobParallelism, RangesOfSizesStepByReplicas) {
  const CanonicalJob job =
      Make({.parallelism = "strategy: hsdp, replicas: 2", .elastic = "min: 2, max: 8"});
  ASSERT_TRUE(job.ok()) << FormatViolation(job.violations[0], "");
  EXPECT_EQ(job.spec.elastic.sizes, (std::vector<int64_t>{2, 4, 6, 8}));
}

TEST(JobParallelism, TensorGroupsAreWholeInEverySize) {
  const CanonicalJob job =
      Make({.parallelism = "strategy: hsdp, replicas: 2, tensor: 2, sequenceParallel: true, "
                           "tensorChunks: 2",
            .elastic = "min: 4, max: 12",
            .count = "8"});
  ASSERT_TRUE(job.ok()) << FormatViolation(job.violations[0], "");
  EXPECT_EQ(job.spec.tensor, 2);
  EXPECT_TRUE(job.spec.sequence_parallel);
  EXPECT_EQ(job.spec.tensor_chunks, 2);
  EXPECT_EQ(job.spec.elastic.sizes, (std::vector<int64_t>{4, 8, 12}));
  EXPECT_EQ(job.spec.virtual_ranks, 8);  // at or above 12 / 2
  EXPECT_EQ(Make({}).spec.tensor, 1);
  EXPECT_EQ(Make({}).spec.tensor_chunks, 1);
}

struct Bad {
  const char* name;
  Parts parts;
  const char* message;
};

class BadParallelism : public ::testing::TestWithParam<Bad> {};

std::string NameOfCase(const ::testing::TestParamInfo<Bad>& info) {
  return info.param.name;
}

TEST_P(BadParallelism, IsNamed) {
  EXPECT_EQ(Violations(GetParam().parts), GetParam().message);
}

INSTANTIATE_TEST_SUITE_P(
    Fields,
    BadParallelism,
    ::testing::Values(
        Bad{"Strategy",
            {.parallelism = "strategy: hsdq"},
            "spec.parallelism.strategy: expected one of no_shard (ZeRO-0), optim (ZeRO-1), "
            "optim_grads (ZeRO-2), optim_grads_params (ZeRO-3), hsdp, hfsdp (did you mean "
            "'hsdp'?), got 'hsdq'\n"},
        Bad{"Replicas",
            {.parallelism = "replicas: 3"},
            "spec.parallelism.replicas: expected a power of two, got 3\n"},
        Bad{"TwoAxesWithoutReplicas",
            {.parallelism = "strategy: hsdp"},
            "spec.parallelism.replicas: expected 2 or more with strategy hsdp, got 1\n"},
        Bad{"OuterStrategyOfAName",
            {.parallelism = "strategy: hsdp, replicas: 2, replicateStrategy: optim"},
            "spec.parallelism.replicateStrategy: expected no_shard, what strategy hsdp says, got "
            "'optim'\n"},
        Bad{"OuterStrategyWithoutReplicas",
            {.parallelism = "replicateStrategy: optim"},
            "spec.parallelism.replicateStrategy: expected no_shard without replicas, got optim\n"},
        Bad{"OuterStrategyThatNobodyRuns",
            {.parallelism = "replicas: 2, replicateStrategy: optim_grads_params"},
            "spec.parallelism.replicateStrategy: expected a strategy that goes with strategy "
            "optim_grads_params, got 'optim_grads_params': tensor model.embed_tokens.weight: axis "
            "replicate: from Flat to Replicate: weights are gathered for each use over axis shard "
            "alone\n"},
        Bad{"OuterStrategyUnknown",
            {.parallelism = "replicas: 2, replicateStrategy: optm"},
            "spec.parallelism.replicateStrategy: expected one of no_shard (ZeRO-0), optim "
            "(ZeRO-1), "
            "optim_grads (ZeRO-2), optim_grads_params (ZeRO-3) (did you mean 'optim'?), got "
            "'optm'\n"},
        Bad{"UnitThatIsNone",
            {.parallelism = "units: [{match: embed, strategy: optim}, {match: layer.0, strategy: "
                            "optim}]"},
            "spec.parallelism.units[1].match: expected a pattern that matches a unit, such as "
            "embed, got 'layer.0'\n"},
        Bad{"UnitThatIsTaken",
            {.parallelism = "units: [{match: 'layers.*', strategy: optim}, {match: layers.1, "
                            "strategy: zero0}]"},
            "spec.parallelism.units[1].match: expected a pattern that matches a unit which no "
            "entry "
            "before it matches, got 'layers.1'\n"},
        Bad{"UnitStrategy",
            {.parallelism = "units: [{match: embed, strategy: optim_grad}]"},
            "spec.parallelism.units[0].strategy: expected one of no_shard (ZeRO-0), optim "
            "(ZeRO-1), "
            "optim_grads (ZeRO-2), optim_grads_params (ZeRO-3) (did you mean 'optim_grads'?), got "
            "'optim_grad'\n"},
        Bad{"UnitOfTwoAxes",
            {.parallelism = "replicas: 2, units: [{match: embed, strategy: hsdp}]"},
            "spec.parallelism.units[0].strategy: expected one of no_shard (ZeRO-0), optim "
            "(ZeRO-1), "
            "optim_grads (ZeRO-2), optim_grads_params (ZeRO-3), got 'hsdp'\n"},
        Bad{"UnitWithoutAnything",
            {.parallelism = "units: [{}]"},
            "spec.parallelism.units[0].match: expected a pattern of unit names, got nothing\n"
            "spec.parallelism.units[0].strategy: expected one of no_shard (ZeRO-0), optim "
            "(ZeRO-1), "
            "optim_grads (ZeRO-2), optim_grads_params (ZeRO-3), got nothing\n"},
        Bad{"UnitSharedByReplicasWithoutAny",
            {.parallelism = "units: [{match: embed, strategy: optim, replicateStrategy: optim}]"},
            "spec.parallelism.units[0].replicateStrategy: expected no_shard without replicas, got "
            "optim\n"},
        Bad{"UnitThatNobodyRuns",
            {.parallelism =
                 "strategy: hfsdp, replicas: 2, units: [{match: embed, strategy: zero0}]"},
            "spec.parallelism.units[0].strategy: expected a strategy that goes with "
            "replicateStrategy optim, got 'no_shard': tensor model.embed_tokens.weight: axis "
            "shard: "
            "cannot move from Flat to Replicate: axis replicate lies outside and must be gathered "
            "first\n"},
        Bad{"SizesAndReplicas",
            {.parallelism = "strategy: hsdp, replicas: 2", .elastic = "sizes: [2, 3, 8]"},
            "spec.elastic.sizes: expected multiples of the 2 replicas (parallelism.replicas), got "
            "3\n"},
        Bad{"CountAndReplicas",
            {.parallelism = "strategy: hsdp, replicas: 2", .elastic = "", .count = "3"},
            "spec.devices.count: expected a multiple of the 2 replicas (parallelism.replicas), got "
            "3\n"},
        Bad{"SizesAndTensorGroups",
            {.parallelism = "tensor: 2", .elastic = "sizes: [2, 3, 8]"},
            "spec.elastic.sizes: expected multiples of the 2 devices of the replicas and their "
            "tensor groups (parallelism.replicas times parallelism.tensor), got 3\n"},
        Bad{"TensorIsAPowerOfTwo",
            {.parallelism = "tensor: 3"},
            "spec.parallelism.tensor: expected a power of two up to 16, got 3\n"},
        Bad{"TensorAndHeads",
            {.parallelism = "tensor: 8", .elastic = "", .count = "8"},
            "spec.parallelism.tensor: expected a divisor of the 4 heads of "
            "model.layers.0.self_attn.q_proj.weight, got 8\n"},
        Bad{"SequenceParallelWithoutTensor",
            {.parallelism = "sequenceParallel: true"},
            "spec.parallelism.sequenceParallel: expected false without parallelism.tensor, got "
            "true\n"},
        Bad{"ChunksWithoutTensor",
            {.parallelism = "tensorChunks: 4"},
            "spec.parallelism.tensorChunks: expected 1 without parallelism.tensor, got 4\n"},
        Bad{"ChunksAreAPowerOfTwo",
            {.parallelism = "tensor: 2, tensorChunks: 3"},
            "spec.parallelism.tensorChunks: expected a power of two up to 16, got 3\n"},
        Bad{"TooManyChunks",
            {.parallelism = "tensor: 2, tensorChunks: 17"},
            "spec.parallelism.tensorChunks: expected a whole number from 1 to 16, got 17\n"},
        Bad{"AcrossNodesWithoutTensor",
            {.parallelism = "tensorAcrossNodes: true"},
            "spec.parallelism.tensorAcrossNodes: expected false without parallelism.tensor, got "
            "true\n"},
        Bad{"Recompute",
            {.parallelism = "recompute: full"},
            "spec.parallelism.recompute: expected one of none, norm, mlp, block, got 'full'\n"},
        Bad{"Wire",
            {.parallelism = "gradientWire: fp16"},
            "spec.parallelism.gradientWire: expected one of fp32, bf16, got "
            "'fp16'\n"},
        Bad{"Blocks",
            {.parallelism = "communicationBlocks: 65"},
            "spec.parallelism.communicationBlocks: expected a whole number from 0 to 64, got 65\n"},
        Bad{"FreezeNothing",
            {.training = "freeze: ['model.layers.0.*', 'model.layer.*']"},
            "spec.training.freeze[1]: expected a pattern that matches a tensor, such as "
            "model.embed_tokens.weight, got 'model.layer.*'\n"},
        Bad{"FreezeEmpty",
            {.training = "freeze: ['']"},
            "spec.training.freeze[0]: expected a pattern of tensor names, got nothing\n"},
        Bad{"FreezeAll",
            {.training = "freeze: ['*']"},
            "spec.training.freeze: expected to leave a tensor that is trained, got patterns that "
            "match all\n"}),
    NameOfCase);

}  // namespace
}  // namespace ravel
