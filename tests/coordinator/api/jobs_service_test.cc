// The API over a real server: what is refused, and how lists come.

#include "coordinator/api/jobs_service.h"

#include <chrono>
#include <filesystem>
#include <fstream>
#include <future>
#include <set>

#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include "coordinator/api/error_detail_proto.h"
#include "coordinator/api/job_limits_proto.h"
#include "coordinator/jobs/planner_driver.h"
#include "tests/coordinator/jobs/fake_world.h"

namespace ravel::coordinator {
namespace {

class NoFleet : public FleetLink {
 public:
  void Send(StreamId /*stream*/, DownMessage /*message*/) override {}
  void Close(StreamId /*stream*/) override {}
};

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
  NoFleet fleet_;
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
  v1::GetJobRequest get;
  get.set_name(std::string(8 << 20, 'x'));
  grpc::ClientContext other;
  status = stub_->GetJob(&other, get, &job);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_LT(status.error_message().size(), 200u);
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
  const auto start = std::chrono::steady_clock::now();
  const std::vector<std::string> names = List(all, &pages);
  const double ms =
      std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
  RecordProperty("list_ms", absl::StrCat(ms));
  std::printf("10,000 jobs in %d pages: %.1f ms\n", pages, ms);
  EXPECT_EQ(std::set<std::string>(names.begin(), names.end()).size(), size_t{kJobs});
  EXPECT_EQ(names.size(), size_t{kJobs});
  EXPECT_GE(pages, 20);
  EXPECT_LT(ms, 2000);  // an order of magnitude: other work shares the machine

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
  EXPECT_EQ(Delete("again", "once").error_code(), grpc::StatusCode::NOT_FOUND);
  OnStrand([this] { Enqueue("again"); });
  EXPECT_EQ(Delete("again", "once").error_code(), grpc::StatusCode::NOT_FOUND)
      << "a repeated request deletes no other job of that name";
  EXPECT_EQ(List({}).size(), 1u);
}

}  // namespace
}  // namespace ravel::coordinator
