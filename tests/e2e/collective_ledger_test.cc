// A rank that stops before a collective, one that never issues its next, and one whose program has
// two collectives exchanged: named within seconds, and a failure like any other.

#include <chrono>
#include <csignal>
#include <memory>
#include <regex>
#include <string>
#include <vector>

#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/clock.h"
#include "tests/testing/eventually.h"
#include "tests/testing/mini_cluster.h"

namespace ravel::testing {
namespace {

using std::chrono::seconds;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;

// As the coordinator's clock and its words have it: what it takes to ask counts for nothing. A rank
// that nothing but its silence names is a stall after a minute.
constexpr double kMostSeconds = 15;

class CollectiveLedgerTest : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    absl::StatusOr<std::unique_ptr<MiniCluster>> started = MiniCluster::Start({}, "2s");
    ASSERT_TRUE(started.ok()) << started.status();
    cluster_ = std::move(*started);
    WriteTokens(cluster_->folder() + "/tokens.bin", 100000, TinyJob().vocabulary);
  }

  // Three workers; `faults` for the trainers of w1.
  void StartWorkers(const std::string& faults) {
    ASSERT_EQ(cluster_->StartWorker("w0", cluster_->HoldFaults()), absl::OkStatus());
    ASSERT_EQ(cluster_->StartWorker("w1", cluster_->HoldFaults(faults)), absl::OkStatus());
    ASSERT_EQ(cluster_->StartWorker("w2", cluster_->HoldFaults()), absl::OkStatus());
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

  // Waits until the end of an epoch is told with these words: its event. Without a type if none is.
  EventRow EndOfEpoch(const std::string& words) {
    EventRow end;
    Eventually(seconds(60), [&] {
      for (const EventRow& event : cluster_->Events("job").value_or(std::vector<EventRow>())) {
        if (IsEndOfEpoch(event) && absl::StrContains(event.reason + event.message, words)) {
          end = event;
        }
      }
      return !end.type.empty();
    });
    return end;
  }
  static bool IsEndOfEpoch(const EventRow& event) {
    return event.type == "EpochChanged" || event.type == "Recovering";
  }
  // From the first step that an epoch may make to that event.
  double SecondsOfTraining(const EventRow& end) {
    int64_t began_ms = 0;
    for (const EventRow& event : cluster_->Events("job").value_or(std::vector<EventRow>())) {
      began_ms = event.type == "Started" && began_ms == 0 ? event.time_ms : began_ms;
    }
    EXPECT_GT(began_ms, 0) << Events();
    return static_cast<double>(end.time_ms - began_ms) / 1000;
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
  cluster_->HoldTrainersAt(7);
  ASSERT_EQ(cluster_->Submit(Job(10)), absl::OkStatus());
  ASSERT_EQ(cluster_->WaitForStep("job", 6, seconds(60)), absl::OkStatus());
  const std::vector<pid_t> trainers = cluster_->Trainers("w1");
  ASSERT_EQ(trainers.size(), 1u);
  ASSERT_EQ(::kill(trainers[0], SIGSTOP), 0);
  const int64_t stopped_ms = SystemClock::Get().WallMs();
  cluster_->LetTrainersGo();
  const EventRow end = EndOfEpoch("has not issued");
  EXPECT_LT(static_cast<double>(end.time_ms - stopped_ms) / 1000, kMostSeconds) << Events();
  EXPECT_THAT(end.message, ContainsRegex(kLate)) << Events();
  EXPECT_THAT(end.message, HasSubstr("w1"));
  // The daemon has ended the stopped process, and the job goes on.
  EXPECT_EQ(cluster_->WaitForSuccess("job", seconds(60)), absl::OkStatus());
}

TEST_P(CollectiveLedgerTest, RankThatNeverIssuesItsNextCollectiveIsNamed) {
  StartWorkers("comm.issue@700:stall=600s");
  TinyJob job = Job(0);
  job.save_every_steps = 1000;  // one that waits for its saves is late by twice its longest step
  ASSERT_EQ(cluster_->Submit(job), absl::OkStatus());
  // When it was told, its peers had waited for so long.
  std::smatch waited;
  std::string events;
  ASSERT_TRUE(Eventually(seconds(60), [&] {
    events = Events();
    return std::regex_search(events, waited, std::regex(kLate));
  })) << events;
  const std::string words = waited[0].str();
  EXPECT_LT(std::stod(words.substr(words.rfind("since ") + 6)), kMostSeconds) << events;
  EXPECT_THAT(events, HasSubstr("Stall"));
  // One witness ends nothing: the rank may be slow.
  const absl::StatusOr<JobView> view = cluster_->Get("job");
  ASSERT_TRUE(view.ok());
  EXPECT_GT(view->step, 0);
  EXPECT_EQ(view->state, "RUNNING") << Events();
  EXPECT_THAT(Events(), Not(HasSubstr("EpochChanged"))) << Events();
  EXPECT_EQ(cluster_->Ctl({"cancel", "job"}).exit_code, 0);
}

TEST_P(CollectiveLedgerTest, TwoSwappedGathersAreNamedOnBothRanks) {
  StartWorkers("plan.swap:error=same");
  ASSERT_EQ(cluster_->Submit(Job(0)), absl::OkStatus());
  const EventRow end = EndOfEpoch("CollectiveMismatch");
  EXPECT_LT(SecondsOfTraining(end), kMostSeconds) << Events();
  EXPECT_THAT(end.message,
              ContainsRegex("rank [0-9] issued all_gather.* \\(Gather of embed.*rank [0-9] issued "
                            "all_gather.* \\(Gather of layers.0|rank [0-9] issued all_gather.* "
                            "\\(Gather of layers.0.*rank [0-9] issued all_gather.* \\(Gather of "
                            "embed"))
      << Events();
}

// Two ranks that share each layer: what they issue is sums of activations.
TEST_P(CollectiveLedgerTest, ARankThatIsLateForItsTensorGroupIsNamedWithTheAxis) {
  StartWorkers("comm.issue@700:stall=600s");
  TinyJob job = Job(0);
  job.workers = 2;
  job.intermediate = 256;
  job.parallelism = "tensor: 2";
  ASSERT_EQ(cluster_->Submit(job), absl::OkStatus());
  std::smatch late;
  std::string events;
  ASSERT_TRUE(Eventually(seconds(60), [&] {
    events = Events();
    return std::regex_search(events, late, std::regex(kLate));
  })) << events;
  EXPECT_THAT(late[0].str(), HasSubstr("in group tensor")) << events;
  EXPECT_EQ(cluster_->Ctl({"cancel", "job"}).exit_code, 0);
}

// Between ranks of one host weights are gathered long before anything is reduced; there the whole
// gradients of no_shard are gathered right after.
TEST_P(CollectiveLedgerTest, GatherAndReduceThatAreSwappedAreNamed) {
  const bool shared_memory = std::string(GetParam()) == "shm";
  StartWorkers(shared_memory ? "plan.swap:error=same" : "plan.swap:error=other");
  TinyJob job = Job(0);
  job.parallelism = shared_memory ? "strategy: no_shard" : "";
  ASSERT_EQ(cluster_->Submit(job), absl::OkStatus());
  const EventRow end = EndOfEpoch("CollectiveMismatch");
  EXPECT_LT(SecondsOfTraining(end), kMostSeconds) << Events();
  EXPECT_THAT(end.message, HasSubstr(shared_memory ? "(GatherGradient of " : "(Gather of "));
  EXPECT_THAT(end.message, HasSubstr("(ReduceScatter of "));
}

INSTANTIATE_TEST_SUITE_P(Transports,
                         CollectiveLedgerTest,
                         ::testing::Values("shm", "gloo"),
                         [](const auto& test) { return test.param; });

}  // namespace
}  // namespace ravel::testing
