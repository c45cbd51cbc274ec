// The API over a real server: what is refused, and how lists come.

#include "coordinator/api/jobs_service.h"

#include <chrono>
#include <filesystem>
#include <fstream>
#include <functional>
#include <future>
#include <map>
#include <optional>
#include <set>

#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include "common/path_look.h"
#include "common/version.h"
#include "coordinator/api/error_detail_proto.h"
#include "coordinator/api/job_limits_proto.h"
#include "coordinator/jobs/planner_driver.h"
#include "tests/coordinator/jobs/fake_world.h"
#include "tests/testing/cpu_time.h"
#include "tests/testing/eventually.h"

namespace ravel::coordinator {
namespace {

// Nodes that do nothing but look at paths, each in its own way, by their streams.
class LookingFleet : public FleetLink {
 public:
  // Nullopt: the node says nothing.
  using Look = std::function<std::optional<LookResult>(const PathQuery&)>;

  void Send(StreamId stream, DownMessage message) override {
    const auto* look = std::get_if<coordinator::Look>(&message.kind);
    const auto node = nodes.find(stream);
    if (look == nullptr || node == nodes.end()) {
      return;
    }
    ++asked[stream];
    std::optional<LookResult> result = node->second(look->query);
    if (result) {
      result->look_id = look->look_id;
      strand->Post(
          [this, stream, result = *std::move(result)] { controller->OnUp(stream, result); });
    }
  }
  void Close(StreamId /*stream*/) override {}

  Executor* strand = nullptr;
  JobController* controller = nullptr;
  // Touched on the strand only.
  std::map<StreamId, Look> nodes;
  std::map<StreamId, int> asked;
};

// A node that has the test's own files.
std::optional<LookResult> LookHere(const PathQuery& query) {
  return LookResult{.facts = LookAtPaths(query)};
}
// A node whose token files are all of so many tokens.
LookingFleet::Look TokensOf(int64_t tokens) {
  return [tokens](const PathQuery& query) {
    LookResult result;
    result.facts.token_files.assign(query.token_files.size(), {.tokens = tokens});
    return result;
  };
}

class JobsServiceTest : public ::testing::Test {
 protected:
  JobsServiceTest()
      : strand_({.name = "strand", .threads = 1, .tick_ms = 0, .tick = {}}),
        pool_({.name = "pool", .threads = 1, .tick_ms = 0, .tick = {}}),
        store_(&disk_) {
    std::string pattern = ::testing::TempDir() + "jobs-service-XXXXXX";
    folder_ = mkdtemp(pattern.data());
    metrics_ = std::make_unique<MetricsLog>(folder_ + "/metrics");
    history_ = std::make_unique<MetricsHistory>(folder_ + "/metrics");
    logs_ = std::make_unique<LogStore>(folder_ + "/logs");
    ControllerParts parts;
    parts.clock = &clock_;
    parts.strand = &strand_;
    parts.pool = &pool_;
    parts.store = &store_;
    parts.planner = &planner_;
    parts.keeper = &keeper_;
    parts.fleet = &fleet_;
    parts.metrics = metrics_.get();
    parts.logs = logs_.get();
    controller_ = std::make_unique<JobController>(ControllerOptions(), parts);
    fleet_.strand = &strand_;
    fleet_.controller = controller_.get();
    OnStrand([this] { EXPECT_TRUE(controller_->Start().ok()); });
    JobsServiceParts service;
    service.strand = &strand_;
    service.pools = &pools_;
    service.files = &pool_;
    service.history = history_.get();
    service.growth = &growth_;
    service.lag = &lag_;
    service.controller = controller_.get();
    service.planner = &planner_;
    service.keeper = &keeper_;
    service.version = "test";
    service.insecure = true;
    // Longer than a thread of this test may not be scheduled for.
    service.look_limits = {.node_ms = 1500, .all_ms = 30'000};
    service_ = std::make_unique<JobsService>(std::move(service));
    grpc::ServerBuilder builder;
    int port = 0;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
    builder.RegisterService(service_.get());
    builder.SetMaxReceiveMessageSize(64 << 20);  // as main.cc has it
    server_ = builder.BuildAndStart();
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
    arguments.SetMaxReceiveMessageSize(static_cast<int>(kMaxRequestBytes));
    stub_ = v1::Jobs::NewStub(grpc::CreateCustomChannel(
        absl::StrCat("127.0.0.1:", port), grpc::InsecureChannelCredentials(), arguments));
  }
  ~JobsServiceTest() override {
    server_->Shutdown(std::chrono::system_clock::now());
    server_->Wait();
    strand_.Stop();
    pool_.Stop();
    std::filesystem::remove_all(folder_);
  }

  void OnStrand(const std::function<void()>& work) {
    std::promise<void> done;
    strand_.Post([&] {
      work();
      done.set_value();
    });
    done.get_future().wait();
  }
  v1::TrainingJob Job(const std::string& name) const {
    ParsedJobFile parsed = ParseJobFile(absl::StrCat(
        "apiVersion: ravel/v1\nkind: TrainingJob\nmetadata: {name: ",
        name,
        "}\nspec:\n  model: {config: {vocabSize: 257, hiddenSize: 64, intermediateSize: 128, "
        "numHiddenLayers: 2, numAttentionHeads: 4}}\n  data: {train: [{path: /nowhere/a}], "
        "sequenceLength: 32}\n  training: {steps: 100, globalBatch: 8, optimizer: {lr: 3e-4}}\n  "
        "devices: {kind: cpu, count: 2}\n  checkpoint: {store: ",
        folder_,
        "/store}\n"));
    EXPECT_TRUE(parsed.violations.empty());
    return parsed.job;
  }
  grpc::Status Submit(const v1::TrainingJob& job, v1::ErrorDetail* detail = nullptr) {
    v1::SubmitJobRequest request;
    request.set_request_id(absl::StrCat("request-", ++requests_));
    *request.mutable_job() = job;
    v1::SubmitJobResponse response;
    grpc::ClientContext context;
    const grpc::Status status = stub_->SubmitJob(&context, request, &response);
    const auto found = context.GetServerTrailingMetadata().find(kErrorDetailKey);
    if (detail != nullptr && found != context.GetServerTrailingMetadata().end()) {
      detail->ParseFromString(std::string(found->second.data(), found->second.size()));
    }
    return status;
  }
  void AddNode(StreamId stream, LookingFleet::Look look, int64_t protocol = kLookProtocol) {
    HelloMessage hello;
    hello.node_id = absl::StrCat("node-", stream);
    hello.incarnation = absl::StrCat("incarnation-", stream);
    hello.protocol = protocol;
    hello.devices.push_back({"cpu", "test", int64_t{64} << 30, "cpu-0"});
    OnStrand([&] {
      fleet_.nodes[stream] = std::move(look);
      controller_->OnHello(stream, hello);
    });
  }
  int Asked(StreamId stream) {
    int asked = 0;
    OnStrand([&] { asked = fleet_.asked[stream]; });
    return asked;
  }
  // A dry run while the controller's time goes on.
  grpc::Status DryRun(const v1::TrainingJob& job, v1::SubmitJobResponse* response = nullptr) {
    v1::SubmitJobRequest request;
    request.set_dry_run(true);
    *request.mutable_job() = job;
    v1::SubmitJobResponse ignored;
    grpc::ClientContext context;
    std::future<grpc::Status> answer = std::async(std::launch::async, [&] {
      return stub_->SubmitJob(&context, request, response == nullptr ? &ignored : response);
    });
    EXPECT_TRUE(testing::Eventually(std::chrono::seconds(20), [&] {
      OnStrand([this] { controller_->Tick(); });
      return answer.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
    }));
    return answer.get();
  }
  v1::TrainingJob JobFrom(const std::string& directory) const {
    v1::TrainingJob job = Job("from");
    job.mutable_spec()->mutable_model()->clear_config();
    job.mutable_spec()->mutable_model()->set_from(directory);
    return job;
  }
  // Past validation: what a job in the queue is.
  void Enqueue(const std::string& name, const std::string& namespace_name = "default") {
    SubmitDraft draft{absl::StrCat("draft-", ++requests_), "hash", JobRecord()};
    v1::TrainingJob job = Job(name);
    job.mutable_metadata()->set_namespace_(namespace_name);
    (*job.mutable_metadata()->mutable_labels())["parity"] = requests_ % 2 == 0 ? "even" : "odd";
    (*job.mutable_metadata()->mutable_annotations())["note"] = std::string(1000, 'n');
    draft.record.namespace_name = namespace_name;
    draft.record.name = name;
    draft.record.canonical = job.SerializeAsString();
    draft.record.planned = planner_.EncodeSpec(draft.record.spec);
    controller_->Submit(std::move(draft),
                        [](const absl::StatusOr<JobView>& view) { ASSERT_TRUE(view.ok()); });
  }
  std::vector<std::string> List(v1::ListJobsRequest request, int* pages = nullptr) {
    std::vector<std::string> names;
    do {
      v1::ListJobsResponse page;
      grpc::ClientContext context;
      const grpc::Status status = stub_->ListJobs(&context, request, &page);
      EXPECT_TRUE(status.ok()) << status.error_message();
      for (const v1::Job& job : page.jobs()) {
        names.push_back(job.metadata().name());
        EXPECT_EQ(job.has_spec(), request.with_spec());
        EXPECT_EQ(job.metadata().labels_size(), 1);
      }
      request.set_page_token(page.next_page_token());
      *(pages == nullptr ? &ignored_ : pages) += 1;
    } while (!request.page_token().empty());
    return names;
  }
  grpc::Status Delete(const std::string& name, const std::string& request_id) {
    v1::DeleteJobRequest request;
    request.set_request_id(request_id);
    request.set_name(name);
    request.set_force(true);
    v1::DeleteJobResponse response;
    grpc::ClientContext context;
    return stub_->DeleteJob(&context, request, &response);
  }

  std::string folder_;
  SystemClock clock_;
  ThreadExecutor strand_;
  ThreadExecutor pool_;
  WorkPools pools_{WorkPools::Options()};
  Bell growth_;
  LagMeter lag_;
  MemoryJobStore::Disk disk_;
  MemoryJobStore store_;
  FakePlanner planner_;
  FakeKeeper keeper_;
  LookingFleet fleet_;
  std::unique_ptr<MetricsLog> metrics_;
  std::unique_ptr<MetricsHistory> history_;
  std::unique_ptr<LogStore> logs_;
  std::unique_ptr<JobController> controller_;
  std::unique_ptr<JobsService> service_;
  std::unique_ptr<grpc::Server> server_;
  std::unique_ptr<v1::Jobs::Stub> stub_;
  int requests_ = 0;
  int ignored_ = 0;
};

TEST_F(JobsServiceTest, HugeJobsAreRefusedAndListsGoOn) {
  for (int i = 0; i < 4; ++i) {
    v1::TrainingJob job = Job(absl::StrCat("huge-", i));
    job.mutable_spec()->mutable_observability()->mutable_trace()->set_directory(
        "/" + std::string(20 << 20, 'x'));
    v1::ErrorDetail detail;
    const grpc::Status status = Submit(job, &detail);
    EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
    ASSERT_GE(detail.violations_size(), 1);
    EXPECT_EQ(detail.violations(0).path(), "spec.observability.trace.directory");
    EXPECT_EQ(detail.violations(0).expected(), "at most 4.0 KiB");
  }
  v1::TrainingJob larger = Job("larger");
  larger.mutable_spec()->mutable_data()->set_tokenizer(std::string(65 << 20, 'x'));
  EXPECT_EQ(Submit(larger).error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_TRUE(List({}).empty());
  EXPECT_TRUE(disk_.jobs.empty());
}

TEST_F(JobsServiceTest, ManyMissingFilesAreAllTold) {
  AddNode(1, LookHere);
  v1::TrainingJob job = Job("scattered");
  job.mutable_spec()->mutable_data()->clear_train();
  for (int i = 0; i < 120; ++i) {
    job.mutable_spec()->mutable_data()->add_train()->set_path(
        absl::StrCat("/data/a-rather-long-folder-name/of-a-corpus/part-", i));
  }
  v1::ErrorDetail detail;
  const grpc::Status status = Submit(job, &detail);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT) << status.error_message();
  EXPECT_GE(detail.violations_size(), 10);
  EXPECT_EQ(detail.violations_size() + detail.more(), 120);
  v1::ValidateJobRequest request;
  *request.mutable_job() = job;
  v1::ValidateJobResponse response;
  grpc::ClientContext context;
  ASSERT_TRUE(stub_->ValidateJob(&context, request, &response).ok());
  EXPECT_EQ(response.violations_size(), 120);
}

TEST_F(JobsServiceTest, ANodeAnswersForPathsThatTheCoordinatorDoesNotHave) {
  AddNode(1, TokensOf(26'000));
  v1::SubmitJobResponse response;
  grpc::Status status = DryRun(Job("demo"), &response);
  EXPECT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(response.warnings_size(), 0) << response.warnings(0);
  EXPECT_EQ(Asked(1), 1);
  status = Submit(Job("demo"));
  EXPECT_TRUE(status.ok()) << status.error_message();
  OnStrand([this] {
    const std::vector<JobView> jobs = controller_->List();
    ASSERT_EQ(jobs.size(), 1u);
    EXPECT_EQ(jobs[0].record.spec.data.train[0].tokens, 26'000)
        << "trainers hold their files to it";
  });
  AddNode(1, TokensOf(10));
  status = DryRun(Job("short"));
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_TRUE(absl::StrContains(status.error_message(), "at least 33 tokens"))
      << status.error_message();
}

TEST_F(JobsServiceTest, AnotherNodeIsAskedWhenOneDoesNotAnswer) {
  AddNode(1, [](const PathQuery&) { return std::nullopt; });
  AddNode(2, TokensOf(26'000));
  const grpc::Status status = DryRun(Job("demo"));
  EXPECT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(Asked(1), 1);
  EXPECT_EQ(Asked(2), 1);
}

TEST_F(JobsServiceTest, APathThatHangsOnTwoNodesIsToldWithItsField) {
  const auto hangs = [](const PathQuery& query) {
    return LookResult{
        .facts = {.silent_field = query.token_files[0].field, .silence = "no answer within 5 s"}};
  };
  AddNode(1, hangs);
  AddNode(2, hangs);
  AddNode(3, hangs);
  grpc::Status status = DryRun(Job("demo"));
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_TRUE(absl::StrContains(status.error_message(),
                                "spec.data.train[0].path: expected paths that answer, got no "
                                "answer within 5 s on node node-2"))
      << status.error_message();
  EXPECT_EQ(Asked(3), 0) << "another one is tried once";
  AddNode(3, TokensOf(26'000));
  AddNode(2, [](const PathQuery&) { return std::nullopt; });
  status = DryRun(Job("demo"));
  EXPECT_TRUE(absl::StrContains(status.error_message(), "on node node-1"))
      << status.error_message();
}

TEST_F(JobsServiceTest, WithoutANodeDataIsTakenOnTrustAndAModelIsNot) {
  AddNode(1, LookHere, 1);  // of an older release: it does not know the question
  v1::SubmitJobResponse response;
  grpc::Status status = DryRun(Job("demo"), &response);
  EXPECT_TRUE(status.ok()) << status.error_message();
  ASSERT_EQ(response.warnings_size(), 1);
  EXPECT_EQ(response.warnings(0),
            "spec.data: no cpu worker is here to look at its paths; nodes check them when the job "
            "is placed, and a tokenizer beside the data is not looked for");
  EXPECT_EQ(Asked(1), 0);
  status = DryRun(JobFrom("/models/tiny"));
  EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(status.error_message(),
            "no cpu worker is here to look at spec.model.from; submit again when one is ready");
  v1::ValidateJobRequest request;
  *request.mutable_job() = JobFrom("/models/tiny");
  v1::ValidateJobResponse validated;
  grpc::ClientContext context;
  EXPECT_EQ(stub_->ValidateJob(&context, request, &validated).error_code(),
            grpc::StatusCode::UNAVAILABLE);
  // Faults of the file itself are told all the same.
  v1::TrainingJob wrong = JobFrom("/models/tiny");
  wrong.mutable_spec()->mutable_training()->set_steps(-1);
  EXPECT_EQ(DryRun(wrong).error_code(), grpc::StatusCode::INVALID_ARGUMENT);
}

TEST_F(JobsServiceTest, ANodeThatRefusesOrIsSilentIsNamed) {
  AddNode(1, [](const PathQuery&) { return LookResult{.refused = "earlier looks hang"}; });
  v1::SubmitJobResponse response;
  grpc::Status status = DryRun(Job("demo"), &response);
  EXPECT_TRUE(status.ok()) << status.error_message();
  ASSERT_EQ(response.warnings_size(), 1);
  EXPECT_TRUE(absl::StartsWith(response.warnings(0),
                               "spec.data: node node-1: earlier looks hang; nodes check them when"))
      << response.warnings(0);
  AddNode(1, [](const PathQuery&) { return std::nullopt; });
  status = DryRun(JobFrom("/models/tiny"));
  EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(
      status.error_message(),
      "spec.model.from: node node-1 did not answer while it looked at the paths; submit again");
}

TEST_F(JobsServiceTest, AModelsConfigComesFromTheNode) {
  AddNode(1, [](const PathQuery& query) {
    LookResult result = *TokensOf(26'000)(query);
    EXPECT_EQ(query.model_directory.path, "/models/tiny");
    result.facts.model = {.config = R"({"model_type": "llama", "vocab_size": 257, "hidden_size": 64,
                      "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
                      "max_position_embeddings": 32})",
                          .weights = true};
    return result;
  });
  grpc::Status status = Submit(JobFrom("/models/tiny"));
  EXPECT_TRUE(status.ok()) << status.error_message();
  OnStrand([this] {
    ASSERT_EQ(controller_->List().size(), 1u);
    EXPECT_EQ(controller_->List()[0].record.spec.model->vocab_size, 257);
  });
  AddNode(1, [](const PathQuery& query) {
    LookResult result = *TokensOf(26'000)(query);
    result.facts.model.error = "/models/tiny/config.json: No such file or directory";
    return result;
  });
  status = DryRun(JobFrom("/models/tiny"));
  EXPECT_TRUE(absl::StrContains(status.error_message(),
                                "spec.model.from: expected a Hugging Face directory with "
                                "config.json, got /models/tiny/config.json: No such file"))
      << status.error_message();
}

TEST_F(JobsServiceTest, NamesAndReasonsThatCommandATerminalAreRefused) {
  v1::CancelJobRequest request;
  request.set_request_id("id");
  request.set_name("demo");
  request.set_reason("\x1b]0;owned\a\x1b[2J");
  v1::Job job;
  grpc::ClientContext context;
  grpc::Status status = stub_->CancelJob(&context, request, &job);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_TRUE(absl::StartsWith(status.error_message(), "reason: ")) << status.error_message();
  v1::RollbackJobRequest roll_back;
  roll_back.set_request_id("id");
  roll_back.set_name("demo");
  roll_back.set_reason("\x1b[2J");
  grpc::ClientContext third;
  status = stub_->RollbackJob(&third, roll_back, &job);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_TRUE(absl::StartsWith(status.error_message(), "reason: ")) << status.error_message();
  v1::GetJobRequest get;
  get.set_name(std::string(8 << 20, 'x'));
  grpc::ClientContext other;
  status = stub_->GetJob(&other, get, &job);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_LT(status.error_message().size(), 200u);
}

// While the threads that read files are busy, a history waits for them, and other requests do not.
TEST_F(JobsServiceTest, AHistoryIsNotReadOnTheStrand) {
  v1::StreamMetricsRequest request;
  request.set_name("long");
  request.set_follow(true);
  StepRecord record;
  record.step = 7;
  std::filesystem::create_directories(folder_ + "/metrics");
  OnStrand([&] {
    Enqueue("long");
    const std::string uid = controller_->Get({"default", "long"})->record.uid;
    std::ofstream(absl::StrCat(folder_, "/metrics/", uid, ".jsonl"))
        << json::Serialize(StepRecordJson(record)) << "\n";
  });
  std::promise<void> release;
  const std::shared_future<void> released = release.get_future().share();
  for (int i = 0; i < 8; ++i) {
    pools_.io().Post([released] { released.wait(); });
  }
  grpc::ClientContext context;
  const auto reader = stub_->StreamMetrics(&context, request);
  v1::StepRecord read;
  std::future<bool> came = std::async(std::launch::async, [&] { return reader->Read(&read); });
  v1::GetJobRequest get;
  get.set_name("long");
  v1::Job job;
  grpc::ClientContext other;
  EXPECT_TRUE(stub_->GetJob(&other, get, &job).ok());
  EXPECT_EQ(came.wait_for(std::chrono::milliseconds(200)), std::future_status::timeout)
      << "read by another thread";
  release.set_value();
  EXPECT_TRUE(came.get());
  EXPECT_EQ(read.step(), 7);
  context.TryCancel();
  EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::CANCELLED);
}

TEST_F(JobsServiceTest, TenThousandJobsAreListedFastAndCompletely) {
  constexpr int kJobs = 10'000;
  OnStrand([this] {
    for (int i = 0; i < kJobs; ++i) {
      Enqueue(absl::StrCat("job-", i), i % 10 == 0 ? "other" : "default");
    }
  });
  v1::ListJobsRequest all;
  all.set_namespace_("*");
  int pages = 0;
  const double start_ms = testing::ProcessCpuMs();  // server and client
  const std::vector<std::string> names = List(all, &pages);
  const double ms = testing::ProcessCpuMs() - start_ms;
  RecordProperty("list_ms", absl::StrCat(ms));
  std::printf("10,000 jobs in %d pages: %.1f ms\n", pages, ms);
  EXPECT_EQ(std::set<std::string>(names.begin(), names.end()).size(), size_t{kJobs});
  EXPECT_EQ(names.size(), size_t{kJobs});
  EXPECT_GE(pages, 20);
  EXPECT_LT(ms, 2000);  // an order of magnitude: machines differ

  EXPECT_EQ(List({}).size(), size_t{kJobs} * 9 / 10);
  v1::ListJobsRequest labelled = all;
  labelled.set_selector("parity=even");
  EXPECT_EQ(List(labelled).size(), size_t{kJobs} / 2);
  v1::ListJobsRequest running = all;
  running.add_states(v1::RUNNING);
  EXPECT_TRUE(List(running).empty());
  v1::ListJobsRequest whole = all;
  whole.set_with_spec(true);
  whole.set_selector("parity=odd");
  EXPECT_EQ(List(whole).size(), size_t{kJobs} / 2);
}

TEST_F(JobsServiceTest, WhatComesAndGoesBetweenPagesHidesNothingElse) {
  OnStrand([this] {
    for (int i = 0; i < 30; ++i) {
      Enqueue(absl::StrCat("job-", i));
    }
  });
  v1::ListJobsRequest request;
  request.set_page_size(7);
  std::multiset<std::string> names;
  for (int page = 0;; ++page) {
    v1::ListJobsResponse response;
    grpc::ClientContext context;
    ASSERT_TRUE(stub_->ListJobs(&context, request, &response).ok());
    for (const v1::Job& job : response.jobs()) {
      names.insert(job.metadata().name());
    }
    if (response.next_page_token().empty()) {
      break;
    }
    request.set_page_token(response.next_page_token());
    // The one that the cursor names, and one that was not seen yet; another is new.
    ASSERT_TRUE(Delete(response.jobs(response.jobs_size() - 1).metadata().name(),
                       absl::StrCat("delete-", page))
                    .ok());
    OnStrand([this, page] { Enqueue(absl::StrCat("new-", page)); });
    ASSERT_LT(page, 20);
  }
  for (int i = 0; i < 30; ++i) {
    EXPECT_EQ(names.count(absl::StrCat("job-", i)), 1u) << i;
  }
}

TEST_F(JobsServiceTest, ADeletedNameIsFree) {
  OnStrand([this] { Enqueue("again"); });
  EXPECT_TRUE(Delete("again", "once").ok());
  // The answer tells that the wish is durable; the job goes soon after.
  ASSERT_TRUE(testing::Eventually(std::chrono::seconds(20), [&] { return List({}).empty(); }));
  EXPECT_EQ(Delete("again", "once").error_code(), grpc::StatusCode::NOT_FOUND);
  OnStrand([this] { Enqueue("again"); });
  EXPECT_EQ(Delete("again", "once").error_code(), grpc::StatusCode::NOT_FOUND)
      << "a repeated request deletes no other job of that name";
  EXPECT_EQ(List({}).size(), 1u);
}

}  // namespace
}  // namespace ravel::coordinator
