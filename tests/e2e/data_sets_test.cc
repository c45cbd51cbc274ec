// Data that is in a store alone, by real processes: pushed by ravelctl, fetched by daemons that
// share no folder of it, while daemon, store and bytes fail.

#include <chrono>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_replace.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/testing/eventually.h"
#include "tests/testing/mini_cluster.h"
#include "tests/testing/store_process.h"

namespace ravel::testing {
namespace {

using std::chrono::seconds;
using ::testing::HasSubstr;
namespace fs = std::filesystem;

class DataSetsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    absl::StatusOr<std::unique_ptr<MiniCluster>> started =
        MiniCluster::Start({}, kPatientDetection);
    ASSERT_TRUE(started.ok()) << started.status();
    cluster_ = std::move(*started);
    store_ = std::make_unique<StoreProcess>(
        StorePlace{.folder = cluster_->folder() + "/server", .flags = {"--dev-loopback"}});
    ASSERT_EQ(store_->Start(), absl::OkStatus());
    Prepare();
  }
  std::string Local(const std::string& name) const { return cluster_->folder() + "/" + name; }
  // `first`: other text of the same length.
  void Prepare(int first = 0) const {
    std::string text;
    for (int line = 0; line < 600; ++line) {
      absl::StrAppend(
          &text, "line ", line * line, " of a text to learn ", (line + first) % 10, "\n");
    }
    WriteText(Local("text"), text);
    const RunResult prepared = cluster_->Ctl({"data",
                                              "prepare",
                                              "--input",
                                              Local("text"),
                                              "--output",
                                              Local("web"),
                                              "--document-separator",
                                              "\\n",
                                              "--validation-fraction",
                                              "0.1"});
    ASSERT_EQ(prepared.exit_code, 0) << prepared.err;
  }
  RunResult Push(const std::string& to) const {
    return cluster_->Ctl({"data", "push", Local("web"), store_->Url(to), "-o", "json"});
  }
  // After it nobody has the data but the store.
  void PushAndForget() const {
    const RunResult pushed = Push("sets/web");
    ASSERT_EQ(pushed.exit_code, 0) << pushed.err;
    EXPECT_THAT(pushed.out, HasSubstr(store_->Url("sets/web/web.validation")));
    for (const char* end :
         {".bin", ".idx", ".tokenizer.json", ".validation.bin", ".validation.idx"}) {
      fs::remove(Local(std::string("web") + end));
    }
  }
  TinyJob Job(const std::string& name, const std::string& data, int64_t workers = 2) const {
    return {.name = name,
            .tokens_path = data,
            .store = cluster_->folder() + "/steps",
            .workers = workers,
            .steps = 12,
            .save_every_steps = 4,
            .vocabulary = 257};
  }
  // Token files have an index, and the job evaluates.
  std::string Yaml(const TinyJob& job) const {
    return absl::StrReplaceAll(
        ToYaml(job),
        {{"    format: flat_u16\n",
          absl::StrCat("    validation: [{path: \"", job.tokens_path, ".validation\"}]\n")},
         {"    seed: ", "    evaluation: {every: 6, batches: 1}\n    seed: "}});
  }
  RunResult Submit(const TinyJob& job) const {
    WriteText(Local(job.name + ".yaml"), Yaml(job));
    return cluster_->Ctl({"submit", "-f", Local(job.name + ".yaml")});
  }
  std::vector<StepRow> Train(const TinyJob& job) const {
    const RunResult submitted = Submit(job);
    EXPECT_EQ(submitted.exit_code, 0) << submitted.err;
    EXPECT_EQ(cluster_->WaitForSuccess(job.name, seconds(60)), absl::OkStatus());
    return cluster_->Metrics(job.name).value_or(std::vector<StepRow>());
  }
  // Entries of a folder of a daemon's cache.
  int Cached(const std::string& worker, const std::string& folder) const {
    std::error_code error;
    const fs::directory_iterator found(Local(worker) + "/data/" + folder, error);
    return error ? -1 : static_cast<int>(std::distance(fs::begin(found), fs::end(found)));
  }
  bool Happened(const std::string& job, const std::string& reason) const {
    const auto events = cluster_->Events(job);
    return events.ok() && std::any_of(events->begin(), events->end(), [&](const EventRow& event) {
             return event.reason == reason || absl::StrContains(event.message, reason);
           });
  }

  std::unique_ptr<MiniCluster> cluster_;
  std::unique_ptr<StoreProcess> store_;
};

TEST_F(DataSetsTest, AJobTrainsFromTheStoreAsItDoesFromFiles) {
  ASSERT_EQ(cluster_->StartWorkers(2), absl::OkStatus());
  const std::vector<StepRow> local = Train(Job("local", Local("web")));
  ASSERT_EQ(local.size(), 12u);
  PushAndForget();
  EXPECT_EQ(FirstDifference(Train(Job("far", store_->Url("sets/web/web"))), local), "");
  for (const char* worker : {"w0", "w1"}) {
    EXPECT_EQ(Cached(worker, "sets"), 1) << worker;
    EXPECT_EQ(Cached(worker, "partial"), 0) << worker;
  }
  // The tokenizer beside the data is in the step; the model goes the same way.
  const std::string step = cluster_->Checkpoints("far")->at(12);
  EXPECT_TRUE(fs::exists(step + "/hf/tokenizer.json"));
  const RunResult exported =
      cluster_->Ctl({"checkpoints", "export", step, "--output-dir", Local("model")});
  ASSERT_EQ(exported.exit_code, 0) << exported.err;
  TinyJob next = Job("next-local", store_->Url("sets/web/web"));
  next.model_from = Local("model");
  const std::vector<StepRow> from_folder = Train(next);
  const RunResult pushed =
      cluster_->Ctl({"data", "push", "--model", Local("model"), store_->Url("models/tiny")});
  ASSERT_EQ(pushed.exit_code, 0) << pushed.err;
  fs::remove_all(Local("model"));
  next.name = "next-far";
  next.model_from = store_->Url("models/tiny");
  EXPECT_EQ(FirstDifference(Train(next), from_folder), "");
  EXPECT_EQ(Cached("w0", "sets"), 2);
}

TEST_F(DataSetsTest, ADaemonThatIsKilledInAFetchGoesOnWithIt) {
  PushAndForget();
  ASSERT_EQ(cluster_->StartWorker("w0", {{"RAVEL_FAULTS", "data_fetch.piece@3:kill"}}),
            absl::OkStatus());
  ASSERT_EQ(cluster_->StartWorker("w1"), absl::OkStatus());
  ASSERT_EQ(cluster_->WaitForReadyNodes(2), absl::OkStatus());
  const RunResult submitted = Submit(Job("far", store_->Url("sets/web/web")));
  ASSERT_EQ(submitted.exit_code, 0) << submitted.err;
  ASSERT_TRUE(Eventually(seconds(30), [&] { return !cluster_->Worker("w0").Running(); }));
  EXPECT_EQ(Cached("w0", "sets"), 0);
  ASSERT_EQ(Cached("w0", "partial"), 1);
  std::string first;
  for (const auto& entry : fs::recursive_directory_iterator(Local("w0") + "/data/partial")) {
    first = entry.path().extension() == ".bin" ? entry.path().string() : first;
  }
  ASSERT_FALSE(first.empty());
  const auto inode_time = fs::last_write_time(first);
  // Now it is the store that is away when the daemon comes back.
  store_->Kill();
  ASSERT_EQ(cluster_->StartWorker("w0"), absl::OkStatus());
  ASSERT_EQ(store_->Start(), absl::OkStatus());
  ASSERT_EQ(cluster_->WaitForSuccess("far", seconds(60)), absl::OkStatus());
  EXPECT_EQ(Cached("w0", "sets"), 1);
  EXPECT_EQ(Cached("w0", "partial"), 0);
  bool kept = false;
  for (const auto& entry : fs::recursive_directory_iterator(Local("w0") + "/data/sets")) {
    kept = kept || (entry.path().filename() == fs::path(first).filename() &&
                    fs::last_write_time(entry.path()) == inode_time);
  }
  EXPECT_TRUE(kept) << "the file that was whole is not fetched again";
}

TEST_F(DataSetsTest, AFetchThatFailsIsTriedAgainAndWrongBytesEndTheJob) {
  PushAndForget();
  ASSERT_EQ(cluster_->StartWorker("w0", {{"RAVEL_FAULTS", "data_fetch.piece@2:error=cut off"}}),
            absl::OkStatus());
  ASSERT_EQ(cluster_->StartWorker("w1"), absl::OkStatus());
  ASSERT_EQ(cluster_->WaitForReadyNodes(2), absl::OkStatus());
  ASSERT_EQ(Train(Job("far", store_->Url("sets/web/web"))).size(), 12u);
  EXPECT_TRUE(Happened("far", "StoreUnavailable")) << cluster_->Report("far");

  // An absent data set is refused with field and URL, before anything is placed.
  const RunResult absent = Submit(Job("absent", store_->Url("sets/nothing/web")));
  EXPECT_NE(absent.exit_code, 0);
  EXPECT_THAT(absent.err, HasSubstr("spec.data.train[0].path"));
  EXPECT_THAT(absent.err, HasSubstr(store_->Url("sets/nothing")));

  // The same bytes in another place, of which one is wrong.
  fs::create_directories(fs::path(store_->File("sets/bad/web")).parent_path());
  fs::copy(store_->File("sets/web"), store_->File("sets/bad"), fs::copy_options::recursive);
  std::string bytes = ReadText(store_->File("sets/bad/web.bin"));
  bytes[bytes.size() / 2] ^= 1;
  fs::remove(store_->File("sets/bad/web.bin"));
  WriteText(store_->File("sets/bad/web.bin"), bytes);
  const RunResult bad = Submit(Job("bad", store_->Url("sets/bad/web")));
  ASSERT_EQ(bad.exit_code, 0) << bad.err;
  const absl::StatusOr<JobView> ended = cluster_->WaitForEnd("bad", seconds(60));
  ASSERT_TRUE(ended.ok()) << ended.status();
  EXPECT_EQ(ended->state, "FAILED");
  EXPECT_EQ(ended->reason, "DataError");
  EXPECT_THAT(ended->message, HasSubstr("spec.data."));
  EXPECT_THAT(ended->message, HasSubstr(store_->Url("sets/bad/web")));
  EXPECT_THAT(ended->message, HasSubstr("SHA-256"));
}

TEST_F(DataSetsTest, ANodeThatComesLaterFetchesByItself) {
  PushAndForget();
  ASSERT_EQ(cluster_->StartWorkers(2, cluster_->HoldFaults()), absl::OkStatus());
  cluster_->HoldTrainersAt(6);
  const RunResult submitted = Submit(Job("far", store_->Url("sets/web/web")));
  ASSERT_EQ(submitted.exit_code, 0) << submitted.err;
  ASSERT_EQ(cluster_->WaitForStep("far", 5, seconds(60)), absl::OkStatus());
  cluster_->KillWorker("w1");
  ASSERT_EQ(cluster_->StartWorker("w2"), absl::OkStatus());
  cluster_->LetTrainersGo();
  ASSERT_EQ(cluster_->WaitForSuccess("far", seconds(60)), absl::OkStatus());
  EXPECT_EQ(Cached("w2", "sets"), 1);
}

// Data that was replaced under its URL, by as many other ids, is noticed at the next start.
TEST_F(DataSetsTest, ARunGoesOnWithItsOwnDataAlone) {
  PushAndForget();
  ASSERT_EQ(cluster_->StartWorkers(2, cluster_->HoldFaults()), absl::OkStatus());
  cluster_->HoldTrainersAt(6);
  const RunResult submitted = Submit(Job("far", store_->Url("sets/web/web")));
  ASSERT_EQ(submitted.exit_code, 0) << submitted.err;
  ASSERT_EQ(cluster_->WaitForStep("far", 5, seconds(60)), absl::OkStatus());
  fs::remove_all(store_->File("sets/web"));
  Prepare(1);
  PushAndForget();
  cluster_->KillWorker("w1");
  ASSERT_EQ(cluster_->StartWorker("w2"), absl::OkStatus());
  cluster_->LetTrainersGo();
  const absl::StatusOr<JobView> ended = cluster_->WaitForEnd("far", seconds(60));
  ASSERT_TRUE(ended.ok()) << ended.status();
  EXPECT_EQ(ended->state, "FAILED");
  EXPECT_THAT(ended->message, HasSubstr("data.train[0]"));
  EXPECT_THAT(ended->message, HasSubstr("other data cannot go on with this run"));
  // A new job takes the data as it is now.
  EXPECT_EQ(Train(Job("new", store_->Url("sets/web/web"))).size(), 12u);
}

// Fetched data is beneath no root of its jobs: trainers read it, jobs cannot name it.
TEST_F(DataSetsTest, NodesWithRootsReadWhatTheyHaveFetchedAlone) {
  PushAndForget();
  fs::create_directories(Local("steps"));
  cluster_->SetWorkerFlags({"--write-root", Local("steps")});
  ASSERT_EQ(cluster_->StartWorker("w0"), absl::OkStatus());
  ASSERT_EQ(cluster_->WaitForReadyNodes(1), absl::OkStatus());
  // Nothing is fetched for a job that this node may not run.
  TinyJob outside = Job("outside", store_->Url("sets/web/web"), 1);
  outside.store = Local("elsewhere");
  ASSERT_EQ(Submit(outside).exit_code, 0);
  const absl::StatusOr<JobView> ended = cluster_->WaitForEnd("outside", seconds(60));
  ASSERT_TRUE(ended.ok()) << ended.status();
  EXPECT_EQ(ended->reason, "DataError");
  EXPECT_THAT(ended->message, HasSubstr("checkpoint.store"));
  EXPECT_EQ(Cached("w0", "sets"), 0);
  EXPECT_EQ(Cached("w0", "partial"), 0);
  ASSERT_EQ(Train(Job("far", store_->Url("sets/web/web"), 1)).size(), 12u);
  ASSERT_EQ(Cached("w0", "sets"), 1);
  const std::string fetched =
      fs::directory_iterator(Local("w0") + "/data/sets")->path().string() + "/web";
  ASSERT_TRUE(fs::exists(fetched + ".bin"));
  const RunResult named = Submit(Job("named", fetched, 1));
  EXPECT_NE(named.exit_code, 0);
  EXPECT_THAT(named.err, HasSubstr("spec.data.train[0].path"));
  EXPECT_THAT(named.err, HasSubstr("outside of the folders"));
}

}  // namespace
}  // namespace ravel::testing
