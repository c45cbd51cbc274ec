// A job begins at the step that resumeFrom names, or at a commit of its own, beside what others
// left under its name.

#include <filesystem>
#include <memory>
#include <set>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/store/committed_step.h"
#include "common/store/file_store.h"
#include "coordinator/saves/checkpoint_leftovers.h"
#include "coordinator/saves/checkpoint_owner.h"
#include "coordinator/saves/checkpoint_pins.h"
#include "coordinator/saves/saves.h"
#include "tests/coordinator/saves/keeper_folder.h"
#include "tests/testing/saved_state.h"
#include "tests/testing/watched_store.h"

namespace ravel::coordinator {
namespace {

using ::testing::HasSubstr;

class KeeperStartsTest : public KeeperFolder {};

TEST_F(KeeperStartsTest, ANameThatIsUsedAgainDoesNotSilentlyGoOnWithTheOldHistory) {
  ASSERT_TRUE(Launch(ours_).ok());
  SaveStep(10);
  CheckpointJob next = Another("cluster-a", "job-2");
  const absl::Status refused = keeper_.Check(next);
  EXPECT_TRUE(absl::IsInvalidArgument(refused));
  EXPECT_THAT(std::string(refused.message()),
              ::testing::AllOf(HasSubstr("spec.checkpoint.resumeFrom"),
                               HasSubstr(files_.Locate("step-0000000010")),
                               HasSubstr("fresh: true")));
  EXPECT_FALSE(Launch(next).ok()) << "not at the launch either";
  next.spec.checkpoint.resume_from = "none";
  EXPECT_FALSE(keeper_.Check(next).ok());
  next.spec.checkpoint.fresh = true;
  ASSERT_TRUE(keeper_.Check(next).ok());
  EXPECT_EQ(Launch(next)->step, -1);
  EXPECT_TRUE(Steps().empty());
  EXPECT_FALSE(Relaunch(10).ok()) << "the folder has changed hands";
  // The folder that was set aside is a job folder as before.
  EXPECT_EQ(ListSteps(store::FileStore(files_.Locate("old-job-2")))->steps.size(), 1U);
}

// The deletion of the earlier job was cut off, and that job is forgotten.
TEST_F(KeeperStartsTest, ANameWhoseLastStepIsWithdrawnIsFree) {
  ASSERT_TRUE(Launch(ours_).ok());
  SaveStep(10);
  ASSERT_TRUE(files_.Put("step-0000000010/DELETED", "").ok());
  const CheckpointJob next = Another("cluster-a", "job-2");
  ASSERT_TRUE(keeper_.Check(next).ok());
  const absl::StatusOr<RestorePoint> start = Launch(next);
  ASSERT_TRUE(start.ok()) << start.status();
  EXPECT_EQ(start->step, -1);
  ASSERT_TRUE(keeper_.Retain(next, -1).ok());
  EXPECT_FALSE(*store::Exists(files_, "step-0000000010"));
}

// Somebody may want to mend it.
TEST_F(KeeperStartsTest, ANameWithADamagedStepIsNotFree) {
  ASSERT_TRUE(Launch(ours_).ok());
  SaveStep(10);
  ASSERT_TRUE(files_.Withdraw("step-0000000010/COMMIT").ok());
  const absl::Status refused = Launch(Another("cluster-a", "job-2")).status();
  EXPECT_TRUE(absl::IsFailedPrecondition(refused)) << refused;
  EXPECT_TRUE(*store::Exists(files_, "step-0000000010/manifest.pb"));
}

TEST_F(KeeperStartsTest, AFreshStartMovesStepsOfOthersAsideWithTheirMarks) {
  ASSERT_TRUE(Launch(ours_).ok());
  SaveStep(10);
  SaveStep(20);
  ASSERT_TRUE(MarkBad(files_, 20, "torn").ok());
  ASSERT_TRUE(files_.MakeDirectory("step-0000000030").ok());  // not loadable, but in the way
  CheckpointJob next = Another("cluster-a", "new");
  next.spec.checkpoint.resume_from = "none";
  next.spec.checkpoint.fresh = true;
  ASSERT_TRUE(Launch(next).ok());
  EXPECT_TRUE(Steps().empty());
  EXPECT_TRUE(ListSteps(files_)->damaged.empty());
  ASSERT_TRUE(Launch(next).ok()) << "it may be repeated";
  const absl::StatusOr<StepListing> old = ListSteps(store::FileStore(files_.Locate("old-new")));
  ASSERT_TRUE(old.ok()) << old.status();
  ASSERT_EQ(old->steps.size(), 2U);
  EXPECT_TRUE(old->steps[0].bad);
  // The same numbers can be committed anew, and are not taken for bad.
  SaveStep(20);
  EXPECT_EQ(Steps(), std::set<int64_t>{20});
}

TEST_F(KeeperStartsTest, AnEarlierStartMovesOnlyLaterStepsAside) {
  ASSERT_TRUE(Launch(ours_).ok());
  for (const int64_t step : {10, 20, 30}) {
    SaveStep(step);
  }
  CheckpointJob next = Another("cluster-a", "new");
  next.spec.checkpoint.resume_from = "20";
  const absl::StatusOr<RestorePoint> start = Launch(next);
  ASSERT_TRUE(start.ok()) << start.status();
  EXPECT_EQ(start->step, 20);
  EXPECT_EQ(Steps(), (std::set<int64_t>{10, 20}));
}

TEST_F(KeeperStartsTest, TheStepThatAJobBeginsFromStaysUntilItsFirstCommit) {
  ASSERT_TRUE(Launch(ours_).ok());
  SaveStep(10);
  CheckpointJob next = Another("cluster-a", "new");
  next.spec.name = "next";
  next.spec.checkpoint.resume_from = files_.Locate("step-0000000010");
  ASSERT_TRUE(keeper_.Check(next).ok());
  ASSERT_TRUE(keeper_.PinStart(next, 0).ok());
  SaveStep(20);
  SaveStep(30);
  EXPECT_EQ(*keeper_.Retain(ours_, -1), std::vector<int64_t>{20}) << "10 is needed by another";
  const absl::StatusOr<RestorePoint> start = Launch(next);
  ASSERT_TRUE(start.ok()) << start.status();
  EXPECT_EQ(start->step, 10);
  EXPECT_FALSE(start->own);
  ASSERT_TRUE(keeper_.Retain(next, -1).ok()) << "its first save found the store full";
  EXPECT_TRUE(keeper_.Retain(ours_, -1)->empty()) << "10 is needed still";
  const testing::SavedWorld saved = testing::MakeWorld(testing::InventoryOf({{5, 3}, {4}}), 1, 7);
  const ckpt::AttemptKey key = {.step = 15, .epoch = 1, .attempt = 1};
  store::FileStore files(keeper_.Root(next.spec));
  const auto seals = testing::WriteAllRanks(files, saved, key);
  ASSERT_TRUE(seals.ok()) << seals.status();
  SaveContext context = testing::ContextOf(saved, key);
  context.job = next.uid;
  ASSERT_TRUE(CommitSave(files, saved.save_plan, context, *seals).ok());
  clock_.AdvanceMs(3600 * 1000);
  ASSERT_TRUE(keeper_.Retain(next, -1).ok()) << "after its first own commit";
  EXPECT_EQ(*keeper_.Retain(ours_, -1), std::vector<int64_t>{10});
}

TEST_F(KeeperStartsTest, AJobThatEndsLetsGoOfWhatItBeganFrom) {
  ASSERT_TRUE(Launch(ours_).ok());
  SaveStep(10);
  CheckpointJob next = Another("cluster-a", "new");
  next.spec.name = "next";
  next.spec.checkpoint.resume_from = files_.Locate("step-0000000010");
  ASSERT_TRUE(keeper_.PinStart(next, 0).ok());
  EXPECT_TRUE(ListSteps(files_)->steps.front().pinned);
  ASSERT_TRUE(keeper_.Release(next, {}).ok());
  EXPECT_FALSE(ListSteps(files_)->steps.front().pinned);
}

TEST_F(KeeperStartsTest, APinThatStaysIsToldAndGoesWithTheCheckpoints) {
  ASSERT_TRUE(Launch(ours_).ok());
  SaveStep(10);
  CheckpointJob next = Another("cluster-a", "new");
  next.spec.name = "next";
  next.spec.checkpoint.resume_from = files_.Locate("step-0000000010");
  ASSERT_TRUE(Launch(next).ok());
  EXPECT_TRUE(ListSteps(files_)->steps.front().pinned);
  const std::string away = scratch_.path() + "/away";
  std::filesystem::rename(files_.Locate("pins"), away);
  testing::WriteText(files_.Locate("pins"), "no folder");
  EXPECT_TRUE(absl::IsUnavailable(keeper_.Release(next, {.has_run = true}).status()));
  std::filesystem::remove(files_.Locate("pins"));
  std::filesystem::rename(away, files_.Locate("pins"));
  ASSERT_TRUE(keeper_.RemoveAll(next).ok());
  EXPECT_FALSE(ListSteps(files_)->steps.front().pinned);
}

TEST_F(KeeperStartsTest, AFirstSaveThatIsSettledComesBeforeWhatResumeFromSays) {
  ASSERT_TRUE(Launch(ours_).ok());
  SaveStep(10);
  for (const std::string& start : {std::string("none"), files_.Locate("step-0000000010")}) {
    CheckpointJob next = Another("cluster-a", start == "none" ? "anew" : "from-10");
    next.spec.name = next.uid;
    next.spec.checkpoint.resume_from = start;
    ASSERT_TRUE(Launch(next).ok());
    store::FileStore files(keeper_.Root(next.spec));
    const testing::SavedWorld saved = testing::MakeWorld(testing::InventoryOf({{5, 3}, {4}}), 2, 7);
    const ckpt::AttemptKey key = {
        .step = 20, .epoch = 1, .attempt = 1, .job_tag = ckpt::JobTag(next.uid)};
    ASSERT_TRUE(testing::WriteAllRanks(files, saved, key).ok());
    RestoreQuery query = {.has_run = true};
    query.plan = [&](int64_t) {
      auto world = std::make_shared<PlannedWorld>();
      world->plan = saved.world;
      return std::shared_ptr<const PlannedWorld>(world);
    };
    const absl::StatusOr<RestorePoint> restore = keeper_.PrepareRestore(next, query);
    ASSERT_TRUE(restore.ok()) << restore.status();
    EXPECT_TRUE(restore->settled);
    EXPECT_EQ(restore->step, 20) << start;
    EXPECT_TRUE(restore->own);
  }
}

// As after a publication whose answer was lost.
TEST_F(KeeperStartsTest, AFirstCommitThatTheRecordLacksComesBeforeWhatResumeFromSays) {
  ours_.spec.checkpoint.resume_from = scratch_.path() + "/gone/step-0000000010";
  ours_.spec.checkpoint.fresh = true;
  ASSERT_FALSE(keeper_.PrepareRestore(ours_, {}).ok()) << "there is no such step";
  SaveStep(20);
  const absl::StatusOr<RestorePoint> restore = keeper_.PrepareRestore(ours_, {.has_run = true});
  ASSERT_TRUE(restore.ok()) << restore.status();
  EXPECT_EQ(restore->step, 20);
  EXPECT_TRUE(restore->own);
  ASSERT_EQ(restore->found.size(), 1U);
  EXPECT_EQ(restore->found[0].saved.save.step, 20);
}

// Four ranks in two replicas, each of which keeps all that is trained.
testing::SavedWorld TwoReplicas() {
  plan::ShardingPlan world = testing::WorldOf(testing::InventoryOf({{5, 3}, {4}}), 2);
  world.ranks = 4;
  world.lanes = {.lanes = 8, .ranks = 4, .replicas = 2};
  world.mesh = *plan::Mesh::Create({{"replicate", 2}, {"shard", 2}});
  return testing::SaveOf(std::move(world), 7);
}

}  // namespace
}  // namespace ravel::coordinator
