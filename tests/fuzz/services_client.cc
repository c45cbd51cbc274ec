// The real programs under requests that nobody should send: they answer, stay up, and change
// nothing but what a request was allowed to change.

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include "coordinator/access/context_file.h"
#include "coordinator/access/identity.h"
#include "coordinator/api/job_file_proto.h"
#include "proto/access.pb.h"
#include "proto/fleet.pb.h"
#include "proto/jobs.pb.h"
#include "proto/store.pb.h"
#include "tests/fuzz/service_calls_client.h"
#include "tests/testing/eventually.h"
#include "tests/testing/mini_cluster.h"
#include "tests/testing/secure_cluster.h"
#include "tests/testing/store_process.h"

namespace ravel::testing {
namespace {

using std::chrono::seconds;

// Finds the texts that sanitizers write before they end a program.
void ExpectNoReport(const std::string& log) {
  EXPECT_FALSE(absl::StrContains(log, "Sanitizer")) << log.substr(0, 20'000);
  EXPECT_FALSE(absl::StrContains(log, "runtime error:")) << log.substr(0, 20'000);
}

// A job whose change may be placed makes its store's folder, so `store` is the test's own.
std::string SubmitRequest(const std::string& name, const std::string& store) {
  v1::SubmitJobRequest request;
  request.set_request_id("00000000-0000-4000-8000-000000000001");
  *request.mutable_job() =
      ParseJobFile(ToYaml({.name = name, .tokens_path = "/nowhere", .store = store})).job;
  return request.SerializeAsString();
}

std::string HelloOf(const std::string& node) {
  v1::Up up;
  v1::Hello& hello = *up.mutable_hello();
  hello.set_node_id(node);
  hello.set_incarnation("00112233445566778899aabbccddeeff");
  hello.set_protocol(2);
  hello.set_oldest_protocol(1);
  hello.set_host_id("host");
  hello.set_data_address("127.0.0.1");
  hello.add_devices()->set_kind("cpu");
  return up.SerializeAsString();
}

class FuzzCoordinator : public ::testing::Test {
 protected:
  void SetUp() override {
    auto started = MiniCluster::Start();
    ASSERT_TRUE(started.ok()) << started.status();
    cluster_ = std::move(*started);
    channel_ = grpc::CreateChannel(cluster_->address(), grpc::InsecureChannelCredentials());
    // One that is over, and one that no node can take.
    for (const char* name : {"kept", "waiting"}) {
      TinyJob job = {.name = name, .tokens_path = "/nowhere", .store = Store()};
      job.workers = 512;
      job.virtual_ranks = job.global_batch = 512;
      ASSERT_EQ(cluster_->Submit(job), absl::OkStatus());
    }
    ASSERT_EQ(cluster_->Ctl({"cancel", "kept"}).exit_code, 0);
    ASSERT_TRUE(
        Eventually(seconds(20), [&] { return cluster_->Get("kept")->state == "CANCELLED"; }));
  }

  std::string Store() const { return cluster_->folder() + "/store"; }
  std::string Shown(const std::string& job) const {
    return cluster_->Ctl({"get", job, "-o", "json"}).out;
  }
  std::string UidOf(const std::string& job) const {
    v1::GetJobRequest request;
    request.set_name(job);
    v1::Job answer;
    const RawAnswer got = CallRaw(
        channel_, {.method = "/ravel.v1.Jobs/GetJob", .messages = {request.SerializeAsString()}});
    return !got.messages.empty() && answer.ParseFromString(got.messages[0]) ? answer.uid() : "";
  }
  std::set<std::string> Uids() const {
    std::set<std::string> uids;
    v1::ListJobsRequest request;
    request.set_namespace_("*");
    v1::ListJobsResponse page;
    do {
      request.set_page_token(page.next_page_token());
      const RawAnswer got =
          CallRaw(channel_,
                  {.method = "/ravel.v1.Jobs/ListJobs", .messages = {request.SerializeAsString()}});
      EXPECT_TRUE(got.status.ok()) << got.status.error_message();
      if (got.messages.empty() || !page.ParseFromString(got.messages[0])) {
        return uids;
      }
      for (const v1::Job& job : page.jobs()) {
        uids.insert(job.uid());
      }
    } while (!page.next_page_token().empty());
    return uids;
  }

  // The input of a coordinator: its files, words, and valid requests to begin with.
  ServiceFuzz Fuzz() const {
    ServiceFuzz fuzz;
    fuzz.channel = channel_;
    fuzz.files = {v1::SubmitJobRequest::descriptor()->file(), v1::Hello::descriptor()->file()};
    fuzz.words = {"kept", "waiting", UidOf("kept"), UidOf("waiting"), "default", "*", "n1"};
    fuzz.words_of_changes = {"nobody", "default", "fuzzed", "n1", "n2"};
    // Frames of nodes name jobs, too: no node has a rank of one, so that none may change one.
    fuzz.changes = [](const std::string& method) {
      return coordinator::IsChange(method) && !absl::StrContains(method, "Fleet");
    };
    v1::Up frame;
    frame.mutable_trainer()->set_job_uid(UidOf("waiting"));
    frame.mutable_trainer()->set_epoch(1);
    frame.mutable_trainer()->mutable_frame()->mutable_done()->set_step(10);
    v1::Up exited;
    exited.mutable_exited()->set_job_uid(UidOf("waiting"));
    exited.mutable_exited()->set_reason("DataError");
    v1::Up beat;
    beat.mutable_beat()->add_trainers()->set_job_uid(UidOf("kept"));
    fuzz.seeds = {{"ravel.v1.SubmitJobRequest", {SubmitRequest("fuzzed", Store())}},
                  {"ravel.v1.ValidateJobRequest", {SubmitRequest("fuzzed", Store())}},
                  {"ravel.v1.Up",
                   {HelloOf("n1"),
                    HelloOf("n2"),
                    frame.SerializeAsString(),
                    exited.SerializeAsString(),
                    beat.SerializeAsString()}}};
    return fuzz;
  }

  std::unique_ptr<MiniCluster> cluster_;
  std::shared_ptr<grpc::Channel> channel_;
};

TEST_F(FuzzCoordinator, EveryMethodAnswersAndChangesOnlyWhatItMay) {
  const std::string kept = Shown("kept");
  const std::string waiting = UidOf("waiting");
  std::set<std::string> allowed = Uids();
  ASSERT_EQ(allowed.size(), 2u);
  ServiceFuzz fuzz = Fuzz();
  fuzz.alive = [&] { return cluster_->coordinator().Running(); };
  fuzz.accepted = [&](const RawCall& call, const RawAnswer& answer) {
    v1::SubmitJobResponse response;
    if (call.method == "/ravel.v1.Jobs/SubmitJob" && !answer.messages.empty() &&
        response.ParseFromString(answer.messages[0])) {
      allowed.insert(response.job().uid());
    }
  };
  const ServiceCounts counts = FuzzServices(fuzz);
  std::printf("fuzz coordinator: %s\n", Summary(counts).c_str());
  EXPECT_GE(counts.calls.size(), 23u);

  ASSERT_TRUE(IsServing(channel_));
  EXPECT_EQ(Shown("kept"), kept);
  EXPECT_EQ(UidOf("waiting"), waiting);
  EXPECT_EQ(cluster_->Get("waiting")->state, "QUEUED");
  const std::set<std::string> uids = Uids();
  EXPECT_TRUE(std::includes(allowed.begin(), allowed.end(), uids.begin(), uids.end()))
      << "a job that nobody submitted";
  EXPECT_EQ(cluster_->StopCoordinator(seconds(60)), 0);
  ExpectNoReport(ReadText(cluster_->folder() + "/coordinator.log"));
  // Its state can be read again.
  ASSERT_EQ(cluster_->RestartCoordinator(), absl::OkStatus());
  EXPECT_EQ(Shown("kept"), kept);
}

TEST_F(FuzzCoordinator, ARequestAboveTheLimitIsRefused) {
  v1::SubmitJobRequest request;
  request.mutable_job()->mutable_metadata()->set_name(std::string(5 << 20, 'a'));
  const RawAnswer answer = CallRaw(
      channel_, {.method = "/ravel.v1.Jobs/SubmitJob", .messages = {request.SerializeAsString()}});
  EXPECT_EQ(answer.status.error_code(), grpc::StatusCode::INVALID_ARGUMENT)
      << answer.status.error_message();
  EXPECT_TRUE(IsServing(channel_));
}

TEST(FuzzAccess, TheRegisterKeepsItsIdentities) {
  auto started = SecureCluster::Start({});
  ASSERT_TRUE(started.ok()) << started.status();
  SecureCluster& cluster = **started;
  const auto context = coordinator::ReadContext(cluster.folder() + "/state/admin.context.json");
  ASSERT_TRUE(context.ok()) << context.status();
  ServiceFuzz fuzz;
  fuzz.channel = grpc::CreateChannel(
      cluster.address(),
      grpc::SslCredentials({context->authority, context->key, context->certificate}));
  fuzz.files = {v1::EnrolRequest::descriptor()->file()};
  fuzz.words = {"nobody", "user", "operator", "default", "node", "a.b"};
  fuzz.words_of_changes = fuzz.words;
  fuzz.changes = [](const std::string&) { return false; };
  v1::CreateTokenRequest token;
  token.set_request_id("00000000-0000-4000-8000-000000000001");
  token.set_kind(v1::USER);
  token.set_name("ann");
  token.set_role("viewer");
  token.set_uses(1);
  token.set_ttl_ms(1000);
  fuzz.seeds = {{"ravel.v1.CreateTokenRequest", {token.SerializeAsString()}}};
  fuzz.requests = 15;  // a caller has 100 calls a second
  fuzz.alive = [&] { return true; };
  const size_t before = cluster.Audit().size();
  const ServiceCounts counts = FuzzServices(fuzz);
  std::printf("fuzz access: %s\n", Summary(counts).c_str());
  EXPECT_EQ(counts.calls.size(), 9u);
  EXPECT_TRUE(IsServing(fuzz.channel));
  EXPECT_GT(cluster.Audit().size(), before) << "changes and refusals are audited";
  const RunResult who = cluster.Ctl({"whoami", "-o", "json"});
  EXPECT_TRUE(absl::StrContains(who.out, "\"admin\"")) << who.out << who.err;
  const RunResult all = cluster.Ctl({"identities", "-o", "json"});
  EXPECT_FALSE(absl::StrContains(all.out, "\"ann\"")) << "nobody has used a token";
  ExpectNoReport(cluster.Log("coordinator"));
}

TEST(FuzzStore, FilesStayAsTheyAre) {
  const ScratchFolder scratch;
  std::filesystem::create_directories(scratch.path() + "/store");
  WriteText(scratch.path() + "/outside", "canary");
  StoreProcess store({.folder = scratch.path() + "/store", .flags = {"--dev-loopback"}});
  ASSERT_EQ(store.Start(), absl::OkStatus());
  const std::string url = store.Url("");
  const std::string address = url.substr(url.find("//") + 2, url.rfind('/') - url.find("//") - 2);
  const std::string file = store.File("team/kept/step-0000000020/COMMIT");
  std::filesystem::create_directories(std::filesystem::path(file).parent_path());
  WriteText(file, "content");
  ServiceFuzz fuzz;
  fuzz.channel = grpc::CreateChannel(address, grpc::InsecureChannelCredentials());
  fuzz.files = {v1::StoreReadRequest::descriptor()->file()};
  fuzz.words = {"team/kept/step-0000000020/COMMIT", "team", "../outside", "/etc/passwd"};
  fuzz.words_of_changes = {"team/fuzzed/step-0000000020.e3.a1.0000007b.tmp/model/a.safetensors",
                           "team/fuzzed",
                           "../outside",
                           "team/../../outside",
                           scratch.path() + "/outside",
                           "0123456789abcdef"};
  fuzz.changes = [](const std::string& method) {
    return !absl::EndsWith(method, "/Read") && !absl::EndsWith(method, "/Stat") &&
           !absl::EndsWith(method, "/List");
  };
  v1::StoreWriteRequest open;
  open.mutable_open()->set_path("team/fuzzed/file");
  open.mutable_open()->set_upload("0123456789abcdef");
  v1::StoreWriteRequest block;
  block.set_data("block");
  v1::StoreWriteRequest end;
  end.set_finish(true);
  v1::StoreReadRequest read;
  read.set_path(fuzz.words[0]);
  read.set_length(7);
  fuzz.seeds = {{"ravel.v1.StoreWriteRequest",
                 {open.SerializeAsString(), block.SerializeAsString(), end.SerializeAsString()}},
                {"ravel.v1.StoreReadRequest", {read.SerializeAsString()}}};
  fuzz.alive = [&] { return !absl::StrContains(store.Log(), "Sanitizer"); };
  const ServiceCounts counts = FuzzServices(fuzz);
  std::printf("fuzz store: %s\n", Summary(counts).c_str());
  EXPECT_EQ(counts.calls.size(), 10u);
  v1::StoreReadReply reply;
  const RawAnswer answer = CallRaw(
      fuzz.channel, {.method = "/ravel.v1.Store/Read", .messages = {read.SerializeAsString()}});
  ASSERT_FALSE(answer.messages.empty()) << answer.status.error_message() << store.Log();
  ASSERT_TRUE(reply.ParseFromString(answer.messages[0]));
  EXPECT_EQ(reply.data(), "content");
  EXPECT_EQ(ReadText(scratch.path() + "/outside"), "canary");
  std::set<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(scratch.path())) {
    names.insert(entry.path().filename().string());
  }
  EXPECT_EQ(names, (std::set<std::string>{"outside", "store"}));
  ExpectNoReport(store.Log());
}

}  // namespace
}  // namespace ravel::testing
