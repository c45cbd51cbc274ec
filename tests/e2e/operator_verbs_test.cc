// What operators and their supervisors do to a running cluster: a second daemon of a name, a closed
// terminal, a job that is tried again.

#include <chrono>
#include <csignal>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_replace.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/json.h"
#include "tests/testing/eventually.h"
#include "tests/testing/mini_cluster.h"

namespace ravel::testing {
namespace {

using std::chrono::seconds;
using ::testing::HasSubstr;

class OperatorVerbsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    absl::StatusOr<std::unique_ptr<MiniCluster>> started =
        MiniCluster::Start({}, kPatientDetection);
    ASSERT_TRUE(started.ok()) << started.status();
    cluster_ = *std::move(started);
    WriteTokens(cluster_->folder() + "/tokens.bin", 100000, TinyJob().vocabulary);
    ASSERT_EQ(cluster_->StartWorkers(1, cluster_->HoldFaults()), absl::OkStatus());
  }
  TinyJob Job(const std::string& name) const {
    return {.name = name,
            .tokens_path = cluster_->folder() + "/tokens.bin",
            .store = cluster_->folder() + "/store",
            .workers = 1,
            .steps = 60,
            .global_batch = 16,
            .sequence_length = 128,
            .save_every_steps = 4,
            .hidden = 96,
            .intermediate = 260};
  }
  // Another daemon that says that it is w0.
  std::unique_ptr<ChildProcess> StartTwin(
      const std::string& work_dir,
      const std::string& on_fatal,
      const std::map<std::string, std::string>& environment = {}) {
    absl::StatusOr<std::unique_ptr<ChildProcess>> twin =
        ChildProcess::Start({.arguments = {BinaryPath("ravel-worker"),
                                           "--dev-loopback",
                                           "--coordinator",
                                           cluster_->address(),
                                           "--node-id",
                                           "w0",
                                           "--work-dir",
                                           work_dir,
                                           "--on-fatal",
                                           on_fatal},
                             .environment = environment,
                             .output_path = Log(),
                             .error_path = Log()});
    EXPECT_TRUE(twin.ok()) << twin.status();
    return *std::move(twin);
  }
  std::string Log() const { return cluster_->folder() + "/twin.log"; }

  std::unique_ptr<MiniCluster> cluster_;
};

TEST_F(OperatorVerbsTest, OfTwoDaemonsOfOneNameTheLiveOneWins) {
  cluster_->HoldTrainersAt(3);
  ASSERT_EQ(cluster_->Submit(Job("job")), absl::OkStatus());
  ASSERT_EQ(cluster_->WaitForStep("job", 2, seconds(60)), absl::OkStatus());
  for (int i = 0; i < 2; ++i) {  // its supervisor starts it again
    EXPECT_EQ(StartTwin(cluster_->folder() + "/twin", "exit")->Wait(seconds(60)), 93);
  }
  EXPECT_THAT(ReadText(Log()), HasSubstr("another daemon is node w0"));
  EXPECT_EQ(StartTwin(cluster_->folder() + "/w0", "exit")->Wait(seconds(60)), 93);
  EXPECT_THAT(ReadText(Log()), HasSubstr("another ravel-worker runs in this folder"));
  const std::unique_ptr<ChildProcess> parked = StartTwin(cluster_->folder() + "/twin", "park");
  EXPECT_TRUE(
      Eventually(seconds(60), [&] { return ReadText(Log()).find("parked") != std::string::npos; }));
  cluster_->LetTrainersGo();
  parked->Signal(SIGHUP);  // the terminal is closed: that ends nothing
  ASSERT_EQ(cluster_->WaitForSuccess("job", seconds(60)), absl::OkStatus());
  EXPECT_EQ(cluster_->Get("job")->epoch, 2) << "1, and what is past its end";
  EXPECT_TRUE(parked->Running());
  parked->Signal(SIGTERM);
  EXPECT_EQ(parked->Wait(seconds(30)), 0);
}

TEST_F(OperatorVerbsTest, AKilledDaemonMayComeBackAtOnce) {
  cluster_->HoldTrainersAt(7);
  ASSERT_EQ(cluster_->Submit(Job("job")), absl::OkStatus());
  ASSERT_EQ(cluster_->WaitForStep("job", 6, seconds(60)), absl::OkStatus());
  cluster_->KillWorker("w0");
  cluster_->LetTrainersGo();
  ASSERT_EQ(cluster_->StartWorker("w0"), absl::OkStatus());
  ASSERT_EQ(cluster_->WaitForSuccess("job", seconds(60)), absl::OkStatus());
}

// An environment alone breaks nothing: --enable-faults is not given.
TEST_F(OperatorVerbsTest, FaultsHappenOnlyWhereTheyAreEnabled) {
  cluster_->KillWorker("w0");
  const std::unique_ptr<ChildProcess> plain =
      StartTwin(cluster_->folder() + "/plain", "exit", {{"RAVEL_FAULTS", "trainer.step@2:exit=3"}});
  ASSERT_EQ(cluster_->Submit(Job("job")), absl::OkStatus());
  ASSERT_EQ(cluster_->WaitForSuccess("job", seconds(60)), absl::OkStatus());
  EXPECT_EQ(cluster_->Get("job")->restarts, 0);
  EXPECT_THAT(ReadText(Log()), HasSubstr("RAVEL_FAULTS is set and ignored"));
}

TEST_F(OperatorVerbsTest, ANamespaceOfTheCommandLineIsThatOfAFileWithoutOne) {
  TinyJob job = Job("job");
  job.steps = 2;
  const std::string file = cluster_->folder() + "/job.yaml";
  WriteText(file, ToYaml(job));
  const RunResult submitted = cluster_->Ctl({"-n", "other", "submit", "-f", file});
  ASSERT_EQ(submitted.exit_code, 0) << submitted.err;
  EXPECT_THAT(submitted.out, HasSubstr("other/job"));
  EXPECT_EQ(
      cluster_->Ctl({"-n", "other", "wait", "job", "--for=done", "--timeout", "60s"}).exit_code, 0);
  EXPECT_EQ(cluster_->Ctl({"get", "job"}).exit_code, 3) << "it is not in the namespace default";
  WriteText(file,
            absl::StrReplaceAll(ToYaml(job), {{"metadata: {", "metadata: {namespace: third, "}}));
  const RunResult contradicted = cluster_->Ctl({"-n", "other", "submit", "-f", file});
  EXPECT_EQ(contradicted.exit_code, 2);
  EXPECT_THAT(contradicted.err, HasSubstr("metadata.namespace: expected \"other\""));

  // A script reads a document after a change, which says what was done to each job.
  const RunResult gone = cluster_->Ctl({"-n", "other", "delete", "job", "nobody", "-o", "json"});
  EXPECT_EQ(gone.exit_code, 3);
  const absl::StatusOr<json::Value> document = json::Parse(gone.out);
  ASSERT_TRUE(document.ok()) << gone.out;
  const json::Array& items = document->Find("items")->AsArray();
  ASSERT_EQ(items.size(), 2u);
  EXPECT_TRUE(items[0].Find("deleted")->AsBool());
  EXPECT_TRUE(items[0].Find("accepted")->AsBool());
  EXPECT_FALSE(items[1].Find("deleted")->AsBool());
  EXPECT_FALSE(items[1].Find("accepted")->AsBool());
  EXPECT_THAT(items[1].Find("message")->AsString(), HasSubstr("nobody"));
}

TEST_F(OperatorVerbsTest, AFailedJobIsTriedAgainFromItsNewestCommit) {
  TinyJob job = Job("job");
  job.max_failures = 0;
  cluster_->HoldTrainersAt(11);
  ASSERT_EQ(cluster_->Submit(job), absl::OkStatus());
  ASSERT_EQ(cluster_->WaitForStep("job", 10, seconds(60)), absl::OkStatus());
  ASSERT_TRUE(Eventually(seconds(60), [&] {
    const absl::StatusOr<JobView> view = cluster_->Get("job");
    return view.ok() && view->committed_step == 8;
  })) << cluster_->Report("job");
  for (const pid_t trainer : cluster_->AllTrainers()) {
    ::kill(trainer, SIGKILL);
  }
  ASSERT_TRUE(cluster_->WaitForEnd("job", seconds(60)).ok());
  cluster_->LetTrainersGo();
  EXPECT_EQ(cluster_->Get("job")->state, "FAILED");
  EXPECT_EQ(cluster_->Get("job")->reason, "BudgetExhausted");
  const RunResult retried = cluster_->Ctl({"retry", "job"});
  EXPECT_EQ(retried.exit_code, 0) << retried.err;
  ASSERT_EQ(cluster_->WaitForSuccess("job", seconds(60)), absl::OkStatus());
  const absl::StatusOr<std::vector<StepRow>> history = cluster_->Metrics("job");
  ASSERT_TRUE(history.ok()) << history.status();
  ASSERT_EQ(history->size(), 60U);
  EXPECT_EQ(history->front().attempt, 1) << "what was committed is not trained again";
  EXPECT_EQ(history->back().attempt, 2);
  EXPECT_EQ(cluster_->Ctl({"retry", "job"}).exit_code, 4) << "it has succeeded";
}

TEST_F(OperatorVerbsTest, ADrainedNodeGetsNoWorkUntilItIsUndrained) {
  const RunResult drained = cluster_->Ctl({"nodes", "drain", "w0", "--reason", "new disk"});
  EXPECT_EQ(drained.exit_code, 0) << drained.err;
  EXPECT_THAT(cluster_->Ctl({"nodes", "list"}).out, HasSubstr("drained: new disk"));
  ASSERT_EQ(cluster_->Submit(Job("job")), absl::OkStatus());
  cluster_->KillCoordinator();
  ASSERT_EQ(cluster_->RestartCoordinator(), absl::OkStatus());
  EXPECT_TRUE(Eventually(seconds(60), [&] {
    return cluster_->Ctl({"nodes", "list"}).out.find("DRAINED") != std::string::npos;
  })) << cluster_->Ctl({"nodes", "list"}).out;
  EXPECT_EQ(cluster_->Get("job")->state, "QUEUED");
  EXPECT_EQ(cluster_->Ctl({"nodes", "release", "w0"}).exit_code, 4) << "it is not quarantined";
  EXPECT_EQ(cluster_->Ctl({"nodes", "undrain", "w0"}).exit_code, 0);
  ASSERT_EQ(cluster_->WaitForSuccess("job", seconds(60)), absl::OkStatus());
  EXPECT_EQ(cluster_->Ctl({"nodes", "drain", "w9"}).exit_code, 3);
}

}  // namespace
}  // namespace ravel::testing
