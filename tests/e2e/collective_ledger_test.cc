// A rank that stops before a collective, one that never issues its next, and one whose program has
// two collectives exchanged: named within seconds, and a failure like any other.

#include <chrono>
#include <csignal>
#include <memory>
#include <regex>
#include <string>
#include <vector>

#include <absl/strings/str_cat.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/testing/eventually.h"
#include "tests/testing/mini_cluster.h"

namespace ravel::testing {
namespace {

using std::chrono::seconds;
using SteadyClock = std::chrono::steady_clock;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr double kMostSeconds = 5;

class CollectiveLedgerTest : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    absl::StatusOr<std::unique_ptr<MiniCluster>> started = MiniCluster::Start();
    ASSERT_TRUE(started.ok()) << started.status();
    cluster_ = std::move(*started);
    WriteTokens(cluster_->folder() + "/tokens.bin", 100000, TinyJob().vocabulary);
  }

  // Three workers; `faults` for the trainers of w1.
  void StartWorkers(const std::string& faults) {
    ASSERT_EQ(cluster_->StartWorker("w0"), absl::OkStatus());
    ASSERT_EQ(cluster_->StartWorker("w1", {{"RAVEL_FAULTS", faults}}), absl::OkStatus());
    ASSERT_EQ(cluster_->StartWorker("w2"), absl::OkStatus());
    ASSERT_EQ(cluster_->WaitForReadyNodes(3), absl::OkStatus());
  }

  TinyJob Job(int64_t most_failures) const {
    TinyJob job = {.name = "job",
                   .tokens_path = cluster_->folder() + "/tokens.bin",
                   .store = cluster_->folder() + "/store",
                   .workers = 3,
                   .steps = 60,
                   .global_batch = 16,
                   .sequence_length = 128,
                   .save_every_steps = 4,
                   .transport = GetParam(),
                   .hidden = 96,
                   .intermediate = 260};
    job.max_failures = most_failures;
    return job;
  }

  // Waits for an event that says this; how long that took since `start`, and its line.
  double SecondsTo(const std::string& words, SteadyClock::time_point start, std::string* line) {
    Eventually(seconds(30), [&] {
      std::smatch found;
      const std::string events = cluster_->Ctl({"events", "job"}).out;
      const bool failed =
          std::regex_search(events,
                            found,
                            std::regex("[^\n]*EpochChanged[^\n]*" + words +
                                       "[^\n]*|[^\n]*Recovering[^\n]*" + words + "[^\n]*"));
      *line = failed ? found[0].str() : "";
      return failed;
    });
    return std::chrono::duration<double>(SteadyClock::now() - start).count();
  }

  std::string Events() const { return cluster_->Ctl({"events", "job"}).out; }

  std::unique_ptr<MiniCluster> cluster_;
};

constexpr char kLate[] =
    "rank [0-9] has not issued [a-z_ ]+ #[0-9]+ \\([A-Za-z]+ of [a-z0-9._]+, .*\\) of step [0-9]+ "
    "in "
    "group .*; ranks? [0-9,]+ waits? since [0-9.]+ s";

TEST_P(CollectiveLedgerTest, StoppedRankIsNamedWithWhatItHasNotIssued) {
  StartWorkers("");
  ASSERT_EQ(cluster_->Submit(Job(10)), absl::OkStatus());
  ASSERT_EQ(cluster_->WaitForStep("job", 6, seconds(60)), absl::OkStatus());
  const std::vector<pid_t> trainers = cluster_->Trainers("w1");
  ASSERT_EQ(trainers.size(), 1u);
  ASSERT_EQ(::kill(trainers[0], SIGSTOP), 0);
  std::string line;
  EXPECT_LT(SecondsTo("has not issued", SteadyClock::now(), &line), kMostSeconds) << Events();
  EXPECT_THAT(line, ContainsRegex(kLate)) << Events();
  EXPECT_THAT(line, HasSubstr("w1"));
  // The daemon has ended the stopped process, and the job goes on.
  EXPECT_EQ(cluster_->WaitForSuccess("job", seconds(60)), absl::OkStatus());
}

TEST_P(CollectiveLedgerTest, RankThatNeverIssuesItsNextCollectiveIsNamed) {
  StartWorkers("comm.issue@700:stall=600s");
  ASSERT_EQ(cluster_->Submit(Job(0)), absl::OkStatus());
  // Steps are some milliseconds: the newest one is when the stall began.
  SteadyClock::time_point newest = SteadyClock::now();
  int64_t step = -1;
  absl::StatusOr<JobView> view;
  Eventually(seconds(60), [&] {
    view = cluster_->Get("job");
    if (view.ok() && view->step > step) {
      step = view->step;
      newest = SteadyClock::now();
    }
    return std::regex_search(Events(), std::regex(kLate));
  });
  const double took = std::chrono::duration<double>(SteadyClock::now() - newest).count();
  EXPECT_GT(step, 0);
  EXPECT_LT(took, kMostSeconds) << Events();
  EXPECT_THAT(Events(), ContainsRegex(kLate));
  EXPECT_THAT(Events(), HasSubstr("Stall"));
  // One witness ends nothing: the rank may be slow.
  ASSERT_TRUE(view.ok());
  EXPECT_EQ(view->state, "RUNNING") << Events();
  EXPECT_THAT(Events(), Not(HasSubstr("EpochChanged"))) << Events();
  EXPECT_EQ(cluster_->Ctl({"cancel", "job"}).exit_code, 0);
}

void ExpectSwapIsNamed(const std::string& events) {
  EXPECT_THAT(events, HasSubstr("CollectiveMismatch")) << events;
}

TEST_P(CollectiveLedgerTest, TwoSwappedGathersAreNamedOnBothRanks) {
  StartWorkers("plan.swap:error=same");
  const auto start = SteadyClock::now();
  ASSERT_EQ(cluster_->Submit(Job(0)), absl::OkStatus());
  std::string line;
  EXPECT_LT(SecondsTo("CollectiveMismatch", start, &line), kMostSeconds) << Events();
  ExpectSwapIsNamed(Events());
  EXPECT_THAT(line,
              ContainsRegex("rank [0-9] issued all_gather.* \\(Gather of embed.*rank [0-9] issued "
                            "all_gather.* \\(Gather of layers.0|rank [0-9] issued all_gather.* "
                            "\\(Gather of layers.0.*rank [0-9] issued all_gather.* \\(Gather of "
                            "embed"))
      << Events();
}

// Between ranks of one host weights are gathered long before anything is reduced; there the whole
// gradients of no_shard are gathered right after.
TEST_P(CollectiveLedgerTest, GatherAndReduceThatAreSwappedAreNamed) {
  const bool shared_memory = std::string(GetParam()) == "shm";
  StartWorkers(shared_memory ? "plan.swap:error=same" : "plan.swap:error=other");
  TinyJob job = Job(0);
  job.parallelism = shared_memory ? "strategy: no_shard" : "";
  const auto start = SteadyClock::now();
  ASSERT_EQ(cluster_->Submit(job), absl::OkStatus());
  std::string line;
  EXPECT_LT(SecondsTo("CollectiveMismatch", start, &line), kMostSeconds) << Events();
  ExpectSwapIsNamed(Events());
  EXPECT_THAT(line, HasSubstr(shared_memory ? "(GatherGradient of " : "(Gather of "));
  EXPECT_THAT(line, HasSubstr("(ReduceScatter of "));
}

INSTANTIATE_TEST_SUITE_P(Transports,
                         CollectiveLedgerTest,
                         ::testing::Values("shm", "gloo"),
                         [](const auto& test) { return test.param; });

}  // namespace
}  // namespace ravel::testing
