// Faults of the controller that the simulation found, each as a short story of its own.

#include <memory>
#include <utility>

#include <gtest/gtest.h>

#include "tests/coordinator/jobs/fake_world.h"

namespace ravel::coordinator {
namespace {

// Refuses to note that a save is committed, but for so many; or that an epoch is launched.
class NoCommitNotes : public JobStore {
 public:
  explicit NoCommitNotes(MemoryJobStore::Disk* disk) : inner_(disk) {}
  absl::StatusOr<LoadedState> Open() override { return inner_.Open(); }
  absl::Status Apply(const StoreChange& change) override {
    for (const SaveRecord& save : change.saves) {
      if (save.state == SaveState::kCommitted && allowed-- <= 0) {
        return absl::UnavailableError("I/O error");
      }
    }
    if (!launches && !change.epochs.empty()) {
      return absl::UnavailableError("I/O error");
    }
    return inner_.Apply(change);
  }
  absl::StatusOr<std::optional<RequestRecord>> FindRequest(const std::string& id) override {
    return inner_.FindRequest(id);
  }
  absl::StatusOr<int64_t> SweepJob(const std::string& job_uid,
                                   const RowRetention& policy) override {
    return inner_.SweepJob(job_uid, policy);
  }
  absl::StatusOr<int64_t> SweepRequests(const RowRetention& policy) override {
    return inner_.SweepRequests(policy);
  }
  absl::StatusOr<std::vector<JobEventRecord>> Events(const std::string& job_uid,
                                                     int64_t after,
                                                     int64_t limit) override {
    return inner_.Events(job_uid, after, limit);
  }

  int64_t allowed = 1'000'000;
  bool launches = true;

 private:
  MemoryJobStore inner_;
};

TEST(FoundBySimulation, ADeletedStepIsNotCommittedAgainByANoteThatWaited) {
  FakeWorld world;
  auto store = std::make_unique<NoCommitNotes>(&world.disk);
  NoCommitNotes& notes = *store;
  world.StartCoordinator(std::move(store));
  world.AddNode("n0");
  plan::JobSpec spec = world.Spec("job", {1}, 30);
  spec.checkpoint.keep_last = 1;
  ASSERT_TRUE(world.Submit(spec).ok());
  world.TrainSteps(6);
  notes.allowed = 0;
  world.TrainSteps(15);  // steps 10, 15 and 20 are made, the notes of it wait
  notes.allowed = 1;
  world.Advance(40);  // step 10 is noted, and retention deletes 10 and 15
  notes.allowed = 1'000'000;
  world.Advance(40);
  for (const auto& [key, save] : world.disk.saves) {
    const bool kept = world.keeper.steps["job"].contains(save.step);
    EXPECT_EQ(save.state == SaveState::kCommitted, kept) << "step " << save.step;
  }
}

int64_t FreeDevices(FakeWorld& world, const std::string& id) {
  for (const NodeView& node : world.controller().Nodes()) {
    if (node.record.facts.node_id == id) {
      return node.devices_free;
    }
  }
  return -1;
}

TEST(FoundBySimulation, ALaunchThatALostNodeGaveUpHoldsNoDevice) {
  FakeWorld world;
  world.StartCoordinator();
  FakeNode& node = world.AddNode("n0");
  node.plans_wait = true;
  ASSERT_TRUE(world.Submit(world.Spec("job", {1}, 30)).ok());
  ASSERT_EQ(node.launching.size(), 1U);
  node.frozen = true;
  world.Advance(1500);
  ASSERT_EQ(world.Job("job").record.budget.last_reason, "NodeLost");
  // It returns, still waiting for the plan, and is told that this epoch is over.
  node.frozen = false;
  node.plans_wait = false;
  world.Disconnect(node);
  world.Connect(node);
  world.GiveUpLaunches(node);
  world.Advance(1000);
  EXPECT_EQ(world.Job("job").record.state, JobState::kRunning);
  ASSERT_TRUE(world.Cancel({"default", "job"}, "").ok());
  world.Advance(300);
  EXPECT_EQ(FreeDevices(world, "n0"), 1);
}

TEST(FoundBySimulation, AJobThatIsCancelledBeforeItsPlanCameLeavesNoZombie) {
  FakeWorld world;
  world.StartCoordinator();
  FakeNode& node = world.AddNode("n0", 2);
  node.plans_wait = true;
  ASSERT_TRUE(world.Submit(world.Spec("quick", {2}, 30)).ok());
  ASSERT_TRUE(world.Cancel({"default", "quick"}, "").ok());
  world.Settle();
  world.GiveUpLaunches(node);
  world.Advance(200);
  EXPECT_EQ(world.Job("quick").record.state, JobState::kCancelled) << "the beat names no rank";
  EXPECT_EQ(FreeDevices(world, "n0"), 2);

  ASSERT_TRUE(world.Submit(world.Spec("slow", {2}, 30)).ok());
  ASSERT_TRUE(world.Cancel({"default", "slow"}, "").ok());
  world.Advance(3000);
  EXPECT_EQ(FreeDevices(world, "n0"), 0) << "it may still begin";
  world.GiveUpLaunches(node);
  world.Advance(200);
  EXPECT_EQ(world.Job("slow").record.state, JobState::kCancelled);
  EXPECT_EQ(FreeDevices(world, "n0"), 2);
}

TEST(FoundBySimulation, ALaunchWhosePlanDidNotComeIsSentAgain) {
  FakeWorld world;
  world.StartCoordinator();
  FakeNode& node = world.AddNode("n0");
  node.plans_wait = true;
  ASSERT_TRUE(world.Submit(world.Spec("job", {1}, 30)).ok());
  world.Advance(300);  // the node has said that it launches
  world.GiveUpLaunches(node);
  node.plans_wait = false;
  world.Advance(1000);
  EXPECT_EQ(world.Job("job").record.state, JobState::kRunning);
  EXPECT_EQ(world.Job("job").record.attempt, 1);
}

TEST(FoundBySimulation, ANodeThatReturnsBeforeTheLaunchWasSentHasLostNothing) {
  FakeWorld world;
  auto store = std::make_unique<NoCommitNotes>(&world.disk);
  NoCommitNotes& notes = *store;
  world.StartCoordinator(std::move(store));
  FakeNode& node = world.AddNode("n0");
  notes.launches = false;
  ASSERT_TRUE(world.Submit(world.Spec("job", {1}, 30)).ok());
  world.Disconnect(node);
  world.Connect(node);
  notes.launches = true;
  world.Advance(200);
  EXPECT_EQ(world.Job("job").record.state, JobState::kRunning);
  EXPECT_EQ(world.Job("job").record.epoch, 1);
}

TEST(FoundBySimulation, AnEpochThatBrokeBeforeItsLaunchWasSentIsNotLaunched) {
  FakeWorld world;
  auto store = std::make_unique<NoCommitNotes>(&world.disk);
  NoCommitNotes& notes = *store;
  world.StartCoordinator(std::move(store));
  world.AddNode("n0");
  world.AddNode("n1");
  notes.launches = false;
  ASSERT_TRUE(world.Submit(world.Spec("job", {2}, 30)).ok());
  world.node("n1").frozen = true;
  world.Advance(1500);
  notes.launches = true;
  world.Advance(500);
  EXPECT_TRUE(world.launches.empty()) << "its other node is lost";
  world.node("n1").frozen = false;
  world.Connect(world.node("n1"));
  world.Advance(2000);
  EXPECT_EQ(world.Job("job").record.state, JobState::kRunning);
  ASSERT_FALSE(world.launches.empty());
  EXPECT_GT(world.launches.front().epoch, 1);
}

TEST(FoundBySimulation, CommitsOfAnAdoptedRunDoNotHideTheEndOfOneThatWasIntended) {
  FakeWorld world;
  world.StartCoordinator();
  FakeNode& node = world.AddNode("n0");
  ASSERT_TRUE(world.Submit(world.Spec("job", {1}, 20)).ok());
  world.pool().held = true;
  world.TrainSteps(6);  // the commit of step 5 is intended
  world.StartCoordinator();
  world.pool().RunNewest();  // the plan of the run; the store is slow with what was intended
  world.Connect(node);
  world.TrainSteps(5);  // the commit of step 10 begins
  world.pool().held = false;
  world.TrainSteps(12);
  EXPECT_EQ(world.Job("job").record.state, JobState::kSucceeded);
  EXPECT_EQ(world.Job("job").record.attempt, 1);
}

}  // namespace
}  // namespace ravel::coordinator
