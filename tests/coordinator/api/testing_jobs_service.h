#pragma once

// The API over a real server and a real controller; nodes only look at paths.

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <absl/strings/str_cat.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include "common/path_look.h"
#include "common/version.h"
#include "coordinator/api/error_detail_proto.h"
#include "coordinator/api/job_limits_proto.h"
#include "coordinator/api/jobs_service.h"
#include "tests/coordinator/jobs/fake_world.h"
#include "tests/testing/eventually.h"

namespace ravel::coordinator {

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
      held.emplace_back(stream, *std::move(result));
    }
    if (held.size() < together) {
      return;
    }
    for (auto answer = held.rbegin(); answer != held.rend(); ++answer) {
      strand->Post(
          [this, answer = std::move(*answer)] { controller->OnUp(answer.first, answer.second); });
    }
    held.clear();
  }
  void Close(StreamId /*stream*/) override {}

  Executor* strand = nullptr;
  JobController* controller = nullptr;
  // Touched on the strand only.
  std::map<StreamId, Look> nodes;
  std::map<StreamId, int> asked;
  // Answers wait until so many are there, and the last one comes first.
  size_t together = 1;
  std::vector<std::pair<StreamId, LookResult>> held;
};

// A node that has the test's own files.
inline std::optional<LookResult> LookHere(const PathQuery& query) {
  return LookResult{.facts = LookAtPaths(query)};
}
// A node whose token files are all of so many tokens.
inline LookingFleet::Look TokensOf(int64_t tokens) {
  return [tokens](const PathQuery& query) {
    LookResult result;
    result.facts.token_files.assign(query.token_files.size(), {.tokens = tokens});
    return result;
  };
}

class JobsServiceTest : public ::testing::Test {
 protected:
  // `planner`: null for one that plans nothing.
  // `roots`: of namespaces; null for none.
  explicit JobsServiceTest(Planner* planner = nullptr, const NamespaceRootsFile* roots = nullptr)
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
    parts.planner = planner == nullptr ? &planner_ : planner;
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
    service.planner = parts.planner;
    service.keeper = &keeper_;
    service.version = "test";
    service.insecure = true;
    service.roots = roots;
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
  void AddNode(StreamId stream,
               LookingFleet::Look look,
               int64_t protocol = kLookProtocol,
               int64_t memory_bytes = int64_t{64} << 30,
               const std::string& gpu_model = "") {
    HelloMessage hello;
    hello.node_id = absl::StrCat("node-", stream);
    hello.incarnation = absl::StrCat("incarnation-", stream);
    hello.protocol = protocol;
    hello.devices.push_back({"cpu", "test", memory_bytes, "cpu-0"});
    if (!gpu_model.empty()) {
      hello.devices.push_back({"gpu", gpu_model, memory_bytes, "gpu-0"});
    }
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

}  // namespace ravel::coordinator
