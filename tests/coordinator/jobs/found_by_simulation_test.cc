// Faults of the controller that the simulation found, each as a short story of its own.

#include <memory>
#include <utility>

#include <gtest/gtest.h>

#include "tests/coordinator/jobs/fake_world.h"

namespace ravel::coordinator {
namespace {

// Refuses to note that a save is committed, but for so many.
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

}  // namespace
}  // namespace ravel::coordinator
