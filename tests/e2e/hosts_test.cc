// Several hosts, as network namespaces with addresses of their own and certificates everywhere: a
// coordinator on one, daemons on others. A job goes from `init` to an exported model with the
// losses of one host's run, bit for bit: with a shared folder, and with none, checkpoints in a
// ravel-store on a host of its own, while programs are killed and links fail.

#include <chrono>
#include <filesystem>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_replace.h>
#include <absl/strings/str_split.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/testing/eventually.h"
#include "tests/testing/mini_cluster.h"
#include "tests/testing/required.h"
#include "tests/testing/secure_cluster.h"
#include "tests/testing/store_process.h"

namespace ravel::testing {
namespace {

using std::chrono::seconds;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr int kWorkers = 4;
constexpr int kStoreHost = kWorkers + 1;

// loss_bits of each step, in order.
std::vector<std::string> LossBits(const std::string& jsonl) {
  std::vector<std::string> bits;
  for (const absl::string_view line : absl::StrSplit(jsonl, '\n', absl::SkipEmpty())) {
    const absl::StatusOr<json::Value> step = json::Parse(std::string(line));
    const json::Value* const value = step.ok() ? step->Find("loss_bits") : nullptr;
    bits.push_back(value == nullptr ? "none" : value->AsString());
  }
  return bits;
}

class HostsTest : public ::testing::Test {
 protected:
  void TearDown() override {
    if (HasFailure() && cluster_ != nullptr) {
      ADD_FAILURE() << cluster_->Report();
    }
  }
  // The coordinator on host 0.
  void StartCoordinator(int hosts, bool six, const std::string& detection = "5s") {
    absl::StatusOr<std::unique_ptr<NetworkHosts>> made = NetworkHosts::Create(hosts);
    if (!made.ok()) {
      SkipWithout("namespaces", made.status().message());
      return;
    }
    hosts_ = *std::move(made);
    absl::StatusOr<std::unique_ptr<SecureCluster>> started =
        SecureCluster::Start({.listen = six ? "[::]:0" : "0.0.0.0:0",
                              .names = {six ? hosts_->AddressV6(0) : hosts_->Address(0)},
                              .coordinator_host = hosts_->Prefix(0),
                              .detection = detection});
    ASSERT_TRUE(started.ok()) << started.status();
    cluster_ = *std::move(started);
  }
  // And a daemon on each of two others, all with one folder.
  void Start(bool six) {
    StartCoordinator(3, six);
    if (IsSkipped() || HasFatalFailure()) {
      return;
    }
    const std::string token = cluster_->Token({"node", "--uses", "2"});
    for (const int host : {1, 2}) {
      const std::string node = absl::StrCat("n", host);
      const RunResult joined = cluster_->Join(node, token, hosts_->Prefix(host));
      ASSERT_EQ(joined.exit_code, 0) << joined.err;
      ASSERT_EQ(cluster_->StartWorker(node, hosts_->Prefix(host), {"--cpu-devices", "2"}),
                absl::OkStatus());
    }
    ASSERT_TRUE(cluster_->WaitForReady(2));
    WriteTokens(cluster_->folder() + "/tokens.bin", 20000, TinyJob().vocabulary);
  }
  TinyJob Job(const std::string& name, int64_t workers) const {
    return {.name = name,
            .tokens_path = cluster_->folder() + "/tokens.bin",
            .store = cluster_->folder() + "/store",
            .workers = workers,
            .steps = 12,
            .save_every_steps = 4};
  }
  // Waits for a step or the end of a job, which may take minutes where others use the disk.
  RunResult Await(const std::string& job, const std::string& what) const {
    return cluster_->Ctl(
        {"wait", job, absl::StrCat("--for=", what), "--timeout", "200s"}, "admin", seconds(220));
  }
  // Losses of a job that succeeded.
  std::vector<std::string> Train(const TinyJob& job) {
    const std::string path = absl::StrCat(cluster_->folder(), "/", job.name, ".yaml");
    WriteText(path, ToYaml(job));
    const RunResult submitted = cluster_->Ctl({"submit", "-f", path});
    EXPECT_EQ(submitted.exit_code, 0) << submitted.err;
    const RunResult done = Await(job.name, "done");
    EXPECT_EQ(done.exit_code, 0) << done.err << cluster_->Ctl({"events", job.name}).out;
    return LossBits(cluster_->Ctl({"metrics", job.name, "-o", "jsonl"}).out);
  }

  std::unique_ptr<NetworkHosts> hosts_;
  std::unique_ptr<SecureCluster> cluster_;
};

TEST_F(HostsTest, TwoHostsTrainWhatOneTrains) {
  Start(false);
  if (IsSkipped() || HasFatalFailure()) {
    return;
  }
  const std::vector<std::string> one = Train(Job("one", 2));  // both ranks on one node
  ASSERT_EQ(one.size(), 12u);
  const std::vector<std::string> four = Train(Job("four", 4));
  EXPECT_EQ(four, one);
  EXPECT_THAT(cluster_->Ctl({"events", "one"}).out, HasSubstr("over shm"));
  EXPECT_THAT(cluster_->Ctl({"events", "four"}).out, HasSubstr("over mixed"));
  EXPECT_THAT(cluster_->Ctl({"nodes", "list", "-o", "json"}).out, HasSubstr(hosts_->Address(2)));

  const RunResult exported = cluster_->Ctl({"checkpoints",
                                            "export",
                                            cluster_->folder() + "/store/four",
                                            "--output",
                                            cluster_->folder() + "/model"});
  EXPECT_EQ(exported.exit_code, 0) << exported.err;
  EXPECT_TRUE(std::filesystem::exists(cluster_->folder() + "/model/model.safetensors"));
}

// The ranks that share each layer lie on one host and have its memory; gradients go between hosts.
TEST_F(HostsTest, SharedLayersHaveSharedMemoryWithinAHost) {
  Start(false);
  if (IsSkipped() || HasFatalFailure()) {
    return;
  }
  TinyJob two = Job("two", 2);
  two.parallelism = "tensor: 2";
  TinyJob four = Job("four", 4);
  four.parallelism = "tensor: 2";
  TinyJob tcp = Job("tcp", 4);
  tcp.parallelism = "tensor: 2";
  tcp.transport = "gloo";
  const std::vector<std::string> one_host = Train(two);
  ASSERT_EQ(one_host.size(), 12u);
  EXPECT_EQ(Train(four), one_host);
  EXPECT_EQ(Train(tcp), one_host);
  EXPECT_THAT(cluster_->Ctl({"events", "four"}).out, HasSubstr("over mixed"));
  const std::string log = cluster_->Ctl({"logs", "four"}).out;
  EXPECT_THAT(log, HasSubstr("group tensor.gather over shm"));
  EXPECT_THAT(log, HasSubstr("over gloo"));
  EXPECT_THAT(cluster_->Ctl({"logs", "tcp"}).out, Not(HasSubstr("over shm")));
}

TEST_F(HostsTest, AddressesMayBeOfIPv6) {
  Start(true);
  if (IsSkipped() || HasFatalFailure()) {
    return;
  }
  EXPECT_EQ(Train(Job("four", 4)).size(), 12u);
  EXPECT_THAT(cluster_->Ctl({"nodes", "list", "-o", "json"}).out, HasSubstr(hosts_->AddressV6(1)));
}

// A path that drops frames which both of its ends believe in, and tells neither.
class ShortFramesTest : public HostsTest {
 protected:
  void StartAll() {
    StartCoordinator(2, false, "2s");
    if (IsSkipped() || HasFatalFailure()) {
      return;
    }
    ASSERT_EQ(hosts_->SendFrames(), absl::OkStatus());
    const RunResult joined = cluster_->Join("n1", cluster_->Token({"node"}), hosts_->Prefix(1));
    ASSERT_EQ(joined.exit_code, 0) << joined.err;
    ASSERT_EQ(cluster_->StartWorker("n1", hosts_->Prefix(1), {"--cpu-devices", "1"}),
              absl::OkStatus());
    ASSERT_TRUE(cluster_->WaitForReady(1));
  }
  bool Logged(const std::string& program, const std::string& text) const {
    return Eventually(seconds(30), [&] { return absl::StrContains(cluster_->Log(program), text); });
  }
};

TEST_F(ShortFramesTest, NodeBehindThemIsLostAndReturns) {
  StartAll();
  if (IsSkipped() || HasFatalFailure()) {
    return;
  }
  ASSERT_EQ(hosts_->LimitFrames(1, NetworkHosts::Way::kBoth, 1280), absl::OkStatus());
  EXPECT_TRUE(Logged("coordinator", "if the host is well, see the MTU of the path"));
  EXPECT_TRUE(Logged("n1", "shorter messages were answered: the MTU of the"));
  EXPECT_THAT(cluster_->Ctl({"nodes", "list"}).out, HasSubstr("LOST"));
  ASSERT_EQ(hosts_->LimitFrames(1, NetworkHosts::Way::kBoth, 1500), absl::OkStatus());
  EXPECT_TRUE(cluster_->WaitForReady(1));
}

TEST_F(ShortFramesTest, NodeWhichOnlyTheyDoNotReachIsLostAndReturns) {
  StartAll();
  if (IsSkipped() || HasFatalFailure()) {
    return;
  }
  ASSERT_EQ(hosts_->LimitFrames(1, NetworkHosts::Way::kToHost, 1280), absl::OkStatus());
  EXPECT_TRUE(Logged("coordinator", "its beats arrive, but messages of more than a frame do not"));
  // Its next connection is made for the shorter frames.
  EXPECT_TRUE(cluster_->WaitForReady(1));
}

// Four daemons and a store, each on a host with a folder of its own.
class HostsApartTest : public HostsTest {
 protected:
  void TearDown() override {
    if (HasFailure() && store_ != nullptr) {
      ADD_FAILURE() << "store:\n" << store_->Log();
    }
    HostsTest::TearDown();
  }
  std::vector<std::string> Host(int host) const { return hosts_->Prefix(host, cluster_->folder()); }
  void StartAll() {
    StartCoordinator(kStoreHost + 1, false);
    if (IsSkipped() || HasFatalFailure()) {
      return;
    }
    const std::string& folder = cluster_->folder();
    const std::string seen = NetworkHosts::SeenFolder(folder, kStoreHost);
    store_ = std::make_unique<StoreProcess>(
        StorePlace{.folder = folder + "/server",
                   .seen_folder = seen + "/server",
                   .host = Host(kStoreHost),
                   .address = hosts_->Address(kStoreHost),
                   .flags = {"--identity", folder + "/identity", "--operators", "admin"}});
    const RunResult certified = cluster_->Run({BinaryPath("ravel-coordinator"),
                                               "certify-store",
                                               "--state-dir",
                                               folder + "/state",
                                               "--name",
                                               hosts_->Address(kStoreHost),
                                               "--out",
                                               seen + "/identity"});
    ASSERT_EQ(certified.exit_code, 0) << certified.err;
    ASSERT_EQ(store_->Start(), absl::OkStatus());
    const std::string token = cluster_->Token({"node", "--uses", absl::StrCat(kWorkers)});
    for (int host = 1; host <= kWorkers; ++host) {
      const RunResult joined = cluster_->Join(absl::StrCat("n", host), token, Host(host));
      ASSERT_EQ(joined.exit_code, 0) << joined.err;
      WriteTokens(
          NetworkHosts::SeenFolder(folder, host) + "/tokens.bin", 20000, TinyJob().vocabulary);
      ASSERT_EQ(StartNode(host), absl::OkStatus());
    }
    ASSERT_TRUE(cluster_->WaitForReady(kWorkers));
  }
  // Trainers there wait before the N-th step that they make while HoldAt(N) holds.
  absl::Status StartNode(int host) {
    return cluster_->StartWorker(
        absl::StrCat("n", host),
        Host(host),
        {"--cpu-devices", "1", "--enable-faults"},
        {{"RAVEL_FAULTS", absl::StrCat("trainer.step@*:hold=", control_.path(), "/hold")}});
  }
  void HoldAt(int64_t step) const { WriteText(absl::StrCat(control_.path(), "/hold.", step), ""); }
  // Lets trainers go on to the step before `next`.
  void LetGo(int64_t held, int64_t next) const {
    HoldAt(next);
    std::filesystem::remove(absl::StrCat(control_.path(), "/hold.", held));
  }
  void WaitForStep(int64_t step) const {
    const RunResult waited = Await("far", absl::StrCat("step=", step));
    ASSERT_EQ(waited.exit_code, 0) << waited.err << cluster_->Ctl({"events", "far"}).out;
  }
  bool Happened(const std::string& event) const {
    return absl::StrContains(cluster_->Ctl({"events", "far"}).out, event);
  }
  TinyJob JobThere(const std::string& name, int64_t workers) const {
    TinyJob job = Job(name, workers);
    job.store = store_->Url("team");
    job.steps = 30;
    job.save_every_steps = 5;
    return job;
  }

  ScratchFolder control_;
  std::unique_ptr<StoreProcess> store_;
};

TEST_F(HostsApartTest, HostsThatShareNothingTrainThroughKillsAndBadLinks) {
  StartAll();
  if (IsSkipped() || HasFatalFailure()) {
    return;
  }
  for (const int host : {1, 2}) {  // the mounts keep folders apart
    std::vector<std::string> look = Host(host);
    look.insert(look.end(), {"/bin/ls", cluster_->WorkDir("n1")});
    EXPECT_EQ(cluster_->Run(look).exit_code == 0, host == 1);
  }
  const std::vector<std::string> one = Train(JobThere("one", 1));
  ASSERT_EQ(one.size(), 30u);

  HoldAt(6);
  WriteText(cluster_->folder() + "/far.yaml", ToYaml(JobThere("far", kWorkers)));
  const RunResult submitted = cluster_->Ctl({"submit", "-f", cluster_->folder() + "/far.yaml"});
  ASSERT_EQ(submitted.exit_code, 0) << submitted.err;
  ASSERT_NO_FATAL_FAILURE(WaitForStep(5));
  ASSERT_EQ(store_->KillAndStart(), absl::OkStatus());
  LetGo(6, 12);
  ASSERT_NO_FATAL_FAILURE(WaitForStep(11));

  const absl::Status slow = hosts_->Throttle(1, 2'000'000);
  LetGo(12, 18);
  ASSERT_NO_FATAL_FAILURE(WaitForStep(17));
  if (slow.ok()) {
    ASSERT_EQ(hosts_->EndThrottle(1), absl::OkStatus());
  } else {
    EXPECT_FALSE(IsRequired("tbf")) << slow;
    RecordProperty("not_throttled", std::string(slow.message()));
    std::cout << "no link was throttled: " << slow.message() << "\n";
  }

  // The next epoch begins there, two steps short of the cut.
  ASSERT_TRUE(Eventually(seconds(60), [&] { return Happened("team/far/step-0000000015"); }));
  ASSERT_EQ(hosts_->CutLink(2), absl::OkStatus());
  LetGo(18, 4);  // those of the next epoch
  ASSERT_TRUE(Eventually(seconds(30), [&] { return Happened("NodeLost"); }));
  ASSERT_EQ(hosts_->MendLink(2), absl::OkStatus());
  ASSERT_NO_FATAL_FAILURE(WaitForStep(18));

  cluster_->Worker("n3").KillInner();
  ASSERT_EQ(StartNode(3), absl::OkStatus());
  std::filesystem::remove(control_.path() + "/hold.4");
  const RunResult done = Await("far", "done");
  ASSERT_EQ(done.exit_code, 0) << done.err << cluster_->Ctl({"events", "far"}).out;

  EXPECT_EQ(LossBits(cluster_->Ctl({"metrics", "far", "-o", "jsonl"}).out), one);
  EXPECT_TRUE(Happened("over gloo"));
  const std::string step = store_->Url("team/far/step-0000000030");
  const RunResult verified = cluster_->Ctl({"checkpoints", "verify", step});
  EXPECT_THAT(verified.out, HasSubstr(": ok (deep)")) << verified.err;
  const std::string model = cluster_->folder() + "/model";
  const RunResult exported =
      cluster_->Ctl({"checkpoints", "export", store_->Url("team/far"), "--output", model});
  EXPECT_EQ(exported.exit_code, 0) << exported.err;
  EXPECT_TRUE(std::filesystem::exists(model + "/model.safetensors"));
  EXPECT_FALSE(std::filesystem::exists(cluster_->folder() + "/tokens.bin"));
}

// Pushed data is on no host but the store's; nodes fetch it with their certificates.
TEST_F(HostsApartTest, HostsThatShareNothingTrainWithDataOfTheStoreAlone) {
  StartAll();
  if (IsSkipped() || HasFatalFailure()) {
    return;
  }
  const std::string& folder = cluster_->folder();
  std::string text;
  for (int line = 0; line < 600; ++line) {
    absl::StrAppend(&text, "line ", line * line, " of a text to learn\n");
  }
  WriteText(folder + "/text", text);
  const std::string web = folder + "/web";
  const RunResult prepared =
      cluster_->Ctl({"data", "prepare", "--input", folder + "/text", "--output", web});
  ASSERT_EQ(prepared.exit_code, 0) << prepared.err;
  const RunResult pushed = cluster_->Ctl({"data", "push", web, store_->Url("sets/web")});
  ASSERT_EQ(pushed.exit_code, 0) << pushed.err;

  TinyJob job = JobThere("far", kWorkers);
  job.tokens_path = store_->Url("sets/web/web");
  job.vocabulary = 257;
  job.steps = 10;
  WriteText(folder + "/far.yaml",
            absl::StrReplaceAll(ToYaml(job), {{"format: flat_u16", "format: auto"}}));
  const RunResult submitted = cluster_->Ctl({"submit", "-f", folder + "/far.yaml"});
  ASSERT_EQ(submitted.exit_code, 0) << submitted.err;
  const RunResult done = Await("far", "done");
  ASSERT_EQ(done.exit_code, 0) << done.err << cluster_->Ctl({"events", "far"}).out;
  for (int host = 1; host <= kWorkers; ++host) {
    const std::string sets =
        absl::StrCat(NetworkHosts::SeenFolder(folder, host), "/n", host, "/data/sets");
    EXPECT_FALSE(std::filesystem::is_empty(sets)) << sets;
  }
}

}  // namespace
}  // namespace ravel::testing
