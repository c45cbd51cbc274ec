// Jobs and old rows are removed, by the verb and by age, on both kinds of store.

#include <cstdlib>
#include <filesystem>
#include <string>

#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>
#include <gtest/gtest.h>

#include "coordinator/store/sqlite_job_store.h"
#include "tests/coordinator/jobs/fake_world.h"

namespace ravel::coordinator {
namespace {

constexpr int64_t kDayMs = int64_t{24} * 3600 * 1000;

class RetentionRowsTest : public ::testing::TestWithParam<bool> {
 protected:
  RetentionRowsTest() { world_.StartCoordinator(Store()); }

  std::unique_ptr<JobStore> Store() {
    if (!GetParam()) {
      return nullptr;  // the memory disk
    }
    world_.KillCoordinator();
    absl::StatusOr<std::unique_ptr<SqliteJobStore>> store = SqliteJobStore::Create(world_.folder);
    EXPECT_TRUE(store.ok()) << store.status();
    return *std::move(store);
  }
  void RunToTheEnd(const std::string& name, int64_t steps = 4) {
    ASSERT_TRUE(world_.Submit(world_.Spec(name, {1}, steps)).ok());
    for (int64_t i = 0; i < steps + 50 && !IsTerminal(world_.Job(name).record.state); ++i) {
      world_.TrainStep();
      world_.Advance(40);
    }
    ASSERT_EQ(StateName(world_.Job(name).record.state), "SUCCEEDED");
  }
  absl::StatusOr<JobView> Delete(const std::string& name, DeleteDraft draft = {}) {
    draft.request_id =
        draft.request_id.empty() ? absl::StrCat("delete-", ++deletions_) : draft.request_id;
    absl::StatusOr<JobView> view = world_.Delete({"default", name}, draft);
    world_.Settle();
    return view;
  }
  static DeleteDraft Draft(bool force, bool with_checkpoints) {
    DeleteDraft draft;
    draft.force = force;
    draft.with_checkpoints = with_checkpoints;
    return draft;
  }
  bool Exists(const std::string& name) { return world_.controller().Get({"default", name}).ok(); }

  FakeWorld world_;
  int deletions_ = 0;
};

TEST_P(RetentionRowsTest, ADeletedJobLeavesItsNameAndItsCheckpoints) {
  world_.AddNode("a");
  RunToTheEnd("j");
  const std::string uid = world_.Job("j").record.uid;
  ASSERT_TRUE(std::filesystem::exists(world_.folder + "/metrics/" + uid + ".jsonl"));
  DeleteDraft draft;
  draft.request_id = "once";
  ASSERT_TRUE(Delete("j", draft).ok());
  EXPECT_FALSE(Exists("j"));
  EXPECT_FALSE(std::filesystem::exists(world_.folder + "/metrics/" + uid + ".jsonl"));
  EXPECT_FALSE(world_.keeper.steps["j"].empty());
  // The same request again finds nothing and deletes nobody else.
  EXPECT_TRUE(absl::IsNotFound(Delete("j", draft).status()));
  ASSERT_TRUE(world_.Submit(world_.Spec("j", {1}, 8)).ok());
  EXPECT_TRUE(absl::IsNotFound(Delete("j", draft).status()));
  EXPECT_TRUE(Exists("j"));
  EXPECT_NE(world_.Job("j").record.uid, uid);
  // Nor does a coordinator that comes back know the first one.
  world_.StartCoordinator(Store());
  EXPECT_EQ(world_.controller().List().size(), 1U);
}

TEST_P(RetentionRowsTest, OnlyForceDeletesAJobThatRuns) {
  world_.AddNode("a");
  ASSERT_TRUE(world_.Submit(world_.Spec("j", {1}, 1000)).ok());
  world_.Advance(100);
  world_.TrainSteps(3);
  EXPECT_TRUE(absl::IsFailedPrecondition(Delete("j").status()));
  EXPECT_TRUE(Exists("j"));
  world_.node("a").stops_trainers = false;
  ASSERT_TRUE(Delete("j", Draft(true, true)).ok());
  EXPECT_TRUE(Exists("j")) << "its trainer still runs";
  EXPECT_TRUE(absl::IsAlreadyExists(world_.Submit(world_.Spec("j", {1}, 8)).status()));
  // The wish to delete outlives the coordinator.
  world_.StartCoordinator(Store());
  world_.node("a").stops_trainers = true;
  world_.Connect(world_.node("a"));
  world_.Advance(6000);
  EXPECT_FALSE(Exists("j"));
  EXPECT_TRUE(world_.keeper.steps["j"].empty());
  EXPECT_TRUE(world_.node("a").trainers.empty());
}

TEST_P(RetentionRowsTest, CheckpointsThatCannotBeDeletedKeepTheJob) {
  world_.AddNode("a");
  RunToTheEnd("j");
  world_.keeper.remove_failure = absl::UnavailableError("the store is away");
  ASSERT_TRUE(Delete("j", Draft(false, true)).ok());
  EXPECT_TRUE(Exists("j"));
  world_.keeper.remove_failure = absl::OkStatus();
  world_.clock.AdvanceMs(60'000);
  world_.Advance(1000);
  EXPECT_FALSE(Exists("j"));
  EXPECT_TRUE(world_.keeper.steps["j"].empty());
}

TEST_P(RetentionRowsTest, AJobGoesByItselfSomeTimeAfterItsEnd) {
  world_.AddNode("a");
  plan::JobSpec spec = world_.Spec("short", {1}, 4);
  spec.ttl_ms = 2 * kDayMs;
  ASSERT_TRUE(world_.Submit(spec).ok());
  RunToTheEnd("stays");  // without a limit
  world_.clock.AdvanceMs(kDayMs);
  world_.Advance(200);
  EXPECT_TRUE(Exists("short"));
  world_.clock.AdvanceMs(kDayMs);
  world_.Advance(200);
  EXPECT_FALSE(Exists("short"));
  EXPECT_TRUE(Exists("stays"));
  EXPECT_FALSE(world_.keeper.steps["short"].empty());
}

TEST_P(RetentionRowsTest, OldEventsLeaveAMarkerThatCountsThem) {
  world_.options.retention.events_per_job = 10;
  world_.StartCoordinator(Store());
  world_.AddNode("a");
  RunToTheEnd("j", 120);  // a commit each fifth step
  const size_t all = world_.Events("j").size();
  ASSERT_GT(all, 20u);
  for (int round = 0; round < 2; ++round) {
    world_.clock.AdvanceMs(3600 * 1000);
    world_.Advance(100);
    const std::vector<JobEventRecord> events = world_.Events("j");
    ASSERT_EQ(events.size(), 11u);
    EXPECT_EQ(events.front().type, kEventsRemoved);
    EXPECT_EQ(events.front().message, absl::StrCat(all - 10, kEventsRemovedText));
    EXPECT_EQ(events.back().type, "Succeeded");
  }
  world_.options.retention.events_per_job = 4;
  world_.StartCoordinator(Store());
  world_.clock.AdvanceMs(3600 * 1000);
  world_.Advance(100);
  EXPECT_EQ(world_.Events("j").front().message, absl::StrCat(all - 4, kEventsRemovedText));
  world_.clock.AdvanceMs(31 * kDayMs);
  world_.Advance(100);
  ASSERT_EQ(world_.Events("j").size(), 1u) << "all are old";
  EXPECT_EQ(world_.Events("j")[0].message, absl::StrCat(all, kEventsRemovedText));
}

int64_t Bytes(const std::string& folder) {
  int64_t bytes = 0;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder)) {
    bytes += entry.is_regular_file() ? static_cast<int64_t>(entry.file_size()) : 0;
  }
  return bytes;
}

// The disk is as large after ten times as many jobs.
TEST_P(RetentionRowsTest, ManyShortJobsLeaveNothingBehind) {
  world_.AddNode("a");
  int64_t after_few = 0;
  for (int i = 0; i < 200; ++i) {
    plan::JobSpec spec = world_.Spec(absl::StrCat("job-", i), {1}, 4);
    spec.ttl_ms = kDayMs;
    ASSERT_TRUE(world_.Submit(spec).ok());
    for (int step = 0; step < 50 && !IsTerminal(world_.Job(spec.name).record.state); ++step) {
      world_.TrainStep();
      world_.Advance(40);
    }
    if (i % 20 == 19) {
      world_.clock.AdvanceMs(2 * kDayMs);
      world_.Advance(1000);
      world_.StartCoordinator(Store());  // a database that is closed has no journal
      after_few = after_few == 0 ? Bytes(world_.folder) : after_few;
      world_.Restart(world_.node("a"));
    }
  }
  EXPECT_EQ(world_.controller().List().size(), 0u);
  EXPECT_TRUE(std::filesystem::is_empty(world_.folder + "/metrics"));
  world_.StartCoordinator(Store());
  EXPECT_LE(Bytes(world_.folder), after_few + (64 << 10));
  if (!GetParam()) {
    EXPECT_TRUE(world_.disk.events.empty() && world_.disk.jobs.empty() &&
                world_.disk.saves.empty() && world_.disk.epochs.empty());
  }
  world_.clock.AdvanceMs(8 * kDayMs);  // requests are kept for a week
  world_.Advance(200);
  if (!GetParam()) {
    EXPECT_TRUE(world_.disk.requests.empty());
  } else {
    EXPECT_FALSE(
        world_.controller().store().FindRequest("request-1").value_or(std::nullopt).has_value());
  }
}

TEST_P(RetentionRowsTest, LostNodesAreForgottenByNameOrAfterADay) {
  world_.AddNode("a");
  world_.AddNode("b");
  world_.AddNode("c");
  EXPECT_TRUE(absl::IsFailedPrecondition(world_.ForgetNode("a")));
  EXPECT_TRUE(absl::IsNotFound(world_.ForgetNode("nobody")));
  world_.Kill(world_.node("a"));
  world_.Kill(world_.node("b"));
  world_.Advance(3000);
  EXPECT_EQ(world_.controller().Nodes().size(), 3u);
  EXPECT_TRUE(world_.ForgetNode("a").ok());
  EXPECT_EQ(world_.controller().Nodes().size(), 2u);
  world_.clock.AdvanceMs(kDayMs + 1000);
  world_.Restart(world_.node("c"));
  world_.Advance(1000);
  ASSERT_EQ(world_.controller().Nodes().size(), 1u);
  EXPECT_EQ(world_.controller().Nodes()[0].record.facts.node_id, "c");
  if (!GetParam()) {
    EXPECT_EQ(world_.disk.nodes.size(), 1u);
  }
  world_.Restart(world_.node("b"));  // welcome again
  EXPECT_EQ(world_.controller().Nodes().size(), 2u);
}

TEST_P(RetentionRowsTest, NodesWhoseNamesCommandATerminalAreRefused) {
  world_.AddNode("evil\x1b[2J");
  EXPECT_EQ(world_.controller().Nodes().size(), 0u);
  EXPECT_NE(world_.node("evil\x1b[2J").rejected, "");
}

INSTANTIATE_TEST_SUITE_P(Stores, RetentionRowsTest, ::testing::Bool(), [](const auto& store) {
  return store.param ? "Sqlite" : "Memory";
});

TEST(MaxRunTime, CountsOnlyTimeThatHoldsDevices) {
  FakeWorld world;
  world.StartCoordinator();
  plan::JobSpec spec = world.Spec("j", {1}, 100'000);
  spec.max_run_time_ms = 60'000;
  ASSERT_TRUE(world.Submit(spec).ok());
  world.clock.AdvanceMs(kDayMs);  // in the queue
  world.Advance(100);
  EXPECT_EQ(StateName(world.Job("j").record.state), "QUEUED");
  world.AddNode("a");
  world.Advance(20'000);
  EXPECT_EQ(StateName(world.Job("j").record.state), "RUNNING");
  world.Kill(world.node("a"));
  world.Advance(10'000);
  const int64_t held_ms = world.Job("j").record.held_ms;
  EXPECT_EQ(StateName(world.Job("j").record.state), "QUEUED");
  EXPECT_GE(held_ms, 20'000);
  EXPECT_LT(held_ms, 30'000);
  world.clock.AdvanceMs(kDayMs);
  world.Restart(world.node("a"));
  world.Advance(20'000);
  EXPECT_EQ(StateName(world.Job("j").record.state), "RUNNING");
  world.Advance(25'000);
  const JobRecord record = world.Job("j").record;
  EXPECT_EQ(StateName(record.state), "FAILED");
  EXPECT_EQ(record.reason, "MaxRunTime");
  EXPECT_EQ(record.failure_class, "user");
  EXPECT_EQ(record.message, "held devices for longer than maxRunTime, 1m");
  EXPECT_TRUE(world.node("a").trainers.empty());
}

}  // namespace
}  // namespace ravel::coordinator
