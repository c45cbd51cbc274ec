// Jobs name paths that coordinators, daemons and trainers open: with roots on the nodes and of the
// namespaces, no job reads or writes elsewhere, by no text and by no symbolic link, and no answer
// tells what lies elsewhere. Exit codes are those of ravelctl: 2 refused, 3 not found.

#include <algorithm>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_replace.h>
#include <gtest/gtest.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "tests/testing/eventually.h"
#include "tests/testing/mini_cluster.h"
#include "tests/testing/required.h"

namespace ravel::testing {
namespace {

using std::chrono::seconds;
namespace fs = std::filesystem;

bool KernelHasLandlock() {
  return syscall(SYS_landlock_create_ruleset, nullptr, 0, 1) >= 1;
}

class PathRootsE2eTest : public ::testing::Test {
 protected:
  void SetUp() override {
    absl::StatusOr<std::unique_ptr<MiniCluster>> started =
        MiniCluster::Start({}, kPatientDetection);
    ASSERT_TRUE(started.ok()) << started.status();
    cluster_ = *std::move(started);
    for (const char* folder : {"data", "stores/default", "stores/team-b", "outside"}) {
      fs::create_directories(At(folder));
    }
    WriteTokens(At("data/tokens.bin"), 5000, TinyJob().vocabulary);
    WriteTokens(At("outside/tokens.bin"), 5000, TinyJob().vocabulary);
    cluster_->SetWorkerFlags({"--read-root", At("data"), "--write-root", At("stores")});
  }

  // The coordinator once more, with roots of namespaces.
  void RestrictNamespaces() {
    WriteText(At("roots.yaml"),
              absl::StrCat("namespaces:\n  default: {read: [",
                           At("data"),
                           "], write: [",
                           At("stores/default"),
                           ", 'ravel://127.0.0.1:9/default']}\n  team-b: {read: [",
                           At("data"),
                           "], write: [",
                           At("stores/team-b"),
                           "]}\n"));
    cluster_->SetCoordinatorFlags({"--namespace-roots", At("roots.yaml")});
    cluster_->KillCoordinator();
    ASSERT_EQ(cluster_->RestartCoordinator(), absl::OkStatus());
  }
  std::string At(const std::string& rest) const { return cluster_->folder() + "/" + rest; }
  TinyJob Job(const std::string& name) const {
    return {.name = name,
            .tokens_path = At("data/tokens.bin"),
            .store = At("stores/default"),
            .workers = 1,
            .steps = 5};
  }
  RunResult Submit(const std::string& text) const {
    WriteText(At("job.yaml"), text);
    return cluster_->Ctl({"submit", "-f", At("job.yaml")});
  }
  // Refused with exit code 2, naming the field; nothing is stored.
  void ExpectRefused(const TinyJob& job, const std::string& field) const {
    const RunResult result = Submit(ToYaml(job));
    EXPECT_EQ(result.exit_code, 2) << field << result.out << result.err;
    EXPECT_TRUE(absl::StrContains(result.err, field)) << "no " << field << " in " << result.err;
    EXPECT_EQ(cluster_->Ctl({"get", job.name}).exit_code, 3) << field;
  }
  std::vector<std::string> NamesIn(const std::string& folder) const {
    std::vector<std::string> names;
    for (const auto& entry : fs::recursive_directory_iterator(At(folder))) {
      names.push_back(entry.path().filename());
    }
    return names;
  }

  std::unique_ptr<MiniCluster> cluster_;
};

TEST_F(PathRootsE2eTest, AJobOutsideOfItsNamespacesRootsIsRefusedByItsField) {
  RestrictNamespaces();
  ASSERT_EQ(cluster_->StartWorkers(1), absl::OkStatus());
  TinyJob job = Job("data");
  job.tokens_path = At("outside/tokens.bin");
  ExpectRefused(job, "spec.data.train[0].path");
  job.tokens_path = At("data/../outside/tokens.bin");
  ExpectRefused(job, "spec.data.train[0].path");
  job = Job("store");
  job.store = At("outside/store");
  ExpectRefused(job, "spec.checkpoint.store");
  job.store = "ravel://127.0.0.1:9/team-b";
  ExpectRefused(job, "spec.checkpoint.store");
  job = Job("model");
  job.model_from = "/etc";
  ExpectRefused(job, "spec.model.from");
  job = Job("start");
  job.resume_from = At("outside/step-0000000005");
  ExpectRefused(job, "spec.checkpoint.resumeFrom");
  job = Job("trace");
  job.more_spec = absl::StrCat(
      "  observability: {trace: {firstStep: 1, lastStep: 2, directory: ", At("data/trace"), "}}\n");
  ExpectRefused(job, "spec.observability.trace.directory");
  job = Job("link");
  fs::create_symlink("../../outside", At("stores/default/link"));
  job.store = At("stores/default/link");
  ExpectRefused(job, "spec.checkpoint.store");
  EXPECT_EQ(NamesIn("outside"), std::vector<std::string>({"tokens.bin"}));
  EXPECT_FALSE(fs::exists(At("data/trace")));
}

TEST_F(PathRootsE2eTest, TwoNamespacesCannotUseEachOthersStores) {
  RestrictNamespaces();
  ASSERT_EQ(cluster_->StartWorkers(1), absl::OkStatus());
  ASSERT_EQ(cluster_->Submit(Job("first")), absl::OkStatus());
  ASSERT_EQ(cluster_->WaitForSuccess("first", seconds(60)), absl::OkStatus());
  const auto steps = cluster_->Checkpoints("first");
  ASSERT_TRUE(steps.ok() && !steps->empty()) << steps.status();
  const auto in_team_b = [&](TinyJob job) {
    const std::string name = "name: " + job.name;
    return Submit(absl::StrReplaceAll(ToYaml(job), {{name, name + ", namespace: team-b"}}));
  };
  TinyJob job = Job("second");
  const RunResult store = in_team_b(job);
  EXPECT_EQ(store.exit_code, 2);
  EXPECT_TRUE(absl::StrContains(store.err, "spec.checkpoint.store")) << store.err;
  job.store = At("stores/team-b");
  job.resume_from = steps->rbegin()->second;
  const RunResult start = in_team_b(job);
  EXPECT_EQ(start.exit_code, 2);
  EXPECT_TRUE(absl::StrContains(start.err, "spec.checkpoint.resumeFrom")) << start.err;
  EXPECT_EQ(cluster_->Ctl({"get", "second", "-n", "team-b"}).exit_code, 3);
  EXPECT_TRUE(NamesIn("stores/team-b").empty());
  job.resume_from.clear();
  const RunResult own = in_team_b(job);
  EXPECT_EQ(own.exit_code, 0) << own.err;
}

TEST_F(PathRootsE2eTest, ANodesAnswerTellsNothingOfWhatLiesOutside) {
  ASSERT_EQ(cluster_->StartWorkers(1), absl::OkStatus());
  fs::create_symlink("../outside/tokens.bin", At("data/link.bin"));
  fs::create_symlink("../outside/absent.bin", At("data/nothing.bin"));
  const auto told = [&](const std::string& path) {
    TinyJob job = Job("look");
    job.tokens_path = At(path);
    const RunResult result = Submit(ToYaml(job));
    EXPECT_EQ(result.exit_code, 2) << path << result.out << result.err;
    EXPECT_TRUE(absl::StrContains(result.err, "spec.data.train[0].path")) << result.err;
    return absl::StrReplaceAll(result.err, {{job.tokens_path, "PATH"}});
  };
  EXPECT_EQ(told("outside/tokens.bin"), told("outside/absent.bin"));
  EXPECT_EQ(told("data/link.bin"), told("data/nothing.bin"));
  TinyJob job = Job("look");
  job.model_from = "/root";
  const RunResult model = Submit(ToYaml(job));
  EXPECT_EQ(model.exit_code, 2);
  EXPECT_TRUE(absl::StrContains(model.err, "spec.model.from")) << model.err;
}

TEST_F(PathRootsE2eTest, ANodeRefusesALinkThatLeadsOutAtTheLaunch) {
  ASSERT_EQ(cluster_->StartWorkers(1), absl::OkStatus());
  fs::create_symlink("../outside", At("stores/link"));
  TinyJob job = Job("trace");
  job.max_failures = 0;
  job.more_spec = absl::StrCat("  observability: {trace: {firstStep: 1, lastStep: 2, directory: ",
                               At("stores/link/trace"),
                               "}}\n");
  ASSERT_EQ(cluster_->Submit(job), absl::OkStatus());
  const absl::StatusOr<JobView> end = cluster_->WaitForEnd("trace", seconds(60));
  ASSERT_TRUE(end.ok()) << end.status() << cluster_->Report("trace");
  EXPECT_EQ(end->state, "FAILED");
  EXPECT_TRUE(absl::StrContains(end->message, "observability.trace.directory")) << end->message;
  EXPECT_TRUE(absl::StrContains(end->message, "symbolic link")) << end->message;
  EXPECT_TRUE(EntriesUnder(At("w0/logs")).empty()) << "a trainer was started";
  EXPECT_EQ(NamesIn("outside"), std::vector<std::string>({"tokens.bin"}));
}

TEST_F(PathRootsE2eTest, ATrainerLooksAgainWhenItStarts) {
  ASSERT_EQ(cluster_->StartWorkers(1, cluster_->HoldFaults()), absl::OkStatus());
  cluster_->HoldTrainersAt(3);
  TinyJob job = Job("swapped");
  job.max_failures = 1;
  ASSERT_EQ(cluster_->Submit(job), absl::OkStatus());
  ASSERT_EQ(cluster_->WaitForStep("swapped", 2, seconds(60)), absl::OkStatus());
  fs::rename(At("data/tokens.bin"), At("data/tokens.old"));
  fs::create_symlink("../outside/tokens.bin", At("data/tokens.bin"));
  for (const pid_t trainer : cluster_->AllTrainers()) {
    kill(trainer, SIGKILL);
  }
  cluster_->LetTrainersGo();
  const absl::StatusOr<JobView> end = cluster_->WaitForEnd("swapped", seconds(60));
  ASSERT_TRUE(end.ok()) << end.status() << cluster_->Report("swapped");
  EXPECT_EQ(end->state, "FAILED");
  EXPECT_TRUE(absl::StrContains(end->message, "data.train[0].path")) << end->message;
}

// Between the looks and the opens the kernel stands, where it has Landlock.
TEST_F(PathRootsE2eTest, ALinkThatIsExchangedWhileATrainerRunsLeadsNowhere) {
  ASSERT_EQ(cluster_->StartWorkers(1, cluster_->HoldFaults()), absl::OkStatus());
  if (fs::exists("/dev/nvidiactl")) {
    GTEST_SKIP() << "daemons beside NVIDIA devices are not confined by themselves";
  }
  if (!KernelHasLandlock()) {
    SkipWithout("landlock", "this kernel offers no Landlock");
    return;
  }
  cluster_->HoldTrainersAt(3);
  TinyJob job = Job("exchanged");
  job.steps = 5;
  ASSERT_EQ(cluster_->Submit(job), absl::OkStatus());
  ASSERT_EQ(cluster_->WaitForStep("exchanged", 2, seconds(60)), absl::OkStatus());
  fs::copy(At("stores/default"), At("outside/stolen"), fs::copy_options::recursive);
  const std::vector<std::string> before = NamesIn("outside");
  fs::rename(At("stores/default"), At("stores/moved"));
  fs::create_symlink("../outside/stolen", At("stores/default"));
  cluster_->LetTrainersGo();
  const bool refused = Eventually(seconds(60), [&] {
    const auto events = cluster_->Events("exchanged");
    return events.ok() && std::any_of(events->begin(), events->end(), [](const EventRow& event) {
             return absl::StrContains(event.message, "Permission denied");
           });
  });
  EXPECT_TRUE(refused) << cluster_->Report("exchanged");
  EXPECT_EQ(NamesIn("outside").size(), before.size()) << "a trainer has written outside";
}

TEST_F(PathRootsE2eTest, BeneathTheRootsJobsOfSeveralNodesTrainAsEver) {
  RestrictNamespaces();
  ASSERT_EQ(cluster_->StartWorkers(2), absl::OkStatus());
  TinyJob job = Job("good");
  job.workers = 2;
  job.steps = 10;
  job.more_spec = absl::StrCat("  observability: {trace: {firstStep: 1, lastStep: 2, directory: ",
                               At("stores/default/trace"),
                               "}}\n");
  ASSERT_EQ(cluster_->Submit(job), absl::OkStatus());
  EXPECT_EQ(cluster_->WaitForSuccess("good", seconds(60)), absl::OkStatus());
}

TEST_F(PathRootsE2eTest, ProgramsDoNotStartWithRootsThatAreNone) {
  WriteText(At("bad.yaml"), "namespaces:\n  default: {reed: [/data]}\n");
  const RunResult coordinator = RunProgram({.arguments = {BinaryPath("ravel-coordinator"),
                                                          "--dev-loopback",
                                                          "--listen",
                                                          "127.0.0.1:0",
                                                          "--state-dir",
                                                          At("other-state"),
                                                          "--namespace-roots",
                                                          At("bad.yaml")}},
                                           cluster_->folder(),
                                           seconds(30));
  EXPECT_EQ(coordinator.exit_code, 2);
  EXPECT_TRUE(absl::StrContains(coordinator.out + coordinator.err, "bad.yaml:2:13: expected read"))
      << coordinator.out << coordinator.err;
  fs::create_directories(At("other/below"));
  fs::create_symlink("..", At("data/up"));
  // No path, no folder, and folders that hold the node's key or lie beside it, by a link as well.
  for (const std::string& root : {std::string("data"),
                                  At("absent"),
                                  At("other"),
                                  cluster_->folder(),
                                  At("data/up"),
                                  At("other/below")}) {
    const RunResult worker = RunProgram({.arguments = {BinaryPath("ravel-worker"),
                                                       "--dev-loopback",
                                                       "--node-id",
                                                       "other",
                                                       "--work-dir",
                                                       At("other"),
                                                       "--read-root",
                                                       root}},
                                        cluster_->folder(),
                                        seconds(30));
    EXPECT_EQ(worker.exit_code, 93) << root << worker.err;
    EXPECT_TRUE(absl::StrContains(worker.err, "--read-root")) << worker.err;
  }
}

}  // namespace
}  // namespace ravel::testing
