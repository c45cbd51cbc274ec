#include "coordinator/store_checkpoint_keeper.h"

#include <set>
#include <string>

#include <gtest/gtest.h>

#include "common/store/file_store.h"
#include "coordinator/saves.h"
#include "tests/testing/process.h"
#include "tests/testing/saved_state.h"

namespace ravel::coordinator {
namespace {

// A job folder with steps that were committed by the job of testing::ContextOf.
class StoreCheckpointKeeperTest : public ::testing::Test {
 protected:
  void SetUp() override {
    spec_.name = "job";
    spec_.checkpoint.store = "file://" + scratch_.path();
    ASSERT_TRUE(files_.MakeRoot().ok());
  }
  void SaveStep(int64_t step) {
    const testing::SavedWorld saved = testing::MakeWorld(testing::InventoryOf({{5, 3}, {4}}), 1, 7);
    const auto info = testing::Save(files_, saved, {.step = step, .epoch = 1, .attempt = 1});
    ASSERT_TRUE(info.ok()) << info.status();
    owner_ = info->commit.job;
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

  testing::ScratchFolder scratch_;
  store::FileStore files_{scratch_.path() + "/job"};
  StoreCheckpointKeeper keeper_;
  plan::JobSpec spec_;
  std::string owner_;
};

TEST_F(StoreCheckpointKeeperTest, RetentionKeepsTheLastStepsAndThePeriodicOnes) {
  for (const int64_t step : {10, 20, 30, 40, 50}) {
    SaveStep(step);
  }
  spec_.checkpoint.keep_last = 1;
  spec_.checkpoint.keep_every_steps = 20;
  const absl::StatusOr<std::vector<int64_t>> deleted = keeper_.Retain(spec_, -1);
  ASSERT_TRUE(deleted.ok()) << deleted.status();
  EXPECT_EQ(*deleted, (std::vector<int64_t>{10, 30}));
  EXPECT_EQ(Steps(), (std::set<int64_t>{20, 40, 50}));
}

TEST_F(StoreCheckpointKeeperTest, AFreshStartMovesStepsOfOthersAsideWithTheirMarks) {
  SaveStep(10);
  SaveStep(20);
  ASSERT_TRUE(keeper_.MarkBad(spec_, 20, "torn").ok());
  ASSERT_TRUE(files_.MakeDirectory("step-0000000030").ok());  // not loadable, but in the way

  ASSERT_TRUE(keeper_.SetAside(spec_, owner_, {}).ok());
  EXPECT_EQ(ListSteps(files_)->steps.size(), 2U) << "a job's own steps stay";

  ASSERT_TRUE(keeper_.SetAside(spec_, "new", {}).ok());
  EXPECT_TRUE(Steps().empty());
  EXPECT_TRUE(ListSteps(files_)->damaged.empty());
  ASSERT_TRUE(keeper_.SetAside(spec_, "new", {}).ok()) << "it may be repeated";
  // What was set aside is a job folder as before.
  const absl::StatusOr<StepListing> old = ListSteps(store::FileStore(files_.Locate("old-new")));
  ASSERT_TRUE(old.ok()) << old.status();
  ASSERT_EQ(old->steps.size(), 2U);
  EXPECT_TRUE(old->steps[0].bad);
  // The same numbers can be committed anew, and are not taken for bad.
  SaveStep(20);
  EXPECT_EQ(Steps(), std::set<int64_t>{20});
}

TEST_F(StoreCheckpointKeeperTest, AnEarlierStartMovesOnlyLaterStepsAside) {
  for (const int64_t step : {10, 20, 30}) {
    SaveStep(step);
  }
  spec_.checkpoint.resume_from = "20";
  const absl::StatusOr<RestorePoint> start = keeper_.FindRestore(spec_, false);
  ASSERT_TRUE(start.ok()) << start.status();
  ASSERT_TRUE(keeper_.SetAside(spec_, "new", *start).ok());
  EXPECT_EQ(Steps(), (std::set<int64_t>{10, 20}));
  // A start that lies elsewhere: no step of this folder belongs to the history.
  ASSERT_TRUE(keeper_.SetAside(spec_, "new", {.step = 5, .path = "/elsewhere/step-5"}).ok());
  EXPECT_TRUE(Steps().empty());
}

TEST_F(StoreCheckpointKeeperTest, JobsOfTwoNamespacesNeverShareAFolder) {
  const std::string root = keeper_.Root(spec_);
  spec_.namespace_name = "team";
  EXPECT_NE(keeper_.Root(spec_), root);
}

}  // namespace
}  // namespace ravel::coordinator
