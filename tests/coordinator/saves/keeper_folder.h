#pragma once

// A store of checkpoints on disk and its keeper, for tests.

#include <set>
#include <string>

#include <gtest/gtest.h>

#include "common/store/file_store.h"
#include "coordinator/saves/saves.h"
#include "coordinator/saves/store_checkpoint_keeper.h"
#include "tests/testing/fake_clock.h"
#include "tests/testing/process.h"
#include "tests/testing/saved_state.h"

namespace ravel::coordinator {

// A job's folder with steps that were committed by the job of testing::ContextOf, "job-1".
class KeeperFolder : public ::testing::Test {
 protected:
  void SetUp() override {
    ours_.cluster_id = "cluster-a";
    ours_.uid = "job-1";
    ours_.spec.name = "job";
    ours_.spec.checkpoint.store = "file://" + scratch_.path();
    ours_.spec.checkpoint.resume_from = "auto";
    ours_.spec.checkpoint.keep_last = 1;
  }
  // The first launch of a job in its folder.
  absl::StatusOr<RestorePoint> Launch(const CheckpointJob& job) {
    return keeper_.PrepareRestore(job, {});
  }
  absl::StatusOr<RestorePoint> Relaunch(int64_t committed_step) {
    return keeper_.PrepareRestore(
        ours_, {.committed_step = committed_step, .has_commit = true, .has_run = true});
  }
  void SaveStep(int64_t step, const std::string& numerics = "f32") {
    const testing::SavedWorld saved = testing::MakeWorld(testing::InventoryOf({{5, 3}, {4}}), 1, 7);
    const ckpt::AttemptKey key = {.step = step, .epoch = 1, .attempt = 1};
    const auto seals = testing::WriteAllRanks(files_, saved, key);
    ASSERT_TRUE(seals.ok()) << seals.status();
    SaveContext context = testing::ContextOf(saved, key);
    context.numerics = numerics;
    const auto info = CommitSave(files_, saved.save_plan, context, *seals);
    ASSERT_TRUE(info.ok()) << info.status();
  }
  std::set<int64_t> Steps() {
    std::set<int64_t> steps;
    const absl::StatusOr<StepListing> listing = ListSteps(files_);
    EXPECT_TRUE(listing.ok()) << listing.status();
    for (const CommittedStepInfo& info : listing->steps) {
      EXPECT_FALSE(info.bad) << info.step;
      steps.insert(info.step);
    }
    return steps;
  }
  CheckpointJob Another(const std::string& cluster, const std::string& uid) const {
    CheckpointJob other = ours_;
    other.cluster_id = cluster;
    other.uid = uid;
    return other;
  }

  testing::ScratchFolder scratch_;
  store::FileStore files_{scratch_.path() + "/job"};
  testing::FakeClock clock_;
  StoreCheckpointKeeper keeper_{&clock_};
  CheckpointJob ours_;
};

}  // namespace ravel::coordinator
