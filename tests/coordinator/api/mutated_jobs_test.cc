// Job files with something wrong in them: a value that was another one, a line lost or twice, bytes
// damaged. Each is refused with places and reasons, or is a job that can be written down, read back
// and planned.

#include <iterator>
#include <random>
#include <string>
#include <vector>

#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_join.h>
#include <absl/strings/str_replace.h>
#include <absl/strings/str_split.h>
#include <gtest/gtest.h>

#include "common/plan/plan_proto.h"
#include "common/plan/sharding_plan.h"
#include "coordinator/api/job_file_proto.h"

namespace ravel {
namespace {

constexpr uint64_t kSeed = 20261122;
constexpr int kTrials = 1500;

constexpr char kLlama[] = R"(apiVersion: ravel/v1
kind: TrainingJob
metadata: {name: mutated, labels: {a: b}}
spec:
  model:
    config:
      modelType: llama
      vocabSize: 100
      hiddenSize: 32
      intermediateSize: 48
      numHiddenLayers: 3
      numAttentionHeads: 4
      numKeyValueHeads: 2
      maxPositionEmbeddings: 64
      tieWordEmbeddings: true
  data:
    train: [{path: /data/tokens, weight: 2}, {path: /data/more}]
    sequenceLength: 16
  training:
    steps: 30
    globalBatch: 16
    microBatch: 1
    seed: 1
    optimizer: {lr: 3e-3, weightDecay: 0.1, betas: [0.9, 0.95], eps: 1e-8}
    schedule: {kind: cosine, warmupSteps: 3, minRatio: 0.1}
    freeze: ["model.embed_tokens.*"]
  parallelism:
    strategy: optim_grads_params
    gatherWindow: 1MiB
    stagingWindow: 1MiB
    recompute: block
    gradientWire: bf16
  devices: {kind: cpu, count: 4}
  elastic: {sizes: [1, 2, 4], growDelay: 1s}
  determinism: {mode: exact, virtualRanks: 8}
  checkpoint:
    store: file:///checkpoints
    everySteps: 50
    keep: {last: 3}
  restart: {backoff: 1s}
  detection: {time: 1s}
  observability: {logEvery: 1, localise: true, normsEvery: 3}
)";

constexpr char kGpt2[] = R"({"apiVersion": "ravel/v1", "kind": "TrainingJob",
"metadata": {"name": "mutated"},
"spec": {
"model": {"config": {"modelType": "gpt2", "vocabSize": 65, "hiddenSize": 32,
"numHiddenLayers": 2, "numAttentionHeads": 2,
"maxPositionEmbeddings": 64}},
"data": {"train": [{"path": "/data/tokens"}], "sequenceLength": 16},
"training": {"steps": 30, "globalBatch": 16, "optimizer": {"lr": 0.003, "stateDtype": "bf16"}},
"parallelism": {"strategy": "hfsdp", "replicas": 2,
"replicateStrategy": "optim", "allowPadding": true,
"units": [{"match": "layers.*", "strategy": "optim", "replicateStrategy": "no_shard"}],
"communicationBlocks": 8},
"precision": {"compute": "bf16"},
"devices": {"kind": "gpu", "count": 4},
"elastic": {"min": 2, "max": 4, "step": 2},
"determinism": {"mode": "fast", "virtualRanks": 4, "algorithms": "proposed"},
"checkpoint": {"store": "/checkpoints", "every": "10m"}}})";

constexpr const char* kValues[] = {
    "0",          "-1",          "1",          "2",
    "3",          "7",           "64",         "1023",
    "65536",      "2147483648",  "4294967296", "9223372036854775807",
    "1e308",      ".nan",        "-.inf",      "0.5",
    "true",       "null",        "\"\"",       "[]",
    "{}",         "[4, 2, 0]",   "{a: 1}",     "x",
    "1GiB",       "-5s",         "99999999h",  "fp32",
    "exact",      "no_shard",    "hsdp",       "-9223372036854775808",
    "&a [*a, 1]", "\"\\u0000\"", "!!float 1",  "qwen3"};

// What follows one "name: " of a line is another value.
void ReplaceValue(std::mt19937_64& random, std::string& line) {
  std::vector<size_t> colons;
  for (size_t at = line.find(": "); at != std::string::npos; at = line.find(": ", at + 1)) {
    colons.push_back(at);
  }
  if (colons.empty()) {
    return;
  }
  const size_t begin = colons[random() % colons.size()] + 2;
  const size_t end = std::min(line.size(), line.find_first_of(",}]", begin));
  line.replace(begin, end - begin, kValues[random() % std::size(kValues)]);
}

std::string Mutated(std::mt19937_64& random) {
  std::vector<std::string> lines = absl::StrSplit(random() % 3 == 0 ? kGpt2 : kLlama, '\n');
  for (size_t count = 1 + random() % 3; count > 0; --count) {
    const size_t line = random() % lines.size();
    switch (random() % 12) {
      case 0:
        lines.erase(lines.begin() + static_cast<std::ptrdiff_t>(line));
        break;
      case 1:
        lines.insert(lines.begin() + static_cast<std::ptrdiff_t>(line),
                     lines[random() % lines.size()]);
        break;
      case 2:
        lines[line].insert(0, "  ");
        break;
      case 3:
        if (!lines[line].empty()) {
          lines[line][random() % lines[line].size()] = static_cast<char>(random());
        }
        break;
      default:
        ReplaceValue(random, lines[line]);
    }
  }
  return absl::StrJoin(lines, "\n");
}

// Two runs of canonicalization differ in nothing, and what the coordinator stores is read back.
void ExpectStable(const CanonicalJob& canonical) {
  const CanonicalJob again = Canonicalize(canonical.job, {});
  ASSERT_TRUE(again.ok());
  EXPECT_EQ(CanonicalJson(again.job), CanonicalJson(canonical.job));
  const std::string stored = plan::SerializeJob(canonical.spec);
  const absl::StatusOr<plan::JobSpec> read = plan::ParseJob(stored);
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(plan::SerializeJob(*read), stored);
}

// How many plans were made of it.
int PlanAll(const plan::JobSpec& spec) {
  int plans = 0;
  for (const int64_t ranks : spec.elastic.sizes) {
    constexpr int64_t kMostLayers = 64;  // of those that are planned here: for the time it takes
    if (!spec.model || spec.model->num_hidden_layers > kMostLayers || ranks > spec.device_count) {
      continue;
    }
    const absl::StatusOr<plan::ShardingPlan> plan =
        plan::BuildShardingPlan({.spec = spec, .ranks = ranks, .shared_memory = ranks % 2 == 0});
    EXPECT_NE(plan.status().code(), absl::StatusCode::kInternal) << plan.status();
    plans += plan.ok() ? 1 : 0;
  }
  return plans;
}

TEST(MutatedJobs, AreRefusedWithReasonsOrArePlanned) {
  int refused = 0;
  int planned = 0;
  for (int trial = 0; trial < kTrials; ++trial) {
    std::mt19937_64 random(kSeed + static_cast<uint64_t>(trial));
    const std::string text = Mutated(random);
    SCOPED_TRACE(absl::StrCat("trial ", trial, "\n", text));
    const ParsedJobFile parsed = ParseJobFile(text);
    CanonicalJob canonical = Canonicalize(parsed.job, {});
    std::vector<JobViolation> violations = parsed.violations;
    violations.insert(violations.end(), canonical.violations.begin(), canonical.violations.end());
    LocateViolations(parsed.positions, violations);
    for (const JobViolation& violation : violations) {
      EXPECT_TRUE(absl::StartsWith(FormatViolation(violation, "job.yaml"), "job.yaml"));
      EXPECT_FALSE(violation.expected.empty());
    }
    if (!violations.empty()) {
      ++refused;
      continue;
    }
    ExpectStable(canonical);
    planned += PlanAll(canonical.spec);
    if (HasFailure()) {
      return;
    }
  }
  EXPECT_GT(refused, kTrials / 2);
  EXPECT_GT(planned, kTrials / 10);
}

// The next number after each of these is none: rules add only what they have checked.
TEST(MutatedJobs, NumbersAtTheEndOfTheirTypeAreRefused) {
  const std::string most = "9223372036854775807";
  for (const std::string& elastic : {"{min: 1, max: 4, step: " + most + "}",
                                     "{sizes: [1, 2, " + most + "]}",
                                     "{min: 1, max: " + most + "}"}) {
    SCOPED_TRACE(elastic);
    const std::string text = absl::StrReplaceAll(
        kLlama, {{"elastic: {sizes: [1, 2, 4], growDelay: 1s}", "elastic: " + elastic}});
    ASSERT_NE(text, kLlama);
    const ParsedJobFile file = ParseJobFile(text);
    ASSERT_TRUE(file.violations.empty());
    const CanonicalJob job = Canonicalize(file.job, {});
    ASSERT_FALSE(job.ok());
    EXPECT_TRUE(absl::StartsWith(job.violations[0].path, "spec.elastic."))
        << job.violations[0].path;
  }
}

}  // namespace
}  // namespace ravel
