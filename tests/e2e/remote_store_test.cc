// Checkpoints in a ravel-store, by real processes: the same history as in a folder while store,
// worker and coordinator are killed; copies between stores; certificates.

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/testing/eventually.h"
#include "tests/testing/mini_cluster.h"
#include "tests/testing/secure_cluster.h"

namespace ravel::testing {
namespace {

using std::chrono::seconds;
using ::testing::HasSubstr;

// A ravel-store process; on the same port after each start.
class StoreProcess {
 public:
  explicit StoreProcess(const std::string& folder,
                        std::vector<std::string> more = {"--dev-loopback"})
      : folder_(folder), more_(std::move(more)) {
    std::filesystem::create_directories(folder_ + "/data");
  }

  void Start(const std::map<std::string, std::string>& environment = {}) {
    process_.reset();
    const std::string port_file = folder_ + "/port";
    std::filesystem::remove(port_file);
    ProcessOptions options;
    options.arguments = {BinaryPath("ravel-store"),
                         "--data",
                         folder_ + "/data",
                         "--listen",
                         absl::StrCat("127.0.0.1:", port_),
                         "--port-file",
                         port_file,
                         "--min-free",
                         "0",
                         "--enable-faults"};
    options.arguments.insert(options.arguments.end(), more_.begin(), more_.end());
    options.environment = environment;
    options.output_path = options.error_path = folder_ + "/log";
    process_ = *ChildProcess::Start(options);
    ASSERT_TRUE(Eventually(seconds(20), [&] { return !ReadText(port_file).empty(); }))
        << ReadText(folder_ + "/log");
    port_ = std::stoi(ReadText(port_file));
  }
  void KillAndStart() {
    process_->Kill();
    Start();
  }
  // After a fault has killed it.
  bool WaitForDeath() { return process_->Wait(seconds(30)).has_value(); }
  std::string Url(const std::string& path) const {
    return absl::StrCat("ravel://127.0.0.1:", port_, "/", path);
  }
  // The file behind a path of the store.
  std::string File(const std::string& path) const { return folder_ + "/data/files/" + path; }

 private:
  const std::string folder_;
  const std::vector<std::string> more_;
  std::unique_ptr<ChildProcess> process_;
  int port_ = 0;
};

class RemoteStoreTest : public ::testing::Test {
 protected:
  void SetUp() override {
    absl::StatusOr<std::unique_ptr<MiniCluster>> started =
        MiniCluster::Start({}, kPatientDetection);
    ASSERT_TRUE(started.ok()) << started.status();
    cluster_ = std::move(*started);
    ASSERT_EQ(cluster_->StartWorkers(2, cluster_->HoldFaults()), absl::OkStatus());
    WriteTokens(cluster_->folder() + "/tokens.bin", 20000, TinyJob().vocabulary);
    store_ = std::make_unique<StoreProcess>(cluster_->folder() + "/server");
    store_->Start();
  }
  TinyJob Job(const std::string& name, const std::string& store) const {
    return {.name = name,
            .tokens_path = cluster_->folder() + "/tokens.bin",
            .store = store,
            .workers = 2,
            .sizes = {1, 2},
            .steps = 30,
            .save_every_steps = 5};
  }
  // Steps with their losses.
  std::map<int64_t, std::string> Losses(const std::string& job) const {
    std::map<int64_t, std::string> losses;
    const auto rows = cluster_->Metrics(job);
    for (const StepRow& row : rows.ok() ? *rows : std::vector<StepRow>()) {
      losses[row.step] = row.loss_bits;
    }
    return losses;
  }
  void RunInFolder() {
    ASSERT_EQ(cluster_->Submit(Job("plain", cluster_->folder() + "/plain")), absl::OkStatus());
    ASSERT_EQ(cluster_->WaitForSuccess("plain", seconds(60)), absl::OkStatus());
  }
  std::string PlainStep(int64_t step) const { return cluster_->Checkpoints("plain")->at(step); }
  RunResult Copy(const std::string& from, const std::string& to) const {
    return cluster_->Ctl({"checkpoints", "copy", from, to});
  }
  bool IsWhole(const std::string& step) const {
    const RunResult verified = cluster_->Ctl({"checkpoints", "verify", step});
    return verified.exit_code == 0 && absl::StrContains(verified.out, ": ok (deep)");
  }

  std::unique_ptr<MiniCluster> cluster_;
  std::unique_ptr<StoreProcess> store_;
};

TEST_F(RemoteStoreTest, TheHistoryIsTheSameAsInAFolderThroughKillsOfEveryProgram) {
  RunInFolder();
  cluster_->HoldTrainersAt(8);
  ASSERT_EQ(cluster_->Submit(Job("far", store_->Url("team"))), absl::OkStatus());
  ASSERT_EQ(cluster_->WaitForStep("far", 7, seconds(60)), absl::OkStatus());
  store_->KillAndStart();
  cluster_->LetTrainersGoAt(8);
  ASSERT_TRUE(Eventually(seconds(60), [&] { return cluster_->Get("far")->committed_step >= 10; }))
      << cluster_->Report("far");
  cluster_->KillWorker("w1");
  ASSERT_EQ(cluster_->StartWorkers(2, cluster_->HoldFaults()), absl::OkStatus());
  cluster_->KillCoordinator();
  store_->KillAndStart();
  ASSERT_EQ(cluster_->RestartCoordinator(), absl::OkStatus());
  ASSERT_EQ(cluster_->WaitForSuccess("far", seconds(60)), absl::OkStatus());
  EXPECT_EQ(Losses("far"), Losses("plain"));
  const auto steps = cluster_->Checkpoints("far");
  ASSERT_TRUE(steps.ok() && steps->contains(30)) << cluster_->Report("far");
  for (const auto& [step, url] : *steps) {
    EXPECT_EQ(
        url, store_->Url("team/far/step-00000000") + (step < 10 ? "0" : "") + std::to_string(step));
    EXPECT_TRUE(IsWhole(url)) << url;
  }
  EXPECT_EQ(*cluster_->StateDigest(steps->at(30)), *cluster_->StateDigest(PlainStep(30)));
  const std::string exported = cluster_->folder() + "/exported";
  const RunResult run =
      cluster_->Ctl({"checkpoints", "export", steps->at(30), "--output-dir", exported});
  EXPECT_EQ(run.exit_code, 0) << run.err;
  EXPECT_TRUE(std::filesystem::exists(exported + "/model.safetensors"));
  // Another job begins where this one ended, and is as the first one was.
  TinyJob next = Job("next", store_->Url("team"));
  next.steps = 35;
  next.resume_from = steps->at(30);
  ASSERT_EQ(cluster_->Submit(next), absl::OkStatus());
  ASSERT_EQ(cluster_->WaitForSuccess("next", seconds(60)), absl::OkStatus());
  EXPECT_TRUE(cluster_->Checkpoints("next")->contains(35));
}

TEST_F(RemoteStoreTest, ACopyIsWholeOrNotThereWhereverItIsCut) {
  RunInFolder();
  const std::string from = PlainStep(30);
  int copies = 0;
  for (const char* fault :
       {"store.append@2:kill", "store.finish:kill", "store.finish@3:kill", "store.publish:kill"}) {
    const std::string to = absl::StrCat("copies/", copies++);
    store_->KillAndStart();  // on the port, so that the URL stands
    const std::string url = store_->Url(to);
    StoreProcess& store = *store_;
    store.Start({{"RAVEL_FAULTS", fault}});
    ProcessOptions options;
    options.arguments = {BinaryPath("ravelctl"), "checkpoints", "copy", from, url};
    options.output_path = options.error_path = cluster_->folder() + "/copy.log";
    const auto copying = *ChildProcess::Start(options);
    ASSERT_TRUE(store.WaitForDeath()) << fault;
    EXPECT_FALSE(std::filesystem::exists(store.File(to + "/step-0000000030"))) << fault;
    store.Start();
    EXPECT_EQ(copying->Wait(seconds(60)), 0) << fault << ReadText(options.output_path);
    EXPECT_TRUE(IsWhole(url + "/step-0000000030")) << fault;
  }
  // Back into a folder, and once more: nothing is left to do.
  const std::string back = cluster_->folder() + "/back";
  const RunResult first = Copy(store_->Url("copies/0"), back);
  EXPECT_EQ(first.exit_code, 0) << first.err;
  EXPECT_TRUE(IsWhole(back + "/step-0000000030"));
  EXPECT_THAT(Copy(store_->Url("copies/0"), back).out, HasSubstr("is there already"));
  EXPECT_EQ(*cluster_->StateDigest(back + "/step-0000000030"), *cluster_->StateDigest(from));
}

TEST_F(RemoteStoreTest, ACopyThatWasKilledGoesOnWithWhatItHadFinished) {
  RunInFolder();
  const std::string from = PlainStep(30);
  const std::string url = store_->Url("copies");
  store_->KillAndStart();
  store_->Start({{"RAVEL_FAULTS", "store.finish@3:stall=20s"}});
  ProcessOptions options;
  options.arguments = {BinaryPath("ravelctl"), "checkpoints", "copy", from, url};
  options.output_path = options.error_path = cluster_->folder() + "/copy.log";
  const auto copying = *ChildProcess::Start(options);
  const auto finished = [&] {
    int64_t files = 0;
    for (const auto& entry : EntriesUnder(store_->File("copies"))) {
      files += entry.is_regular_file() && !absl::EndsWith(entry.path().string(), ".part") ? 1 : 0;
    }
    return files;
  };
  ASSERT_TRUE(Eventually(seconds(30), [&] { return finished() >= 2; }));
  copying->Kill();
  store_->KillAndStart();
  const RunResult again = Copy(from, url);
  EXPECT_EQ(again.exit_code, 0) << again.err;
  const size_t at = again.out.find(" files, ");
  ASSERT_NE(at, std::string::npos) << again.out;
  EXPECT_THAT(again.out, HasSubstr(absl::StrCat("(", std::stoi(again.out) - 2, " copied now")));
  EXPECT_TRUE(IsWhole(url + "/step-0000000030"));
}

TEST_F(RemoteStoreTest, OfTwoStepsThatRaceForANameOneIsThere) {
  RunInFolder();
  ASSERT_EQ(cluster_->Submit(Job("second", cluster_->folder() + "/second")), absl::OkStatus());
  ASSERT_EQ(cluster_->WaitForSuccess("second", seconds(60)), absl::OkStatus());
  const std::vector<std::string> sources = {PlainStep(30), cluster_->Checkpoints("second")->at(30)};
  for (int round = 0; round < 2; ++round) {
    const std::string to = absl::StrCat("race/", round);
    std::vector<std::unique_ptr<ChildProcess>> copies;
    for (const std::string& source : sources) {
      ProcessOptions options;
      options.arguments = {BinaryPath("ravelctl"), "checkpoints", "copy", source, store_->Url(to)};
      copies.push_back(*ChildProcess::Start(options));
    }
    const int first = copies[0]->Wait(seconds(60)).value_or(-1);
    const int second = copies[1]->Wait(seconds(60)).value_or(-1);
    EXPECT_EQ((first == 0) + (second == 0), 1) << first << " " << second;
    const std::string winner = sources[first == 0 ? 0 : 1];
    EXPECT_EQ(ReadText(store_->File(to + "/step-0000000030/COMMIT")), ReadText(winner + "/COMMIT"));
    EXPECT_TRUE(IsWhole(store_->Url(to) + "/step-0000000030"));
  }
}

TEST(SecureStoreTest, AStoreKnowsItsCallersAndLetsThemDoTheirPart) {
  const auto started = SecureCluster::Start({});
  ASSERT_TRUE(started.ok()) << started.status();
  SecureCluster& cluster = **started;
  const std::string identity = cluster.folder() + "/store-identity";
  const RunResult certified = cluster.Run({BinaryPath("ravel-coordinator"),
                                           "certify-store",
                                           "--state-dir",
                                           cluster.folder() + "/state",
                                           "--name",
                                           "127.0.0.1",
                                           "--out",
                                           identity});
  ASSERT_EQ(certified.exit_code, 0) << certified.err;
  StoreProcess store(cluster.folder() + "/server",
                     {"--identity", identity, "--operators", "admin"});
  store.Start();
  ASSERT_EQ(cluster.Join("n1", cluster.Token({"node"})).exit_code, 0);
  ASSERT_EQ(cluster.StartWorker("n1"), absl::OkStatus());
  ASSERT_TRUE(cluster.WaitForReady(1)) << cluster.Report();
  WriteTokens(cluster.folder() + "/tokens.bin", 20000, TinyJob().vocabulary);
  const TinyJob job = {.name = "sure",
                       .tokens_path = cluster.folder() + "/tokens.bin",
                       .store = store.Url("team"),
                       .workers = 1};
  WriteText(cluster.folder() + "/job.yaml", ToYaml(job));
  const RunResult submitted = cluster.Ctl({"submit", "-f", cluster.folder() + "/job.yaml"});
  ASSERT_EQ(submitted.exit_code, 0) << submitted.err;
  const RunResult waited = cluster.Ctl({"wait", "sure", "--for=done", "--timeout", "60s"});
  ASSERT_EQ(waited.exit_code, 0) << waited.err << cluster.Report()
                                 << ReadText(cluster.folder() + "/server/log");
  const std::string step = store.Url("team/sure/step-0000000010");
  EXPECT_EQ(cluster.Ctl({"checkpoints", "verify", step}).exit_code, 0);
  // A user reads, and may not write; the operator may.
  const std::string token =
      cluster.Token({"user", "ann", "--role", "user", "--namespace", "default"});
  ASSERT_EQ(cluster.LogIn("ann", token).exit_code, 0);
  EXPECT_EQ(cluster.Ctl({"checkpoints", "verify", step}, "ann").exit_code, 0);
  const RunResult denied = cluster.Ctl({"checkpoints", "copy", step, store.Url("ann")}, "ann");
  EXPECT_NE(denied.exit_code, 0);
  EXPECT_THAT(denied.err, HasSubstr("user/ann may not change"));
  EXPECT_FALSE(std::filesystem::exists(store.File("ann")));
  EXPECT_EQ(cluster.Ctl({"checkpoints", "copy", step, store.Url("admin")}).exit_code, 0);
  // Without a certificate, and in clear, there is nothing to be had.
  const RunResult plain = cluster.Run(
      {BinaryPath("ravelctl"), "--coordinator", "127.0.0.1:1", "checkpoints", "verify", step});
  EXPECT_NE(plain.exit_code, 0);
}

}  // namespace
}  // namespace ravel::testing
