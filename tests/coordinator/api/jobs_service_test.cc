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

#include "common/path_look.h"
#include "tests/coordinator/api/testing_jobs_service.h"
#include "tests/testing/cpu_time.h"
#include "tests/testing/eventually.h"

namespace ravel::coordinator {
namespace {

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

TEST_F(JobsServiceTest, ARecipeThatNoGpuHereCanRunIsRefused) {
  constexpr int64_t kMemory = int64_t{64} << 30;
  AddNode(1, TokensOf(26'000), kLookProtocol, kMemory, "NVIDIA H100 80GB HBM3");
  const auto job = [this](const std::string& name, const std::string& recipe) {
    v1::TrainingJob made = Job(name);
    made.mutable_spec()->mutable_devices()->set_kind("gpu");
    made.mutable_spec()->mutable_precision()->set_recipe(recipe);
    return made;
  };
  v1::ErrorDetail detail;
  const grpc::Status refused = Submit(job("blocks", "mxfp8"), &detail);
  EXPECT_EQ(refused.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_TRUE(absl::StrContains(refused.error_message(), "NVIDIA H100 80GB HBM3 (compute "))
      << refused.error_message();
  ASSERT_EQ(detail.violations_size(), 1);
  EXPECT_EQ(detail.violations(0).path(), "spec.precision.recipe");
  OnStrand([this] { EXPECT_TRUE(controller_->List().empty()); });
  const grpc::Status native = Submit(job("native", "fp8_tensor"));
  EXPECT_TRUE(native.ok()) << native.error_message();
  v1::TrainingJob emulated = job("emulated", "mxfp8");
  emulated.mutable_spec()->mutable_precision()->add_emulation("dequant_bf16");
  const grpc::Status allowed = Submit(emulated);
  EXPECT_TRUE(allowed.ok()) << allowed.error_message();
  // A model that is not known may have what the others lack.
  AddNode(2, TokensOf(26'000), kLookProtocol, kMemory, "NVIDIA Next 1");
  v1::SubmitJobResponse response;
  const grpc::Status unknown = DryRun(job("blocks", "mxfp8"), &response);
  EXPECT_TRUE(unknown.ok()) << unknown.error_message();
  ASSERT_EQ(response.warnings_size(), 1);
  EXPECT_TRUE(
      absl::StrContains(response.warnings(0), "the job is not placed on NVIDIA H100 80GB HBM3"))
      << response.warnings(0);
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

TEST_F(JobsServiceTest, ANetworkThatNoNodeHasIsRefusedByFieldAndNode) {
  const auto refuses = [](const PathQuery& query) {
    return query.needs.empty() ? TokensOf(26'000)(query)
                               : LookResult{.facts = {.refused_field = "communication.network",
                                                      .refusal = "this node has no network"}};
  };
  v1::TrainingJob job = Job("demo");
  job.mutable_spec()->mutable_communication()->set_network("fast");
  AddNode(1, refuses, kNeedsProtocol);
  AddNode(2, refuses, kNeedsProtocol);
  const grpc::Status refused = DryRun(job);
  EXPECT_EQ(refused.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_TRUE(absl::StrContains(refused.error_message(),
                                "spec.communication.network: node node-1: this node has no "
                                "network; node node-2: this node has no network"))
      << refused.error_message();
  // A node of a release that cannot say may have it.
  AddNode(2, TokensOf(26'000), kLookProtocol);
  v1::SubmitJobResponse unknown;
  const grpc::Status taken = DryRun(job, &unknown);
  EXPECT_TRUE(taken.ok()) << taken.error_message();
  ASSERT_EQ(unknown.warnings_size(), 2);
  EXPECT_TRUE(absl::StartsWith(unknown.warnings(1), "spec: no node has said that it serves"))
      << unknown.warnings(1);
  // One that has it is asked for the paths, too.
  AddNode(2, TokensOf(26'000), kNeedsProtocol);
  const int before = Asked(1);
  v1::SubmitJobResponse response;
  const grpc::Status served = DryRun(job, &response);
  EXPECT_TRUE(served.ok()) << served.error_message();
  ASSERT_EQ(response.warnings_size(), 1);
  EXPECT_EQ(response.warnings(0),
            "spec.communication.network: node node-1: this node has no network; the job is placed "
            "on other nodes");
  EXPECT_EQ(Asked(1), before + 1) << "for its needs alone";
}

TEST_F(JobsServiceTest, NodesThatRefuseAreNamedInTheirOrderWhoeverAnswersFirst) {
  for (const StreamId node : {1, 2, 3}) {
    AddNode(
        node,
        [](const PathQuery&) {
          return LookResult{.facts = {.refused_field = "communication.network",
                                      .refusal = "this node has no network"}};
        },
        kNeedsProtocol);
  }
  OnStrand([this] { fleet_.together = 3; });
  v1::TrainingJob job = Job("demo");
  job.mutable_spec()->mutable_communication()->set_network("fast");
  const grpc::Status refused = DryRun(job);
  EXPECT_TRUE(absl::StrContains(refused.error_message(),
                                "node node-1: this node has no network; node node-2: this node "
                                "has no network; node node-3: this node has no network"))
      << refused.error_message();
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

TEST_F(JobsServiceTest, NumbersBeyondTheirBoundsAreRefusedByName) {
  OnStrand([this] { Enqueue("demo"); });
  const auto told = [](const grpc::Status& status) {
    EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
    return status.error_message();
  };
  const auto jobs = [&](int32_t page_size) {
    v1::ListJobsRequest request;
    request.set_page_size(page_size);
    v1::ListJobsResponse page;
    grpc::ClientContext context;
    return stub_->ListJobs(&context, request, &page);
  };
  EXPECT_TRUE(jobs(500).ok());
  EXPECT_EQ(told(jobs(501)), "page_size: expected 0 to 500, got 501");
  EXPECT_EQ(told(jobs(-1)), "page_size: expected 0 to 500, got -1");
  v1::ListEventsRequest events;
  events.set_name("demo");
  events.set_page_size(1001);
  v1::ListEventsResponse some;
  grpc::ClientContext of_events;
  EXPECT_EQ(told(stub_->ListEvents(&of_events, events, &some)),
            "page_size: expected 0 to 1000, got 1001");
  v1::ListNodesRequest nodes;
  nodes.set_page_size(501);
  v1::ListNodesResponse none;
  grpc::ClientContext of_nodes;
  EXPECT_EQ(told(stub_->ListNodes(&of_nodes, nodes, &none)),
            "page_size: expected 0 to 500, got 501");
  const auto logs = [&](int64_t tail) {
    v1::StreamLogsRequest request;
    request.set_name("demo");
    request.set_rank(-1);
    request.set_tail(tail);
    grpc::ClientContext context;
    return stub_->StreamLogs(&context, request)->Finish();
  };
  EXPECT_TRUE(logs(10'000).ok());
  EXPECT_EQ(told(logs(10'001)), "tail: expected 0 to 10000, got 10001");
  v1::StreamMetricsRequest metrics;
  metrics.set_name("demo");
  metrics.set_last(-1);
  grpc::ClientContext of_metrics;
  EXPECT_TRUE(absl::StartsWith(told(stub_->StreamMetrics(&of_metrics, metrics)->Finish()),
                               "last: expected 0 to "));
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
