// Checkpoints in a ravel-store, by real processes: the same history as in a folder while store,
// worker and coordinator are killed; copies between stores; certificates.

#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <absl/strings/ascii.h>
#include <absl/strings/match.h>
#include <absl/strings/numbers.h>
#include <absl/strings/str_cat.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/crypto.h"
#include "common/job_token.h"
#include "common/json.h"
#include "common/store/ravel_store_client.h"
#include "tests/testing/eventually.h"
#include "tests/testing/http_client.h"
#include "tests/testing/mini_cluster.h"
#include "tests/testing/secure_cluster.h"
#include "tests/testing/store_process.h"

namespace ravel::testing {
namespace {

using std::chrono::seconds;
using ::testing::HasSubstr;

class RemoteStoreTest : public ::testing::Test {
 protected:
  void SetUp() override {
    absl::StatusOr<std::unique_ptr<MiniCluster>> started =
        MiniCluster::Start({}, kPatientDetection);
    ASSERT_TRUE(started.ok()) << started.status();
    cluster_ = std::move(*started);
    ASSERT_EQ(cluster_->StartWorkers(2, cluster_->HoldFaults()), absl::OkStatus());
    WriteTokens(cluster_->folder() + "/tokens.bin", 20000, TinyJob().vocabulary);
    store_ = std::make_unique<StoreProcess>(
        StorePlace{.folder = cluster_->folder() + "/server", .flags = {"--dev-loopback"}});
    ASSERT_EQ(store_->Start(), absl::OkStatus());
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
  ASSERT_EQ(store_->KillAndStart(), absl::OkStatus());
  cluster_->LetTrainersGoAt(8);
  ASSERT_TRUE(Eventually(seconds(60), [&] { return cluster_->Get("far")->committed_step >= 10; }))
      << cluster_->Report("far");
  cluster_->KillWorker("w1");
  ASSERT_EQ(cluster_->StartWorkers(2, cluster_->HoldFaults()), absl::OkStatus());
  cluster_->KillCoordinator();
  ASSERT_EQ(store_->KillAndStart(), absl::OkStatus());
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
    ASSERT_EQ(store_->KillAndStart(), absl::OkStatus());  // on the port, so that the URL stands
    const std::string url = store_->Url(to);
    StoreProcess& store = *store_;
    ASSERT_EQ(store.Start({{"RAVEL_FAULTS", fault}}), absl::OkStatus());
    ProcessOptions options;
    options.arguments = {BinaryPath("ravelctl"), "checkpoints", "copy", from, url};
    options.output_path = options.error_path = cluster_->folder() + "/copy.log";
    const auto copying = *ChildProcess::Start(options);
    ASSERT_TRUE(store.WaitForDeath()) << fault;
    EXPECT_FALSE(std::filesystem::exists(store.File(to + "/step-0000000030"))) << fault;
    ASSERT_EQ(store.Start(), absl::OkStatus());
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
  ASSERT_EQ(store_->KillAndStart(), absl::OkStatus());
  ASSERT_EQ(store_->Start({{"RAVEL_FAULTS", "store.finish@4:stall=20s"}}), absl::OkStatus());
  ProcessOptions options;
  options.arguments = {BinaryPath("ravelctl"), "checkpoints", "copy", from, url};
  options.output_path = options.error_path = cluster_->folder() + "/copy.log";
  const auto copying = *ChildProcess::Start(options);
  const auto finished = [&] {
    int64_t files = 0;
    for (const auto& entry : EntriesUnder(store_->File("copies"))) {
      const std::string path = entry.path().string();
      const bool mark = absl::StrContains(path, "/pins/");  // of the copy that is under way
      files += entry.is_regular_file() && !absl::EndsWith(path, ".part") && !mark ? 1 : 0;
    }
    return files;
  };
  ASSERT_TRUE(Eventually(seconds(30), [&] { return finished() >= 2; }));
  copying->Kill();
  ASSERT_EQ(store_->KillAndStart(), absl::OkStatus());
  const RunResult again = Copy(from, url);
  EXPECT_EQ(again.exit_code, 0) << again.err;
  const size_t at = again.out.find(" files, ");
  ASSERT_NE(at, std::string::npos) << again.out;
  EXPECT_THAT(again.out, HasSubstr(absl::StrCat("(", std::stoi(again.out) - 2, " copied now")));
  EXPECT_TRUE(IsWhole(url + "/step-0000000030"));
}

// A copy stands still in the store while others come.
class CopyLeftoversTest : public RemoteStoreTest {
 protected:
  void StartCopy(const std::string& from, const std::string& url) {
    ProcessOptions options;
    options.arguments = {BinaryPath("ravelctl"), "checkpoints", "copy", from, url};
    options.output_path = options.error_path = log_ = cluster_->folder() + "/copy.log";
    copying_ = *ChildProcess::Start(options);
    ASSERT_TRUE(Eventually(seconds(30), [&] { return !Unfinished().empty(); })) << ReadText(log_);
  }
  // Folders of copies that are not whole.
  std::vector<std::string> Unfinished() const {
    std::vector<std::string> found;
    for (const auto& entry : EntriesUnder(store_->File("copies"))) {
      const std::string name = entry.path().filename().string();
      if (absl::StrContains(name, ".e") && absl::EndsWith(name, ".tmp")) {
        found.push_back(name);
      }
    }
    return found;
  }

  std::string log_;
  std::unique_ptr<ChildProcess> copying_;
};

TEST_F(CopyLeftoversTest, WhatAKilledCopyLeftGoesWithTheNextOfAnyStep) {
  RunInFolder();
  const std::string url = store_->Url("copies");
  ASSERT_EQ(store_->KillAndStart(), absl::OkStatus());
  ASSERT_EQ(store_->Start({{"RAVEL_FAULTS", "store.finish@4:stall=1h"}}), absl::OkStatus());
  StartCopy(PlainStep(30), url);
  ASSERT_EQ(Unfinished().size(), 1u);
  copying_->Kill();
  ASSERT_EQ(store_->KillAndStart(), absl::OkStatus());
  const RunResult next = Copy(PlainStep(25), url);
  EXPECT_EQ(next.exit_code, 0) << next.err;
  EXPECT_THAT(next.out, HasSubstr("which a killed copy left"));
  EXPECT_THAT(next.out, HasSubstr("step-0000000030.e"));
  EXPECT_THAT(Unfinished(), ::testing::IsEmpty());
  EXPECT_TRUE(IsWhole(url + "/step-0000000025"));
  EXPECT_EQ(Copy(PlainStep(30), url).exit_code, 0);
  EXPECT_TRUE(IsWhole(url + "/step-0000000030"));
}

TEST_F(CopyLeftoversTest, ACopyThatIsUnderWayIsLeftAloneByOthers) {
  RunInFolder();
  const std::string url = store_->Url("copies");
  ASSERT_EQ(store_->KillAndStart(), absl::OkStatus());
  const std::string hold = cluster_->folder() + "/held";
  WriteText(hold + ".4", "");
  ASSERT_EQ(store_->Start({{"RAVEL_FAULTS", "store.finish@4:hold=" + hold}}), absl::OkStatus());
  StartCopy(PlainStep(30), url);
  const RunResult other = Copy(PlainStep(25), url);
  EXPECT_EQ(other.exit_code, 0) << other.err;
  EXPECT_TRUE(copying_->Running()) << "it ended before the other came";
  std::filesystem::remove(hold + ".4");
  EXPECT_THAT(other.out, ::testing::Not(HasSubstr("removed")));
  EXPECT_EQ(copying_->Wait(seconds(60)), 0) << ReadText(log_);
  EXPECT_THAT(ReadText(log_), HasSubstr(" copied now"));
  EXPECT_THAT(Unfinished(), ::testing::IsEmpty());
  EXPECT_TRUE(IsWhole(url + "/step-0000000025"));
  EXPECT_TRUE(IsWhole(url + "/step-0000000030"));
}

// Two of the same step: one makes it, and the other says so or that it is there.
TEST_F(CopyLeftoversTest, TwoCopiesOfOneStepAtOnceEndWithThatStep) {
  RunInFolder();
  const std::string url = store_->Url("copies");
  ASSERT_EQ(store_->KillAndStart(), absl::OkStatus());
  ASSERT_EQ(store_->Start({{"RAVEL_FAULTS", "store.finish@4:stall=8s"}}), absl::OkStatus());
  StartCopy(PlainStep(30), url);
  const RunResult second = Copy(PlainStep(30), url);
  const int first = copying_->Wait(seconds(60)).value_or(-1);
  std::printf("second: %d %s%sfirst: %d %s",
              second.exit_code,
              second.out.c_str(),
              second.err.c_str(),
              first,
              ReadText(log_).c_str());
  EXPECT_EQ(second.exit_code, 0) << second.err;
  EXPECT_EQ(first, 0) << ReadText(log_);
  EXPECT_TRUE(IsWhole(url + "/step-0000000030"));
}

TEST_F(CopyLeftoversTest, OfManyCopiesOfOneStepIntoAFolderThoseThatLoseSaySo) {
  RunInFolder();
  for (int round = 0; round < 3; ++round) {
    const std::string to = absl::StrCat(cluster_->folder(), "/into", round);
    std::vector<std::unique_ptr<ChildProcess>> copies;
    for (int i = 0; i < 4; ++i) {
      ProcessOptions options;
      options.arguments = {BinaryPath("ravelctl"), "checkpoints", "copy", PlainStep(30), to};
      options.output_path = options.error_path = absl::StrCat(to, ".log", i);
      copies.push_back(*ChildProcess::Start(options));
    }
    int good = 0;
    for (size_t i = 0; i < copies.size(); ++i) {
      const int code = copies[i]->Wait(seconds(60)).value_or(-1);
      const std::string said = ReadText(absl::StrCat(to, ".log", i));
      std::printf("%d %s", code, said.c_str());
      good += code == 0 ? 1 : 0;
      EXPECT_TRUE(code == 0 || absl::StrContains(said, "another copy of this step is under way"))
          << said;
    }
    EXPECT_GE(good, 1);
    EXPECT_TRUE(IsWhole(to + "/step-0000000030"));
    EXPECT_TRUE(std::filesystem::is_empty(to + "/pins")) << "marks go with their copies";
  }
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

// The folder of a new identity of a store.
std::string Certify(const SecureCluster& cluster) {
  const std::string identity = cluster.folder() + "/store-identity";
  const RunResult certified = cluster.Run({BinaryPath("ravel-coordinator"),
                                           "certify-store",
                                           "--state-dir",
                                           cluster.folder() + "/state",
                                           "--name",
                                           "127.0.0.1",
                                           "--out",
                                           identity});
  EXPECT_EQ(certified.exit_code, 0) << certified.err;
  return identity;
}

// The sample that the alert RavelStoreTrustOld reads: it is of the last minutes.
void ExpectToldWhenItHeard(const std::string& port_file) {
  int port = 0;
  ASSERT_TRUE(absl::SimpleAtoi(absl::StripAsciiWhitespace(ReadText(port_file)), &port));
  constexpr std::string_view kName = "\nravel_store_trust_heard_seconds ";
  double heard = 0;
  EXPECT_TRUE(Eventually(seconds(30), [&] {
    const std::string page = GetPage(port, "/metrics").body;
    const size_t at = page.find(kName);
    const size_t end = page.find('\n', at + kName.size());
    return at != std::string::npos &&
           absl::SimpleAtod(page.substr(at + kName.size(), end - at - kName.size()), &heard) &&
           heard > 0;
  }));
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  EXPECT_NEAR(heard, std::chrono::duration<double>(now).count(), 300);
}

// A store with a coordinator, an operator and pages.
StorePlace StoreOfOperators(const SecureCluster& cluster) {
  return {.folder = cluster.folder() + "/server",
          .flags = {"--identity",
                    Certify(cluster),
                    "--operators",
                    "admin",
                    "--coordinator",
                    cluster.address(),
                    "--http-listen",
                    "127.0.0.1:0",
                    "--http-port-file",
                    cluster.folder() + "/store-http-port"}};
}

TEST(SecureStoreTest, AStoreKnowsItsCallersAndLetsThemDoTheirPart) {
  const auto started = SecureCluster::Start({});
  ASSERT_TRUE(started.ok()) << started.status();
  SecureCluster& cluster = **started;
  StoreProcess store(StoreOfOperators(cluster));
  ASSERT_EQ(store.Start(), absl::OkStatus());
  ExpectToldWhenItHeard(cluster.folder() + "/store-http-port");
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
  ASSERT_EQ(waited.exit_code, 0) << waited.err << cluster.Report() << store.Log();
  const std::string step = store.Url("team/sure/step-0000000010");
  EXPECT_EQ(cluster.Ctl({"checkpoints", "verify", step}).exit_code, 0);
  // A job that is tried again after its end, which fenced its epoch off, saves as before.
  TinyJob again = job;
  again.name = "again";
  again.steps = 1'000'000;
  WriteText(cluster.folder() + "/job.yaml", ToYaml(again));
  ASSERT_EQ(cluster.Ctl({"submit", "-f", cluster.folder() + "/job.yaml"}).exit_code, 0);
  int64_t committed = 0;
  const auto commits_more = [&] {
    const absl::StatusOr<json::Value> view =
        json::Parse(cluster.Ctl({"get", "again", "-o", "json"}).out);
    const json::Value* const newest = view.ok() ? view->Find("committedStep") : nullptr;
    int64_t now = 0;
    if (newest != nullptr && newest->is_string()) {
      EXPECT_TRUE(absl::SimpleAtoi(newest->AsString(), &now));
    } else if (newest != nullptr) {
      now = newest->AsInt();
    }
    return now > committed && (committed = now, true);
  };
  for (int tries = 0; tries < 2; ++tries) {
    ASSERT_TRUE(Eventually(seconds(60), commits_more)) << cluster.Report() << store.Log();
    ASSERT_EQ(cluster.Ctl({"cancel", "again", "--wait"}).exit_code, 0);
    commits_more();  // while it was stopped
    if (tries == 0) {
      ASSERT_EQ(cluster.Ctl({"retry", "again"}).exit_code, 0);
    }
  }
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
  EXPECT_THAT(plain.err, HasSubstr("callers with a certificate only"));
}

// Writes files of one unfinished save by identities of nodes, as trainers do. `key_file`: of the
// coordinator, signs their tokens; empty: they have none.
class WriterOf {
 public:
  explicit WriterOf(std::string url, const std::string& key_file = "")
      : url_(std::move(url)),
        key_(key_file.empty()
                 ? ""
                 : Unhex(std::string(absl::StripAsciiWhitespace(ReadText(key_file))))) {}
  ~WriterOf() {
    store::SetStoreIdentitySource(nullptr);
    store::SetStoreToken("");
  }
  // The next calls show a token of that node, for a folder's saves up to an epoch.
  void ShowToken(const std::string& node, const std::string& folder, int64_t epoch = 7) const {
    store::SetStoreToken(*FormatJobToken(
        {.folder = JobFolderHash(folder), .job_tag = 0x3f2a9c01, .epoch = epoch, .node = node},
        key_));
  }

  // By the identity in that folder from now on.
  absl::StatusOr<std::unique_ptr<store::ObjectStore>> Open(const std::string& identity) const {
    store::SetStoreIdentitySource(
        [identity]() -> absl::StatusOr<std::optional<store::StoreIdentity>> {
          return store::StoreIdentity{.authority = ReadText(identity + "/authority.pem"),
                                      .certificate = ReadText(identity + "/certificate.pem"),
                                      .key = ReadText(identity + "/key.pem")};
        });
    return store::OpenRavelStore(url_);
  }
  absl::StatusOr<std::unique_ptr<store::FileWriter>> Begin(const std::string& identity) {
    ASSIGN_OR_RETURN(const auto opened, Open(identity));
    RETURN_IF_ERROR(store::MakeDirectories(*opened, std::string(kSave) + "/model"));
    return opened->Create(absl::StrCat(kSave, "/model/f", ++files_), 1);
  }
  static absl::Status End(store::FileWriter& writer) {
    const char byte = 'x';
    RETURN_IF_ERROR(writer.Append(std::as_bytes(std::span(&byte, 1))));
    return writer.Finish();
  }
  absl::Status Write(const std::string& identity) {
    ASSIGN_OR_RETURN(const auto writer, Begin(identity));
    return End(*writer);
  }

 private:
  static constexpr char kSave[] = "step-0000000020.e7.a1.3f2a9c01.tmp";
  const std::string url_;
  const std::string key_;
  int files_ = 0;
};

TEST(SecureStoreTest, ARevokedNodeIsRefusedWithinSecondsAlsoWhileTheCoordinatorIsAway) {
  const auto started = SecureCluster::Start({});
  ASSERT_TRUE(started.ok()) << started.status();
  SecureCluster& cluster = **started;
  StoreProcess store(
      {.folder = cluster.folder() + "/server",
       .flags = {"--identity", Certify(cluster), "--coordinator", cluster.address()}});
  ASSERT_EQ(store.Start(), absl::OkStatus());
  for (const char* node : {"n1", "n2"}) {
    ASSERT_EQ(cluster.Join(node, cluster.Token({"node"})).exit_code, 0);
  }
  const std::string bad = cluster.folder() + "/stolen";
  const std::string good = cluster.WorkDir("n2") + "/identity";
  std::filesystem::rename(cluster.WorkDir("n1") + "/identity", bad);
  WriterOf writer(store.Url("job"), cluster.folder() + "/state/store-tokens.key");
  std::filesystem::create_directories(store.File("job"));
  writer.ShowToken("n2", "job");
  ASSERT_EQ(writer.Write(good), absl::OkStatus());
  writer.ShowToken("n1", "job");
  ASSERT_EQ(writer.Write(bad), absl::OkStatus()) << store.Log();
  const auto open = writer.Begin(bad);
  ASSERT_TRUE(open.ok()) << open.status();

  ASSERT_EQ(cluster.Ctl({"revoke", "node", "n1"}).exit_code, 0);
  EXPECT_TRUE(Eventually(seconds(15), [&] { return absl::IsPermissionDenied(writer.Write(bad)); }))
      << store.Log();
  EXPECT_TRUE(absl::IsPermissionDenied(WriterOf::End(**open))) << "on a stream that was open";
  writer.ShowToken("n2", "job");
  EXPECT_EQ(writer.Write(good), absl::OkStatus());
  // The name is good again by a new certificate, at once; the stolen one is not.
  ASSERT_EQ(cluster.Join("n1", cluster.Token({"node"})).exit_code, 0);
  writer.ShowToken("n1", "job");
  EXPECT_EQ(writer.Write(cluster.WorkDir("n1") + "/identity"), absl::OkStatus());
  writer.ShowToken("n2", "job");

  cluster.KillCoordinator();
  for (int starts = 0; starts < 2; ++starts) {
    const absl::Status refused = writer.Write(bad);
    EXPECT_TRUE(absl::IsPermissionDenied(refused)) << refused;
    EXPECT_THAT(std::string(refused.message()), HasSubstr("node/n1 was revoked"));
    EXPECT_EQ(writer.Write(good), absl::OkStatus());
    ASSERT_EQ(store.KillAndStart(), absl::OkStatus());
  }
}

TEST(SecureStoreTest, ANodeWritesSavesOfJobsThatItsTokenNamesOnly) {
  const auto started = SecureCluster::Start({});
  ASSERT_TRUE(started.ok()) << started.status();
  SecureCluster& cluster = **started;
  StoreProcess store(
      {.folder = cluster.folder() + "/server",
       .flags = {"--identity", Certify(cluster), "--coordinator", cluster.address()}});
  ASSERT_EQ(store.Start(), absl::OkStatus());
  ASSERT_EQ(cluster.Join("n1", cluster.Token({"node"})).exit_code, 0);
  const std::string identity = cluster.WorkDir("n1") + "/identity";
  WriterOf writer(store.Url("job"), cluster.folder() + "/state/store-tokens.key");
  std::filesystem::create_directories(store.File("job"));
  const auto refusal = [&] {
    const absl::Status status = writer.Write(identity);
    EXPECT_TRUE(status.ok() || absl::IsPermissionDenied(status)) << status;
    return std::string(status.message());
  };
  EXPECT_THAT(refusal(), HasSubstr("no token of a job"));
  writer.ShowToken("n1", "job");
  EXPECT_EQ(refusal(), "") << store.Log();
  writer.ShowToken("n2", "job");
  EXPECT_THAT(refusal(), HasSubstr("of node/n2"));
  writer.ShowToken("n1", "other");
  EXPECT_THAT(refusal(), HasSubstr("of another job"));
  writer.ShowToken("n1", "job", 6);
  EXPECT_THAT(refusal(), HasSubstr("of epoch 6"));
  store::SetStoreToken("ravel-job-1 of somebody else");
  EXPECT_THAT(refusal(), HasSubstr("not of this cluster's coordinator"));
  // The key is known without the coordinator, too.
  cluster.KillCoordinator();
  ASSERT_EQ(store.KillAndStart(), absl::OkStatus());
  EXPECT_THAT(refusal(), HasSubstr("not of this cluster's coordinator"));
  writer.ShowToken("n1", "job");
  EXPECT_EQ(refusal(), "");
}

}  // namespace
}  // namespace ravel::testing
