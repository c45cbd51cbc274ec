// Verbs against a coordinator of our own: what is printed, and the exit codes.

#include "coordinator/ctl/jobs_client.h"

#include <algorithm>
#include <filesystem>
#include <fstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "coordinator/ctl/change_verbs.h"
#include "coordinator/ctl/checkpoint_verbs.h"
#include "coordinator/ctl/exit_code.h"
#include "coordinator/ctl/job_verbs.h"
#include "coordinator/ctl/look_verbs.h"
#include "coordinator/ctl/plan_verbs.h"
#include "tests/coordinator/ctl/fake_jobs_service.h"

namespace ravel::ctl {
namespace {

constexpr char kJobFile[] = R"(apiVersion: ravel/v1
kind: TrainingJob
metadata: {name: demo}
spec:
  model: {config: {vocabSize: 257, hiddenSize: 64, intermediateSize: 128, numHiddenLayers: 2, numAttentionHeads: 4}}
  data: {train: [{path: /data/train}], sequenceLength: 32}
  training: {steps: 100, globalBatch: 8, optimizer: {lr: 3e-4}}
  devices: {kind: cpu, count: 2}
  checkpoint: {store: /data/checkpoints}
)";

v1::Job MakeJob(v1::JobState state, int64_t step) {
  v1::Job job;
  job.set_uid("uid-1");
  job.mutable_metadata()->set_name("demo");
  job.mutable_metadata()->set_namespace_("default");
  job.set_state(state);
  job.set_step(step);
  job.set_total_steps(100);
  job.set_loss(2.5);
  job.set_first_loss(5.5);
  job.set_tokens_per_second(7900);
  job.set_world_size(2);
  job.set_epoch(3);
  job.set_committed_step(-1);
  job.set_eta_seconds(-1);
  return job;
}

struct Ran {
  int exit_code = 0;
  std::string out;
  std::string err;
};

class VerbTest : public ::testing::Test {
 protected:
  VerbTest() {
    common_.coordinator = service_.address();
    std::string pattern = ::testing::TempDir() + "verbs_XXXXXX";
    folder_ = mkdtemp(pattern.data());
    file_ = folder_ + "/job.yaml";
    std::ofstream(file_) << kJobFile;
  }
  ~VerbTest() override { std::filesystem::remove_all(folder_); }

  template <typename Verb>
  Ran Run(const Verb& verb) {
    ::testing::internal::CaptureStdout();
    ::testing::internal::CaptureStderr();
    Ran ran;
    ran.exit_code = verb();
    ran.out = ::testing::internal::GetCapturedStdout();
    ran.err = ::testing::internal::GetCapturedStderr();
    return ran;
  }
  Ran Wait(const std::string& condition, const std::string& timeout = "") {
    return Run([&] {
      return RunWait(common_, {.job = "demo", .condition = condition, .timeout = timeout});
    });
  }

  ravel::testing::FakeJobsService service_;
  CommonOptions common_;
  std::string folder_;
  std::string file_;
};

TEST_F(VerbTest, SubmitPrintsTheNameOnStdout) {
  const Ran ran = Run([&] { return RunSubmit(common_, {.file = file_}); });
  EXPECT_EQ(ran.exit_code, kExitOk) << ran.err;
  EXPECT_EQ(ran.out, "job default/demo submitted\n");
}

TEST_F(VerbTest, DescribeNamesTheGemmPathOfEachClass) {
  v1::Job job = MakeJob(v1::RUNNING, 3);
  for (const char* gemms : {"forward", "input gradient", "weight gradient"}) {
    v1::GemmPath& path = *job.add_gemm_paths();
    path.set_gemms(gemms);
    path.set_path("fp8_block");
  }
  service_.states.push_back(job);
  const Ran ran = Run([&] { return RunDescribe(common_, "demo"); });
  EXPECT_EQ(ran.exit_code, kExitOk) << ran.err;
  for (const char* row : {"Gemm path, forward +fp8_block",
                          "Gemm path, input gradient +fp8_block",
                          "Gemm path, weight gradient +fp8_block"}) {
    EXPECT_THAT(ran.out, ::testing::ContainsRegex(row));
  }
}

TEST_F(VerbTest, DescribeHasTheNewestEventsInDocumentsToo) {
  service_.states = {MakeJob(v1::RUNNING, 3)};
  for (int i = 1; i <= 52; ++i) {
    v1::JobEvent event;
    event.set_type("Started");
    event.set_seq(i);
    service_.events.push_back(event);
  }
  EXPECT_THAT(Run([&] { return RunDescribe(common_, "demo"); }).out,
              ::testing::HasSubstr("2 older: ravelctl events demo"));
  common_.format = Format::kJson;
  const Ran ran = Run([&] { return RunDescribe(common_, "demo"); });
  EXPECT_EQ(ran.exit_code, kExitOk) << ran.err;
  const absl::StatusOr<json::Value> document = json::Parse(ran.out);
  ASSERT_TRUE(document.ok()) << document.status();
  ASSERT_NE(document->Find("events"), nullptr) << ran.out;
  const json::Array& events = document->Find("events")->AsArray();
  ASSERT_EQ(events.size(), 50U);
  EXPECT_EQ(events[0].Find("seq")->AsInt(), 3);
  EXPECT_EQ(events[0].Find("type")->AsString(), "Started");
  EXPECT_EQ(document->Find("olderEvents")->AsInt(), 2);
  EXPECT_EQ(document->Find("state")->AsString(), "RUNNING");
}

TEST_F(VerbTest, ADescribedJobCanBeSubmittedAgain) {
  service_.states = {MakeJob(v1::FAILED, 70)};
  *service_.states[0].mutable_spec() = ParseJobFile(kJobFile).job.spec();
  v1::JobEvent event;
  event.set_type("Failed");
  event.set_seq(1);
  service_.events = {event};
  common_.format = Format::kYaml;
  const Ran ran = Run([&] { return RunDescribe(common_, "demo"); });
  EXPECT_THAT(ran.out, ::testing::HasSubstr("\nevents:\n"));
  const ParsedJobFile again = ParseJobFile(ran.out);
  EXPECT_TRUE(again.violations.empty()) << FormatViolation(again.violations[0], "") << ran.out;
}

TEST_F(VerbTest, SubmitRetriesUnavailableWithTheSameRequestId) {
  service_.unavailable_calls = 2;
  const Ran ran = Run([&] { return RunSubmit(common_, {.file = file_}); });
  EXPECT_EQ(ran.exit_code, kExitOk) << ran.err;
  const std::vector<std::string> request_ids = service_.request_ids();
  ASSERT_EQ(request_ids.size(), 3u);
  EXPECT_EQ(request_ids[0].size(), 36u);
  EXPECT_EQ(request_ids[0], request_ids[2]);
}

TEST_F(VerbTest, RefusalsNameTheLinesOfTheFile) {
  service_.failure = {grpc::StatusCode::INVALID_ARGUMENT, "job refused"};
  v1::Violation& violation = *service_.detail.add_violations();
  violation.set_path("spec.data.train[0].path");
  violation.set_expected("a token file");
  violation.set_got("nothing there");
  const Ran ran = Run([&] { return RunSubmit(common_, {.file = file_}); });
  EXPECT_EQ(ran.exit_code, kExitUsage);
  EXPECT_EQ(ran.out, "");
  EXPECT_NE(ran.err.find(
                "job.yaml:6:19: spec.data.train[0].path: expected a token file, got nothing there"),
            std::string::npos)
      << ran.err;
}

TEST_F(VerbTest, RefusalsThatHaveNoRoomAreAskedFor) {
  service_.failure = {grpc::StatusCode::INVALID_ARGUMENT, "job refused"};
  for (int i = 0; i < 120; ++i) {
    v1::Violation violation;
    violation.set_path("spec.data.train[" + std::to_string(i) + "].path");
    violation.set_expected("a token file");
    violation.set_got("part-" + std::to_string(i) + ".idx: not found");
    service_.violations.push_back(violation);
  }
  *service_.detail.add_violations() = service_.violations[0];
  service_.detail.set_more(119);
  const Ran ran = Run([&] { return RunSubmit(common_, {.file = file_}); });
  EXPECT_EQ(ran.exit_code, kExitUsage);
  EXPECT_NE(ran.err.find("part-0.idx"), std::string::npos);
  EXPECT_NE(ran.err.find("part-119.idx"), std::string::npos);
  EXPECT_NE(ran.err.find("120 problems"), std::string::npos) << ran.err;

  service_.violations.clear();  // and a coordinator that cannot say more
  const Ran few = Run([&] { return RunSubmit(common_, {.file = file_}); });
  EXPECT_EQ(few.exit_code, kExitUsage);
  EXPECT_NE(few.err.find("and 119 more"), std::string::npos) << few.err;
}

TEST_F(VerbTest, ListsComeInPagesAndReasonsAreCounted) {
  service_.page_size = 7;
  for (int i = 0; i < 40; ++i) {
    v1::Job job = MakeJob(v1::QUEUED, 0);
    job.mutable_metadata()->set_name("job-" + std::to_string(i));
    job.set_reason("WaitingForDevices");
    job.set_message(i % 2 == 0 ? "waits for 4 free devices" : "waits for 8 free devices");
    service_.states.push_back(job);
  }
  const Ran ran = Run([&] { return RunList(common_, {}); });
  EXPECT_EQ(ran.exit_code, kExitOk) << ran.err;
  EXPECT_EQ(std::count(ran.out.begin(), ran.out.end(), '\n'), 41);
  EXPECT_EQ(ran.err,
            "20 jobs are queued: waits for 4 free devices\n"
            "20 jobs are queued: waits for 8 free devices\n");
  common_.format = Format::kJsonl;
  const Ran whole = Run([&] { return RunList(common_, {}); });
  EXPECT_EQ(std::count(whole.out.begin(), whole.out.end(), '\n'), 40);
  EXPECT_NE(whole.out.find("waits for 8 free devices"), std::string::npos);
}

TEST_F(VerbTest, APrintedJobCanBeSubmittedAgain) {
  std::vector<std::string> files = {file_};
  for (const auto& entry : std::filesystem::directory_iterator(RAVEL_EXAMPLES)) {
    if (entry.path().extension() == ".yaml") {
      files.push_back(entry.path());
    }
  }
  ASSERT_GT(files.size(), 3u);
  for (const std::string& file : files) {
    std::ifstream input(file);
    const std::string text(std::istreambuf_iterator<char>(input), {});
    const ParsedJobFile parsed = ParseJobFile(text);
    if (parsed.job.kind() != "TrainingJob") {
      continue;
    }
    const CanonicalJob canonical = Canonicalize(parsed.job, {});
    ASSERT_TRUE(canonical.ok()) << file << FormatViolation(canonical.violations[0], "");
    v1::Job job = MakeJob(v1::FAILED, 70);
    *job.mutable_metadata() = canonical.job.metadata();
    *job.mutable_spec() = canonical.job.spec();
    service_.states = {job};
    for (const Format format : {Format::kYaml, Format::kJson}) {
      common_.format = format;
      const Ran ran = Run([&] { return RunGet(common_, "demo"); });
      EXPECT_EQ(ran.exit_code, kExitOk) << ran.err;
      const ParsedJobFile again = ParseJobFile(ran.out);
      ASSERT_TRUE(again.violations.empty())
          << file << FormatViolation(again.violations[0], "") << ran.out;
      const CanonicalJob same = Canonicalize(again.job, {});
      ASSERT_TRUE(same.ok()) << file << FormatViolation(same.violations[0], "") << ran.out;
      EXPECT_EQ(CanonicalJson(same.job), CanonicalJson(canonical.job)) << file;
      EXPECT_NE(ran.out.find(format == Format::kYaml ? "\nstep: 70\n" : "\"step\": 70,"),
                std::string::npos)
          << ran.out;  // a number, not a text
    }
  }
}

TEST_F(VerbTest, AJobFileOfAPersonHasNoFieldsOfACoordinator) {
  const ParsedJobFile parsed = ParseJobFile(std::string(kJobFile) + "state: RUNNING\n");
  ASSERT_EQ(parsed.violations.size(), 1u);
  EXPECT_EQ(parsed.violations[0].path, "state");
}

TEST_F(VerbTest, OnlyLoopbackAddressesAreSpokenTo) {
  for (const char* address : {"127.0.0.1.example.invalid:7070",
                              "10.0.0.1:7070",
                              "127.1:7070",
                              "localhost.example.invalid:7070",
                              "127.0.0.1:0",
                              "127.0.0.1"}) {
    EXPECT_FALSE(JobsClient::Connect(address).ok()) << address;
  }
  EXPECT_TRUE(JobsClient::Connect("[::1]:7070").ok());
  EXPECT_TRUE(JobsClient::Connect("localhost:7070").ok());
}

TEST_F(VerbTest, AnInvalidFileIsNeverSent) {
  std::ofstream(file_) << "apiVersion: ravel/v1\nkind: Job\n";
  const Ran ran = Run([&] { return RunSubmit(common_, {.file = file_}); });
  EXPECT_EQ(ran.exit_code, kExitUsage);
  EXPECT_TRUE(service_.request_ids().empty());
  EXPECT_NE(ran.err.find(":2:1: kind: expected TrainingJob, got 'Job'"), std::string::npos)
      << ran.err;
  EXPECT_EQ(Run([&] { return RunSubmit(common_, {.file = folder_ + "/none"}); }).exit_code,
            kExitNotFound);
}

TEST_F(VerbTest, FollowEndsWithTheJob) {
  service_.states = {MakeJob(v1::RUNNING, 10), MakeJob(v1::SUCCEEDED, 100)};
  service_.events.emplace_back();
  service_.events[0].set_seq(1);
  service_.events[0].set_type("Started");
  const Ran ran = Run([&] { return RunSubmit(common_, {.file = file_, .follow = true}); });
  EXPECT_EQ(ran.exit_code, kExitOk);
  EXPECT_NE(ran.err.find("job default/demo succeeded: 100 steps, loss 5.5 -> 2.5"),
            std::string::npos)
      << ran.err;
  EXPECT_NE(ran.err.find("step 10/100"), std::string::npos) << ran.err;
}

TEST_F(VerbTest, ExitCodesTellHowTheJobEnded) {
  v1::Job failed = MakeJob(v1::FAILED, 50);
  failed.set_failure_class("user");
  service_.states = {failed};
  EXPECT_EQ(Wait("done").exit_code, kExitJobFailedUser);
  service_.states[0].set_failure_class("infrastructure");
  EXPECT_EQ(Wait("done").exit_code, kExitJobFailedInfrastructure);
  service_.states = {MakeJob(v1::CANCELLED, 50)};
  EXPECT_EQ(Wait("done").exit_code, kExitCancelled);
  service_.states = {MakeJob(v1::SUCCEEDED, 100)};
  EXPECT_EQ(Wait("done").exit_code, kExitOk);
}

TEST_F(VerbTest, WaitHoldsForItsCondition) {
  service_.states = {MakeJob(v1::QUEUED, 0), MakeJob(v1::RUNNING, 0), MakeJob(v1::RUNNING, 20)};
  service_.hang_watch = true;
  EXPECT_EQ(Wait("running").exit_code, kExitOk);
  EXPECT_EQ(Wait("step=20").exit_code, kExitOk);
  const Ran late = Wait("step=21", "200ms");
  EXPECT_EQ(late.exit_code, kExitTimeout);
  EXPECT_NE(late.err.find("did not reach step=21 within 200ms"), std::string::npos) << late.err;
  EXPECT_EQ(Wait("checkpoint", "200ms").exit_code, kExitTimeout);
  service_.states.back().set_committed_step(20);
  EXPECT_EQ(Wait("checkpoint").exit_code, kExitOk);
  EXPECT_EQ(Wait("checkpoint=30", "200ms").exit_code, kExitTimeout);
  for (const char* bad : {"soon", "step", "step=x", "step=-1", "done=1", "running=2"}) {
    EXPECT_EQ(Wait(bad).exit_code, kExitUsage) << bad;
  }
  EXPECT_EQ(Wait("done", "later").exit_code, kExitUsage);
}

TEST_F(VerbTest, AJobThatEndsBeforeTheConditionIsAConflictOrItsFailure) {
  service_.states = {MakeJob(v1::SUCCEEDED, 100)};
  EXPECT_EQ(Wait("step=200").exit_code, kExitConflict);
}

TEST_F(VerbTest, StatusCodesBecomeExitCodes) {
  service_.states = {MakeJob(v1::RUNNING, 1)};
  const std::pair<grpc::StatusCode, int> kCases[] = {
      {grpc::StatusCode::NOT_FOUND, kExitNotFound},
      {grpc::StatusCode::FAILED_PRECONDITION, kExitConflict},
      {grpc::StatusCode::ALREADY_EXISTS, kExitConflict},
      {grpc::StatusCode::ABORTED, kExitConflict},
      {grpc::StatusCode::PERMISSION_DENIED, kExitNotAllowed},
      {grpc::StatusCode::UNAUTHENTICATED, kExitNotAllowed},
      {grpc::StatusCode::UNAVAILABLE, kExitUnreachable},
      {grpc::StatusCode::INTERNAL, kExitGeneric}};
  for (const auto& [code, exit_code] : kCases) {
    service_.failure = {code, "no job demo"};
    const Ran ran = Run([&] { return RunGet(common_, "demo"); });
    EXPECT_EQ(ran.exit_code, exit_code) << code;
    EXPECT_NE(ran.err.find("no job demo"), std::string::npos);
    EXPECT_EQ(ran.out, "");
  }
}

TEST_F(VerbTest, AnAbsentCoordinatorIsNamed) {
  common_.coordinator = "127.0.0.1:1";
  const Ran ran = Run([&] { return RunList(common_, {}); });
  EXPECT_EQ(ran.exit_code, kExitUnreachable);
  EXPECT_NE(ran.err.find("coordinator 127.0.0.1:1 cannot be reached"), std::string::npos)
      << ran.err;
  for (const char* bad : {"nonsense",
                          "10.0.0.1:7070",
                          ":7070",
                          "example.com:7070",
                          "127.0.0.1:",
                          "127.0.0.1:99999",
                          "127.0.0.1:x"}) {
    common_.coordinator = bad;
    EXPECT_EQ(Run([&] { return RunList(common_, {}); }).exit_code, kExitUsage) << bad;
  }
}

TEST_F(VerbTest, MetricsAreOneObjectAStepWithTheLossBits) {
  v1::StepRecord record;
  record.set_step(1);
  record.set_loss(5.5451775f);
  record.set_grad_norm(0.1);
  record.set_lr(3e-4);
  record.set_tokens(256);
  record.set_tokens_per_second(1000.5);
  record.set_step_seconds(0.25);
  record.set_world_size(2);
  record.set_epoch(1);
  record.set_attempt(1);
  record.set_time_ms(1700000000000);
  record.set_planned_bytes(4096);
  record.set_measured_bytes(2048);
  service_.metrics = {record};
  common_.format = Format::kJsonl;
  const Ran ran = Run([&] { return RunMetrics(common_, {.job = "demo"}); });
  EXPECT_EQ(ran.exit_code, kExitOk);
  EXPECT_EQ(
      ran.out,
      "{\"step\":1,\"loss\":5.5451775,\"loss_bits\":\"40b17218\",\"grad_norm\":0.1,\"lr\":3e-04,"
      "\"tokens\":256,\"tokens_per_second\":1000.5,\"step_seconds\":0.25,\"world_size\":2,"
      "\"epoch\":1,\"attempt\":1,\"time_ms\":1700000000000,\"planned_bytes\":4096,"
      "\"measured_bytes\":2048}\n");
}

TEST_F(VerbTest, ListsHaveATableNamesAndDocuments) {
  service_.states = {MakeJob(v1::RUNNING, 20), MakeJob(v1::SUCCEEDED, 100)};
  Ran ran = Run([&] { return RunList(common_, {.state = "running"}); });
  EXPECT_EQ(ran.out,
            "NAME  STATE    STEP    LOSS  TOK/S  WORKERS  EPOCH  CHECKPOINT  AGE\n"
            "demo  RUNNING  20/100  2.5   7.9k   2        3      -           -\n");
  common_.format = Format::kName;
  EXPECT_EQ(Run([&] { return RunList(common_, {}); }).out, "demo\ndemo\n");
  common_.format = Format::kJson;
  const absl::StatusOr<json::Value> document =
      json::Parse(Run([&] { return RunList(common_, {}); }).out);
  ASSERT_TRUE(document.ok());
  EXPECT_EQ(document->Find("schemaVersion")->AsString(), "ravel/v1");
  EXPECT_EQ(document->Find("items")->AsArray()[1].Find("state")->AsString(), "SUCCEEDED");
}

TEST_F(VerbTest, TopAndDescribeShowTheMesh) {
  v1::Job cut = MakeJob(v1::RUNNING, 20);
  cut.set_world_size(8);
  cut.mutable_spec()->mutable_parallelism()->set_replicas(2);
  cut.mutable_spec()->mutable_parallelism()->set_tensor(2);
  v1::Job plain = MakeJob(v1::RUNNING, 20);
  plain.mutable_spec();
  v1::Job waiting = MakeJob(v1::QUEUED, 0);
  waiting.mutable_spec()->mutable_parallelism()->set_tensor(2);
  waiting.set_world_size(0);
  service_.states = {waiting, plain, cut};
  const std::string top = Run([&] { return RunTop(common_); }).out;
  EXPECT_THAT(top, ::testing::HasSubstr("8 workers, replicate 2 x shard 2 x tensor 2\n"));
  EXPECT_THAT(top, ::testing::HasSubstr("2 workers, shard 2\n"));
  EXPECT_THAT(top, ::testing::HasSubstr("0 workers\n"));
  EXPECT_THAT(Run([&] { return RunDescribe(common_, "demo"); }).out,
              ::testing::ContainsRegex("Mesh +replicate 2 x shard 2 x tensor 2\n"));

  common_.format = Format::kJson;
  const std::string axes =
      R"([{"axis":"replicate","size":2},{"axis":"shard","size":2},{"axis":"tensor","size":2}])";
  const absl::StatusOr<json::Value> document =
      json::Parse(Run([&] { return RunTop(common_); }).out);
  ASSERT_TRUE(document.ok());
  const json::Array& jobs = document->Find("jobs")->AsArray();
  ASSERT_EQ(jobs.size(), 3u);
  EXPECT_EQ(json::Serialize(*jobs[0].Find("mesh")), "[]");
  EXPECT_EQ(json::Serialize(*jobs[1].Find("mesh")), R"([{"axis":"shard","size":2}])");
  EXPECT_EQ(json::Serialize(*jobs[2].Find("mesh")), axes);
  const absl::StatusOr<json::Value> described =
      json::Parse(Run([&] { return RunDescribe(common_, "demo"); }).out);
  ASSERT_TRUE(described.ok());
  EXPECT_EQ(json::Serialize(*described->Find("mesh")), axes);
}

TEST_F(VerbTest, LogsAreFilteredByRankNodeAndText) {
  for (int rank = 0; rank < 2; ++rank) {
    v1::LogLine line;
    line.set_rank(rank);
    line.set_attempt(1);
    line.set_node(rank == 0 ? "w0" : "w1");
    line.set_text("line of rank " + std::to_string(rank));
    service_.logs.push_back(line);
  }
  EXPECT_EQ(Run([&] { return RunLogs(common_, {.job = "demo"}); }).out,
            "[1.0] line of rank 0\n[1.1] line of rank 1\n");
  EXPECT_EQ(Run([&] { return RunLogs(common_, {.job = "demo", .rank = 1}); }).out,
            "[1.1] line of rank 1\n");
  EXPECT_EQ(Run([&] { return RunLogs(common_, {.job = "demo", .node = "w0"}); }).out,
            "[1.0] line of rank 0\n");
  EXPECT_EQ(Run([&] { return RunLogs(common_, {.job = "demo", .grep = "rank 1"}); }).out,
            "[1.1] line of rank 1\n");
  common_.format = Format::kJson;
  const absl::StatusOr<json::Value> document =
      json::Parse(Run([&] { return RunLogs(common_, {.job = "demo"}); }).out);
  ASSERT_TRUE(document.ok()) << document.status();
  EXPECT_EQ(document->Find("items")->AsArray().size(), 2U);
}

TEST_F(VerbTest, EventsAreOneDocumentUnlessFollowed) {
  for (const char* type : {"Submitted", "Placed"}) {
    v1::JobEvent event;
    event.set_type(type);
    event.set_seq(static_cast<int64_t>(service_.events.size()) + 1);
    service_.events.push_back(event);
  }
  common_.format = Format::kJson;
  const absl::StatusOr<json::Value> document =
      json::Parse(Run([&] { return RunEvents(common_, {.job = "demo"}); }).out);
  ASSERT_TRUE(document.ok()) << document.status();
  EXPECT_EQ(document->Find("items")->AsArray()[1].Find("type")->AsString(), "Placed");
  common_.format = Format::kJsonl;
  const std::string lines = Run([&] { return RunEvents(common_, {.job = "demo"}); }).out;
  EXPECT_TRUE(json::Parse(lines.substr(0, lines.find('\n'))).ok()) << lines;
}

TEST_F(VerbTest, NamesAreOfWhatHasOne) {
  service_.states.push_back(MakeJob(v1::RUNNING, 3));
  common_.format = Format::kName;
  EXPECT_EQ(Run([&] { return RunDescribe(common_, "demo"); }).out, "demo\n");
  const Ran refusals[] = {Run([&] { return RunEvents(common_, {.job = "demo"}); }),
                          Run([&] { return RunLogs(common_, {.job = "demo"}); }),
                          Run([&] { return RunMetrics(common_, {.job = "demo"}); })};
  for (const Ran& refused : refusals) {
    EXPECT_EQ(refused.exit_code, kExitUsage);
    EXPECT_EQ(refused.out, "");
    EXPECT_THAT(refused.err, HasSubstr("--output: name"));
  }
}

TEST_F(VerbTest, AStateThatDoesNotExistIsRefused) {
  EXPECT_EQ(Run([&] { return RunList(common_, {.state = "runing"}); }).exit_code, kExitUsage);
}

TEST_F(VerbTest, CheckpointWaitsForItsCommit) {
  v1::Operation operation;
  operation.set_id("op");
  operation.set_state(v1::Operation::ACCEPTED);
  service_.operations = {operation, operation};
  service_.operations[1].set_state(v1::Operation::COMMITTED);
  service_.operations[1].set_step(40);
  const Ran ran = Run([&] { return RunCheckpoint(common_, {.job = "demo", .wait = true}); });
  EXPECT_EQ(ran.exit_code, kExitOk);
  EXPECT_EQ(ran.out, "checkpoint of step 40: COMMITTED\n");
  service_.operations[1].set_state(v1::Operation::OPERATION_FAILED);
  service_.operations[1].set_reason("disk full");
  const Ran failed = Run([&] { return RunCheckpoint(common_, {.job = "demo", .wait = true}); });
  EXPECT_EQ(failed.exit_code, kExitGeneric);
  EXPECT_NE(failed.out.find("disk full"), std::string::npos);
}

TEST_F(VerbTest, CheckpointsOfAJobComeFromTheCoordinator) {
  v1::Checkpoint checkpoint;
  checkpoint.set_step(20);
  checkpoint.set_path("/store/step-20");
  checkpoint.set_state("COMMITTED");
  service_.checkpoints = {checkpoint};
  common_.format = Format::kName;
  EXPECT_EQ(Run([&] { return RunCheckpointsList(common_, {.target = "demo"}); }).out,
            "/store/step-20\n");
}

TEST_F(VerbTest, LeftoversOfAJobAreListedBelowItsSteps) {
  v1::Leftover leftover;
  leftover.set_path("/store/rolled-back-e3");
  leftover.set_kind("rolled back");
  service_.leftovers = {leftover};
  EXPECT_EQ(Run([&] { return RunCheckpointsList(common_, {.target = "demo"}); }).out,
            "/store/rolled-back-e3: rolled back\n");
  common_.format = Format::kJson;
  EXPECT_NE(Run([&] {
              return RunCheckpointsList(common_, {.target = "demo"});
            }).out.find("\"leftovers\""),
            std::string::npos);
}

TEST_F(VerbTest, RollbackWantsAStep) {
  const Ran bad = Run([&] { return RunRollback(common_, {.target = "demo", .to = "yesterday"}); });
  EXPECT_EQ(bad.exit_code, kExitUsage);
}

TEST_F(VerbTest, PlanNeedsNoCoordinator) {
  common_.coordinator = "127.0.0.1:1";
  const Ran bad = Run([&] { return RunPlan(common_, {.file = file_, .devices = "x"}); });
  EXPECT_EQ(bad.exit_code, kExitUsage);
}

}  // namespace
}  // namespace ravel::ctl
