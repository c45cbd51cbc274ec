#include "coordinator/api/job_file_proto.h"

#include <filesystem>
#include <fstream>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_replace.h>
#include <google/protobuf/util/message_differencer.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/token_file.h"
#include "coordinator/ctl/local_paths.h"

namespace ravel {
namespace {

using google::protobuf::util::MessageDifferencer;

// A valid job in flow style; tests change one thing at a time.
constexpr char kJob[] = R"(apiVersion: ravel/v1
kind: TrainingJob
metadata: {name: demo}
spec:
  model:
    config: {vocabSize: 257, hiddenSize: 64, intermediateSize: 128, numHiddenLayers: 2,
             numAttentionHeads: 4, maxPositionEmbeddings: 32}
  data:
    train:
      - {path: /data/train}
  training:
    steps: 100
    globalBatch: 8
    optimizer: {lr: 3e-4}
  devices: {kind: cpu, count: 2}
  elastic: {min: 1, max: 4}
  checkpoint: {store: /data/checkpoints, everySteps: 10}
)";

std::string With(const std::string& from, const std::string& to) {
  const std::string text = absl::StrReplaceAll(kJob, {{from, to}});
  EXPECT_NE(text, kJob) << from;
  return text;
}

// Every violation of the file, one per line, as ravelctl prints them.
std::string Violations(const std::string& text, bool check_paths = false) {
  ParsedJobFile parsed = ParseJobFile(text);
  std::vector<JobViolation> all = parsed.violations;
  if (all.empty()) {
    all = ctl::CanonicalizeHere(parsed.job,
                                check_paths ? ctl::PathScope::kAll : ctl::PathScope::kNone)
              .violations;
  }
  LocateViolations(parsed.positions, all);
  std::string out;
  for (const JobViolation& violation : all) {
    absl::StrAppend(&out, FormatViolation(violation, "job.yaml"), "\n");
  }
  return out;
}

TEST(JobFile, AViolationWithoutAnExpectationSaysWhatIsWrong) {
  const JobViolation violation = {"spec.checkpoint.store", 9, 5, "", "it belongs to another job"};
  EXPECT_EQ(FormatViolation(violation, "job.yaml"),
            "job.yaml:9:5: spec.checkpoint.store: it belongs to another job");
}

TEST(JobFile, AValidFileBecomesASpecWithItsDefaults) {
  const ParsedJobFile parsed = ParseJobFile(kJob);
  ASSERT_TRUE(parsed.violations.empty()) << FormatViolation(parsed.violations[0], "");
  const CanonicalJob job = Canonicalize(parsed.job, {});
  ASSERT_TRUE(job.ok()) << FormatViolation(job.violations[0], "");
  EXPECT_EQ(job.spec.name, "demo");
  EXPECT_EQ(job.spec.namespace_name, "default");
  EXPECT_EQ(job.spec.model->num_key_value_heads, 4);
  EXPECT_EQ(job.spec.data.sequence_length, 32);
  EXPECT_EQ(job.spec.elastic.sizes, (std::vector<int64_t>{1, 2, 3, 4}));
  EXPECT_EQ(job.spec.virtual_ranks, 4);
  EXPECT_EQ(job.spec.determinism, plan::DeterminismMode::kExact);
  EXPECT_EQ(job.spec.strategy, plan::Strategy::kOptimGradsParams);
  EXPECT_EQ(job.spec.checkpoint.store, "file:///data/checkpoints");
  EXPECT_EQ(job.spec.checkpoint.every_ms, 0);
  EXPECT_EQ(job.spec.checkpoint.every_steps, 10);
  EXPECT_EQ(job.spec.optimizer.weight_decay, 0.1);
  EXPECT_EQ(job.spec.detection_ms, 5000);
  EXPECT_EQ(job.spec.stall_factor, 5);
  EXPECT_EQ(job.spec.warmup_allowance_ms, 600'000);
  EXPECT_EQ(job.job.spec().elastic().grow_delay(), "5m");
}

TEST(JobFile, TheCanonicalFormIsItsOwnCanonicalForm) {
  const CanonicalJob once = Canonicalize(ParseJobFile(kJob).job, {});
  ASSERT_TRUE(once.ok());
  const CanonicalJob twice = Canonicalize(once.job, {});
  ASSERT_TRUE(twice.ok());
  EXPECT_TRUE(MessageDifferencer::Equals(once.job, twice.job));
  const ParsedJobFile back = ParseJobFile(CanonicalJson(once.job));
  ASSERT_TRUE(back.violations.empty()) << FormatViolation(back.violations[0], "");
  EXPECT_TRUE(MessageDifferencer::Equals(once.job, back.job));
}

TEST(JobFile, KeyOrderAndNotationDoNotChangeTheCanonicalForm) {
  const CanonicalJob yaml = Canonicalize(ParseJobFile(kJob).job, {});
  const std::string json =
      R"({"spec": {"checkpoint": {"everySteps": "10", "store": "file:///data/checkpoints/"},
    "elastic": {"sizes": [4, 3, 1, 2]}, "devices": {"count": 2, "kind": "cpu"},
    "training": {"optimizer": {"lr": 0.0003, "name": "adamw"}, "globalBatch": 8, "steps": 100},
    "data": {"train": [{"path": "/data/train", "weight": 1.0}]}, "parallelism": {"strategy": "zero3"},
    "model": {"config": {"vocabSize": 257, "hiddenSize": 64, "intermediateSize": 128, "numHiddenLayers": 2,
      "numAttentionHeads": 4, "maxPositionEmbeddings": 32}}},
    "metadata": {"name": "demo"}, "kind": "TrainingJob", "apiVersion": "ravel/v1"})";
  const CanonicalJob other = Canonicalize(ParseJobFile(json).job, {});
  ASSERT_TRUE(other.ok()) << FormatViolation(other.violations[0], "");
  EXPECT_EQ(CanonicalJson(yaml.job), CanonicalJson(other.job));
}

struct BadFile {
  const char* name;
  std::string text;
  std::string message;
};
void PrintTo(const BadFile& bad, std::ostream* out) {
  *out << bad.name;
}
std::string CaseName(const ::testing::TestParamInfo<BadFile>& bad) {
  return bad.param.name;
}
class BadFiles : public ::testing::TestWithParam<BadFile> {};

TEST_P(BadFiles, EveryMistakeIsNamedWithItsPlace) {
  EXPECT_EQ(Violations(GetParam().text), GetParam().message);
}

INSTANTIATE_TEST_SUITE_P(
    Keys,
    BadFiles,
    ::testing::Values(
        BadFile{"UnknownKey",
                With("steps: 100", "stpes: 100"),
                "job.yaml:12:5: spec.training.stpes: expected a known field (did you mean "
                "'steps'?), got 'stpes'\n"},
        BadFile{"SnakeCase",
                With("globalBatch", "global_batch"),
                "job.yaml:13:5: spec.training.global_batch: expected a known field (did you mean "
                "'globalBatch'?), got 'global_batch'\n"},
        BadFile{
            "WrongPlace",
            With("    steps: 100", "    steps: 100\n    clipNorm: 1"),
            "job.yaml:13:5: spec.training.clipNorm: expected a known field ('clipNorm' belongs in "
            "spec.training.optimizer), got 'clipNorm'\n"},
        BadFile{"Duplicate",
                With("    steps: 100", "    steps: 100\n    steps: 200"),
                "job.yaml:13:5: spec.training.steps: expected each field once, got it again (first "
                "on line 12)\n"},
        BadFile{
            "SeveralAtOnce",
            With("    steps: 100\n    globalBatch: 8", "    stpes: 1\n    globalBatch: many"),
            "job.yaml:12:5: spec.training.stpes: expected a known field (did you mean 'steps'?), "
            "got 'stpes'\n"
            "job.yaml:13:18: spec.training.globalBatch: expected a whole number, got 'many'\n"}),
    CaseName);

INSTANTIATE_TEST_SUITE_P(
    Types,
    BadFiles,
    ::testing::Values(
        BadFile{"TextForNumber",
                With("steps: 100", "steps: lots"),
                "job.yaml:12:12: spec.training.steps: expected a whole number, got 'lots'\n"},
        BadFile{"FractionForWhole",
                With("steps: 100", "steps: 1.5"),
                "job.yaml:12:12: spec.training.steps: expected a whole number, got '1.5'\n"},
        BadFile{"TooLarge",
                With("steps: 100", "steps: 99999999999999999999"),
                "job.yaml:12:12: spec.training.steps: expected a whole number, got "
                "'99999999999999999999'\n"},
        BadFile{"NotANumber",
                With("lr: 3e-4", "lr: .nan"),
                "job.yaml:14:21: spec.training.optimizer.lr: expected a number, got '.nan'\n"},
        BadFile{"NegativeSeed",
                With("    steps: 100", "    steps: 100\n    seed: -1"),
                "job.yaml:13:11: spec.training.seed: expected a whole number >= 0, got '-1'\n"},
        BadFile{"YesForBoolean",
                With("everySteps: 10", "everySteps: 10, atStart: yes"),
                "job.yaml:17:67: spec.checkpoint.atStart: expected true or false, got 'yes'\n"},
        BadFile{"ListForText",
                With("kind: cpu", "kind: [cpu]"),
                "job.yaml:15:19: spec.devices.kind: expected text, got a list\n"},
        BadFile{"TextForGroup",
                With("elastic: {min: 1, max: 4}", "elastic: wide"),
                "job.yaml:16:12: spec.elastic: expected a mapping, got 'wide'\n"},
        BadFile{"GroupForList",
                With("train:\n      - {path: /data/train}", "train: {path: /data/train}"),
                "job.yaml:9:12: spec.data.train: expected a list, got a mapping\n"},
        BadFile{"NothingForText",
                With("kind: cpu", "kind: "),
                "job.yaml:15:19: spec.devices.kind: expected text, got nothing\n"},
        BadFile{"NoDocument",
                "",
                "job.yaml:1:1: expected a YAML or JSON job file, got an error: expected a "
                "document, got an empty file\n"},
        BadFile{"AList", "- 1\n", "job.yaml:1:1: expected a mapping, got a list\n"}),
    CaseName);

INSTANTIATE_TEST_SUITE_P(
    Values,
    BadFiles,
    ::testing::Values(
        BadFile{"Version",
                With("ravel/v1", "ravel/v2"),
                "job.yaml:1:1: apiVersion: expected ravel/v1, got 'ravel/v2'\n"},
        BadFile{"Name",
                With("name: demo", "name: Demo_1"),
                "job.yaml:3:12: metadata.name: expected lowercase letters, digits and '-', at most "
                "63, got 'Demo_1'\n"},
        BadFile{"NoSteps",
                With("    steps: 100\n", ""),
                "job.yaml:11:3: spec.training.steps: expected exactly one of steps and tokens, got "
                "neither\n"},
        BadFile{"StepsAndTokens",
                With("steps: 100", "steps: 100\n    tokens: 100"),
                "job.yaml:12:5: spec.training.steps: expected exactly one of steps and tokens, got "
                "both\n"},
        BadFile{"LearningRate",
                With("lr: 3e-4", "lr: -1"),
                "job.yaml:14:17: spec.training.optimizer.lr: expected a number above 0, got -1\n"},
        BadFile{"Betas",
                With("lr: 3e-4", "lr: 3e-4, betas: [0.9, 1]"),
                "job.yaml:14:27: spec.training.optimizer.betas: expected 2 numbers from 0 to "
                "below 1, got [0.9, 1]\n"},
        BadFile{
            "Schedule",
            With("    optimizer:", "    schedule: {kind: cosin, warmupSteps: 100}\n    optimizer:"),
            "job.yaml:14:16: spec.training.schedule.kind: expected one of cosine, constant, "
            "linear, wsd "
            "(did you mean 'cosine'?), got 'cosin'\n"
            "job.yaml:14:29: spec.training.schedule.warmupSteps: expected 0 to 99, below the job's "
            "steps, got 100\n"},
        BadFile{
            "BatchAndLanes",
            With("globalBatch: 8", "globalBatch: 6"),
            "job.yaml:13:5: spec.training.globalBatch: expected a multiple of the 4 virtual ranks "
            "(determinism.virtualRanks), got 6\n"},
        BadFile{"CountIsNoSize",
                With("count: 2", "count: 5"),
                "job.yaml:15:24: spec.devices.count: expected one of the allowed sizes (1, 2, 3, "
                "4), got 5\n"},
        BadFile{"ElasticBothWays",
                With("min: 1, max: 4", "min: 1, max: 4, sizes: [1, 2]"),
                "job.yaml:16:3: spec.elastic: expected either sizes or min and max, got both\n"},
        BadFile{"ElasticBackwards",
                With("min: 1, max: 4", "min: 4, max: 1"),
                "job.yaml:16:21: spec.elastic.max: expected a whole number from 4 (elastic.min) to "
                "65536, got 1\n"},
        BadFile{"Lanes",
                With("  elastic:", "  determinism: {virtualRanks: 3}\n  elastic:"),
                "job.yaml:16:17: spec.determinism.virtualRanks: expected a power of two, got 3\n"},
        BadFile{"Algorithms",
                With("  elastic:", "  determinism: {algorithms: fastest}\n  elastic:"),
                "job.yaml:16:17: spec.determinism.algorithms: expected one of measured, proposed, "
                "got 'fastest'\n"},
        BadFile{"RelativePath",
                With("path: /data/train", "path: train"),
                "job.yaml:10:10: spec.data.train[0].path: expected an absolute path or file:// "
                "URL, got 'train'\n"},
        BadFile{"Store",
                With("store: /data/checkpoints", "store: ravel://store/x"),
                "job.yaml:17:16: spec.checkpoint.store: expected ravel://HOST:PORT/PATH, "
                "s3://BUCKET/PATH, file:///PATH or /PATH, got 'ravel://store/x'\n"},
        BadFile{"StoreOfAnotherKind",
                With("store: /data/checkpoints", "store: ftp://host/x"),
                "job.yaml:17:16: spec.checkpoint.store: expected ravel://HOST:PORT/PATH, "
                "s3://BUCKET/PATH, file:///PATH or /PATH, got 'ftp://host/x'\n"},
        BadFile{"TooManySteps",
                With("steps: 100", "steps: 4611686018427387904"),
                "job.yaml:12:5: spec.training.steps: expected at most 1000000000, got "
                "4611686018427387904\n"},
        BadFile{"BatchBeyondAnyPlan",
                With("globalBatch: 8", "globalBatch: 4611686018427387904"),
                "job.yaml:13:5: spec.training.globalBatch: expected at most 134217728 (2^30 tokens "
                "on each virtual rank), got 4611686018427387904\n"},
        BadFile{"LanesBeyondAnyPlan",
                With("  elastic:", "  determinism: {virtualRanks: 131072}\n  elastic:"),
                "job.yaml:16:17: spec.determinism.virtualRanks: expected at most 65536, got "
                "131072\n"},
        BadFile{"RunTime",
                With("  elastic:", "  maxRunTime: 10s\n  elastic:"),
                "job.yaml:16:3: spec.maxRunTime: expected a duration such as 90s, 20m or 14d, of "
                "at least 1m, got '10s'\n"},
        BadFile{"TimeToLive",
                With("  elastic:", "  ttlAfterFinish: 1m\n  elastic:"),
                "job.yaml:16:3: spec.ttlAfterFinish: expected a duration such as 90s, 20m or 14d, "
                "of at least 1h, got '1m'\n"},
        BadFile{"Priority",
                With("  elastic:", "  priority: 5\n  elastic:"),
                "job.yaml:16:3: spec.priority: expected 0: jobs are placed in the order of "
                "submission, priorities are not supported yet, got 5\n"},
        BadFile{"Queue",
                With("  elastic:", "  queue: main\n  elastic:"),
                "job.yaml:16:3: spec.queue: expected default: there are no other queues yet, got "
                "'main'\n"},
        BadFile{"ResumeFromTheRoot",
                With("everySteps: 10", "everySteps: 10, resumeFrom: /x/.."),
                "job.yaml:17:58: spec.checkpoint.resumeFrom: expected the path of a step "
                "directory, got '/'\n"},
        BadFile{"MaxAge",
                With("everySteps: 10", "everySteps: 10, maxAge: soon"),
                "job.yaml:17:58: spec.checkpoint.maxAge: expected a duration such as 90s, 20m or "
                "14d, of at least 1m, got 'soon'\n"},
        BadFile{"MaxAgeBelowTheInterval",
                With("everySteps: 10", "every: 30m, maxAge: 20m"),
                "job.yaml:17:54: spec.checkpoint.maxAge: expected at least spec.checkpoint.every, "
                "30m, got 20m\n"},
        BadFile{"MaxFailedSaves",
                With("everySteps: 10", "everySteps: 10, maxFailedSaves: -1"),
                "job.yaml:17:58: spec.checkpoint.maxFailedSaves: expected a whole number >= 0, "
                "got -1\n"},
        BadFile{
            "WhenBusy",
            With("everySteps: 10", "everySteps: 10, whenBusy: hurry"),
            "job.yaml:17:58: spec.checkpoint.whenBusy: expected one of skip, wait, got 'hurry'\n"},
        BadFile{"Duration",
                With("everySteps: 10", "every: soon"),
                "job.yaml:17:42: spec.checkpoint.every: expected a duration such as 90s, 20m or "
                "14d, of at least 1m, "
                "got 'soon'\n"},
        BadFile{"Detection",
                With("  elastic:", "  detection: {time: 100ms}\n  elastic:"),
                "job.yaml:16:15: spec.detection.time: expected a duration such as 90s, 20m or 14d, "
                "from 500ms to 1m, "
                "got '100ms'\n"},
        BadFile{"StallFactor",
                With("  elastic:", "  detection: {stallFactor: 1}\n  elastic:"),
                "job.yaml:16:15: spec.detection.stallFactor: expected a number from 2 to 1000, "
                "got 1\n"},
        BadFile{"TraceBackwards",
                With("  elastic:",
                     "  observability: {trace: {firstStep: 5, lastStep: 4, directory: /t}}\n"
                     "  elastic:"),
                "job.yaml:16:41: spec.observability.trace.lastStep: expected a whole number >= 5, "
                "got 4\n"},
        BadFile{
            "TraceNowhere",
            With("  elastic:", "  observability: {trace: {firstStep: 1, lastStep: 1}}\n  elastic:"),
            "job.yaml:16:19: spec.observability.trace.directory: expected an absolute path or "
            "file:// URL, got nothing\n"},
        BadFile{"NormsNeverAgain",
                With("  elastic:", "  observability: {normsEvery: -1}\n  elastic:"),
                "job.yaml:16:19: spec.observability.normsEvery: expected a whole number >= 0, got "
                "-1\n"},
        BadFile{"SequenceLength",
                With("  data:\n", "  data:\n    sequenceLength: 33\n"),
                "job.yaml:9:5: spec.data.sequenceLength: expected 1 to 32, the model's maximum, "
                "got 33\n"},
        BadFile{"ModelBothWays",
                With("  model:\n", "  model:\n    from: /model\n"),
                "job.yaml:5:3: spec.model: expected exactly one of from (a Hugging Face directory) "
                "and config, got "
                "both\n"},
        BadFile{"LayerDropOfOne",
                With("    steps: 100", "    steps: 100\n    layerDrop: 1"),
                "job.yaml:13:5: spec.training.layerDrop: expected a number from 0 to below 1, got "
                "1\n"},
        BadFile{"EvaluationWithoutData",
                With("    steps: 100", "    steps: 100\n    evaluation: {every: 10}"),
                "job.yaml:8:3: spec.data.validation: expected token files, because "
                "evaluation.every is set, got "
                "nothing\n"}),
    CaseName);

TEST(JobFile, AnInlineModelsMistakesNameItsFields) {
  const std::string text =
      Violations(With("numAttentionHeads: 4", "numAttentionHeads: 4, numKeyValueHeads: 3"));
  EXPECT_NE(text.find("job.yaml:7:"), std::string::npos) << text;
  EXPECT_NE(text.find("spec.model.config.numKeyValueHeads: expected"), std::string::npos) << text;
  const std::string shared = Violations(
      With("numAttentionHeads: 4", "numAttentionHeads: 4, modelType: qwen2, layerSharing: true"));
  EXPECT_NE(shared.find("spec.model.config.layerSharing: expected false: layers of qwen2 run once"),
            std::string::npos)
      << shared;
}

TEST(JobFile, TextFieldsKeepWhatLooksLikeSomethingElse) {
  const ParsedJobFile parsed =
      ParseJobFile(With("name: demo", "name: 'no', labels: {a: 1.0, b: true, c: null}"));
  ASSERT_EQ(parsed.violations.size(), 1u);  // null is nothing, not text
  EXPECT_EQ(parsed.violations[0].path, "metadata.labels.c");
  EXPECT_EQ(parsed.job.metadata().labels().at("a"), "1.0");
  EXPECT_EQ(parsed.job.metadata().labels().at("b"), "true");
}

TEST(JobFile, LimitsOfSaves) {
  CanonicalJob job = Canonicalize(ParseJobFile(kJob).job, {});
  ASSERT_TRUE(job.ok());
  EXPECT_EQ(job.spec.checkpoint.max_age_ms, 0);
  EXPECT_EQ(job.spec.checkpoint.max_failed_saves, 0);
  EXPECT_FALSE(job.spec.checkpoint.wait_when_busy);
  EXPECT_FALSE(job.spec.checkpoint.allow_numerics_change);
  EXPECT_EQ(job.job.spec().checkpoint().when_busy(), "skip");
  job = Canonicalize(
      ParseJobFile(With("everySteps: 10",
                        "everySteps: 10, maxAge: 90m, maxFailedSaves: 5, whenBusy: wait, "
                        "allowNumericsChange: true"))
          .job,
      {});
  ASSERT_TRUE(job.ok()) << FormatViolation(job.violations[0], "");
  EXPECT_EQ(job.spec.checkpoint.max_age_ms, 90 * 60'000);
  EXPECT_EQ(job.spec.checkpoint.max_failed_saves, 5);
  EXPECT_TRUE(job.spec.checkpoint.wait_when_busy);
  EXPECT_TRUE(job.spec.checkpoint.allow_numerics_change);
  EXPECT_EQ(job.job.spec().checkpoint().max_age(), "1h30m");
}

TEST(JobFile, PathsBecomeNormal) {
  const ParsedJobFile parsed = ParseJobFile(With(
      "store: /data/checkpoints", "store: /data/x/../checkpoints//, resumeFrom: /a/./step-5/"));
  const CanonicalJob job = Canonicalize(parsed.job, {});
  ASSERT_TRUE(job.ok());
  EXPECT_EQ(job.spec.checkpoint.store, "file:///data/checkpoints");
  EXPECT_EQ(job.spec.checkpoint.resume_from, "/a/step-5");
}

TEST(JobFile, TokensBecomeWholeStepsWithAWarning) {
  const CanonicalJob job = Canonicalize(ParseJobFile(With("steps: 100", "tokens: 1000")).job, {});
  ASSERT_TRUE(job.ok()) << FormatViolation(job.violations[0], "");
  EXPECT_EQ(job.spec.steps, 4);  // 8 sequences of 32 tokens a step
  ASSERT_EQ(job.warnings.size(), 1u);
  EXPECT_NE(job.warnings[0].find("4 whole steps of 256 tokens"), std::string::npos);
}

TEST(JobFile, AliasesOfStrategiesGetTheirLongNames) {
  const std::pair<const char*, const char*> kNames[] = {{"zero0", "no_shard"},
                                                        {"zero1", "optim"},
                                                        {"zero2", "optim_grads"},
                                                        {"zero3", "optim_grads_params"}};
  for (const auto& [alias, name] : kNames) {
    const std::string text =
        With("  devices:", absl::StrCat("  parallelism: {strategy: ", alias, "}\n  devices:"));
    const CanonicalJob job = Canonicalize(ParseJobFile(text).job, {});
    EXPECT_EQ(job.job.spec().parallelism().strategy(), name);
  }
}

TEST(JobFile, GpuJobsAreValid) {
  const CanonicalJob job = Canonicalize(ParseJobFile(With("kind: cpu", "kind: gpu")).job, {});
  EXPECT_TRUE(job.ok()) << FormatViolation(job.violations[0], "");
  EXPECT_FALSE(job.spec.cpu_devices);
  EXPECT_EQ(job.spec.determinism, plan::DeterminismMode::kFast);
  EXPECT_EQ(job.spec.algorithms, plan::AlgorithmChoice::kMeasured);
}

class JobPaths : public ::testing::Test {
 protected:
  static CanonicalJob CanonicalHere(const std::string& text) {
    return ctl::CanonicalizeHere(ParseJobFile(text).job, ctl::PathScope::kAll);
  }
  void SetUp() override {
    std::string pattern = ::testing::TempDir() + "job_paths_XXXXXX";
    folder_ = mkdtemp(pattern.data());
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }
  void WriteTokens(const std::string& name, int64_t vocabulary, const std::vector<int32_t>& ids) {
    const auto writer = MegatronWriter::Create(folder_ + "/" + name, vocabulary);
    ASSERT_TRUE(writer.ok());
    ASSERT_TRUE((*writer)->AddDocument(ids).ok());
    ASSERT_TRUE((*writer)->Finish().ok());
  }
  std::string Job(const std::string& more = "") {
    return absl::StrReplaceAll(
        kJob,
        {{"/data/train", folder_ + "/train"}, {"  data:\n", absl::StrCat("  data:\n", more)}});
  }
  std::string folder_;
};

TEST_F(JobPaths, MissingTokenFilesAreNamed) {
  const std::string text = Violations(Job(), true);
  EXPECT_NE(text.find("job.yaml:10:10: spec.data.train[0].path: expected a token file, got " +
                      folder_ + "/train.idx: not found"),
            std::string::npos)
      << text;
}

TEST_F(JobPaths, TruncatedTokenFilesAreNamed) {
  WriteTokens("train", 257, std::vector<int32_t>(100, 1));
  std::filesystem::resize_file(folder_ + "/train.bin", 100);
  const std::string text = Violations(Job(), true);
  EXPECT_NE(text.find(folder_ + "/train.bin: expected 200 bytes"), std::string::npos) << text;
}

TEST_F(JobPaths, IdsBeyondTheVocabularyAreNamed) {
  std::vector<int32_t> ids(100, 1);
  ids[50] = 300;
  WriteTokens("train", 400, ids);
  const std::string text = Violations(Job(), true);
  EXPECT_NE(text.find("expected ids below the model's vocabulary of 257, got id 300 in " + folder_ +
                      "/train"),
            std::string::npos)
      << text;
}

TEST_F(JobPaths, TooFewTokensAreNamed) {
  WriteTokens("train", 257, std::vector<int32_t>(32, 1));
  EXPECT_NE(
      Violations(Job(), true).find("expected at least 33 tokens (sequenceLength + 1), got 32 in"),
      std::string::npos);
  WriteTokens("train", 257, std::vector<int32_t>(33 + 32, 1));  // two samples, 800 are needed
  EXPECT_NE(Violations(Job("    passes: 3\n"), true).find("spec.data.passes: expected 400 or more"),
            std::string::npos)
      << Violations(Job("    passes: 3\n"), true);
  EXPECT_EQ(Violations(Job("    passes: 400\n"), true), "");
}

TEST_F(JobPaths, TheTokenizerBesideTheDataIsFound) {
  WriteTokens("train", 257, std::vector<int32_t>(100, 1));
  EXPECT_EQ(CanonicalHere(Job()).spec.data.tokenizer, "");
  std::ofstream(folder_ + "/train.tokenizer.json") << "{}";
  EXPECT_EQ(CanonicalHere(Job()).spec.data.tokenizer, folder_ + "/train.tokenizer.json");
  EXPECT_NE(
      Violations(Job("    tokenizer: /no/such.json\n"), true).find("/no/such.json: not found"),
      std::string::npos);
}

TEST_F(JobPaths, AModelDirectoryIsReadAndItsFaultsNamed) {
  WriteTokens("train", 100, std::vector<int32_t>(100, 1));
  const std::string from = absl::StrCat("model: {from: \"file://", folder_, "/\"}\n");
  std::string text = Job();
  const std::size_t begin = text.find("model:");
  text.replace(begin, text.find("  data:") - begin, from);
  EXPECT_NE(Violations(text, true)
                .find("spec.model.from: expected a Hugging Face directory with config.json"),
            std::string::npos)
      << Violations(text, true);
  ASSERT_EQ(mkfifo((folder_ + "/config.json").c_str(), 0600), 0);
  EXPECT_NE(Violations(text, true).find("which is no regular file"), std::string::npos);
  ASSERT_EQ(unlink((folder_ + "/config.json").c_str()), 0);
  std::ofstream(folder_ + "/config.json")
      << R"({"model_type": "llama", "vocab_size": 257, "hidden_size": 64, "intermediate_size": 128,
             "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 32})";
  EXPECT_NE(Violations(text, true).find("model.safetensors"), std::string::npos)
      << Violations(text, true);
  std::ofstream(folder_ + "/model.safetensors") << "x";
  EXPECT_EQ(Violations(text, true), "");
  const CanonicalJob job = CanonicalHere(text);
  EXPECT_EQ(job.spec.model_from, folder_);
  EXPECT_EQ(job.spec.model->vocab_size, 257);
}

// Questions to a node, and rules on its answer: no file is here.
TEST(JobFacts, PathsAreAskedByTheirFieldsInTheOrderOfTheRules) {
  const CanonicalJob bare = Canonicalize(
      ParseJobFile(With("      - {path: /data/train}\n",
                        "      - {path: /data/a}\n      - {path: \"file:///data/b/\"}\n"
                        "    validation: [{path: /data/c}]\n    format: flat_u16\n"))
          .job,
      {});
  ASSERT_TRUE(bare.ok());
  const PathQuery query = PathsOf(bare);
  ASSERT_EQ(query.token_files.size(), 3u);
  EXPECT_EQ(query.token_files[0].field, "spec.data.validation[0].path");
  EXPECT_EQ(query.token_files[2].field, "spec.data.train[1].path");
  EXPECT_EQ(query.token_files[2].path, "/data/b");
  EXPECT_EQ(query.format, TokenFormat::kFlatU16);
  EXPECT_EQ(query.tokenizer.field, "spec.data.train[0].path");
  EXPECT_EQ(query.tokenizer.path, "/data/a.tokenizer.json");
  EXPECT_EQ(query.model_directory.path, "");
  EXPECT_TRUE(PathsOf(Canonicalize(v1::TrainingJob(), {})).empty());
  // A path that is not absolute is refused, and nobody is asked for it.
  const CanonicalJob relative =
      Canonicalize(ParseJobFile(With("path: /data/train", "path: train")).job, {});
  EXPECT_TRUE(PathsOf(relative).empty());
}

TEST(JobFacts, AnAnswerIsJudgedAsTheFilesWouldBe) {
  const v1::TrainingJob job = ParseJobFile(kJob).job;
  const auto violations = [&job](const PathFacts& facts) {
    std::string out;
    for (const JobViolation& violation : Canonicalize(job, {.facts = &facts}).violations) {
      absl::StrAppend(&out, FormatViolation(violation, ""), "\n");
    }
    return out;
  };
  EXPECT_EQ(violations({.token_files = {{.tokens = 26'000, .largest_id = 256}}}), "");
  EXPECT_EQ(violations({.token_files = {{.error = "/data/train.idx: Permission denied"}}}),
            "spec.data.train[0].path: expected a token file, got /data/train.idx: Permission "
            "denied\n");
  EXPECT_EQ(violations({.token_files = {{.tokens = 26'000, .largest_id = 257}}}),
            "spec.data.train[0].path: expected ids below the model's vocabulary of 257, got id 257 "
            "in /data/train\n");
  const PathFacts found{.token_files = {{.tokens = 26'000}}, .tokenizer = true};
  const CanonicalJob known = Canonicalize(job, {.facts = &found});
  EXPECT_EQ(known.spec.data.tokenizer, "/data/train.tokenizer.json");
  EXPECT_EQ(known.spec.data.train[0].tokens, 26'000);
  EXPECT_EQ(Canonicalize(job, {.facts = &found, .check_data = false}).spec.data.tokenizer, "");
}

}  // namespace
}  // namespace ravel
