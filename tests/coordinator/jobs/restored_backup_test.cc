// A coordinator whose database is a backup from before the newest commits.

#include <algorithm>

#include <absl/strings/str_cat.h>
#include <gtest/gtest.h>

#include "coordinator/jobs/job_controller.h"
#include "tests/coordinator/jobs/fake_world.h"

namespace ravel::coordinator {
namespace {

FoundSave FoundStep(int64_t step) {
  return {.saved = {.save = {.step = step,
                             .path = absl::StrCat("/ckpt/job/step-", step),
                             .bytes = 1000 + step,
                             .files = 7,
                             .save_id = absl::StrCat("id-", step),
                             .mesh = "shard 2"},
                    .epoch = 9,
                    .attempt = 4,
                    .world_size = 2},
          .created_ms = 5000 + step};
}

class RestoredBackupTest : public ::testing::Test {
 protected:
  void SetUp() override {
    world_.StartCoordinator();
    world_.AddNode("a");
    ASSERT_TRUE(world_.Submit(world_.Spec("job", {1}, 100)).ok());
    world_.TrainSteps(7);
    backup_ = world_.disk;
    committed_ = world_.Job("job").record.committed_step;
    ASSERT_GT(committed_, 0);
    world_.TrainSteps(20);
    newest_ = world_.Job("job").record.committed_step;
    ASSERT_GT(newest_, committed_);
    world_.KillCoordinator();
    world_.node("a").alive = false;  // it has heard of a newer term
    world_.disk = backup_;
  }
  const SaveRecord* Save(int64_t step) {
    const std::vector<SaveRecord>& saves = world_.controller().Saves(world_.Job("job").record.uid);
    const auto found = std::find_if(saves.begin(), saves.end(), [step](const SaveRecord& save) {
      return save.step == step && save.state == SaveState::kCommitted;
    });
    return found == saves.end() ? nullptr : &*found;
  }
  void ExpectFound(int64_t step) {
    const SaveRecord* const save = Save(step);
    ASSERT_NE(save, nullptr) << step;
    EXPECT_EQ(save->bytes, 1000 + step);
    EXPECT_EQ(save->files, 7);
    EXPECT_EQ(save->save_id, absl::StrCat("id-", step));
    EXPECT_EQ(save->mesh, "shard 2");
    EXPECT_EQ(save->epoch, 9);
    EXPECT_EQ(save->attempt, 4);
    EXPECT_EQ(save->world_size, 2);
    EXPECT_EQ(save->created_ms, 5000 + step);
    EXPECT_EQ(save->path, absl::StrCat("/ckpt/job/step-", step));
  }

  FakeWorld world_;
  MemoryJobStore::Disk backup_;
  int64_t committed_ = 0;
  int64_t newest_ = 0;
};

TEST_F(RestoredBackupTest, TheNextLaunchListsTheStepsOfTheStore) {
  world_.keeper.found = {FoundStep(newest_ - 1), FoundStep(newest_)};
  world_.StartCoordinator();
  EXPECT_EQ(Save(newest_), nullptr);
  world_.AddNode("b");
  world_.Advance(60'000);
  ASSERT_EQ(world_.Job("job").record.state, JobState::kRunning);
  EXPECT_EQ(world_.Job("job").record.committed_step, newest_);
  ExpectFound(newest_ - 1);
  ExpectFound(newest_);
  // They are durable.
  world_.KillCoordinator();
  world_.StartCoordinator();
  ExpectFound(newest_);
}

TEST_F(RestoredBackupTest, AListSeesThemBeforeTheNextLaunch) {
  world_.StartCoordinator();
  const std::string uid = world_.Job("job").record.uid;
  FolderView folder;
  folder.steps = {committed_, newest_};
  folder.found = {FoundStep(newest_)};
  world_.controller().NoteFolder(uid, folder);
  ExpectFound(newest_);
  const size_t records = world_.controller().Saves(uid).size();
  world_.controller().NoteFolder(uid, folder);  // a look from before
  EXPECT_EQ(world_.controller().Saves(uid).size(), records);
}

TEST_F(RestoredBackupTest, AStepThatIsKnownIsNotListedTwice) {
  world_.StartCoordinator();
  const std::string uid = world_.Job("job").record.uid;
  const size_t records = world_.controller().Saves(uid).size();
  FolderView folder;
  folder.steps = {committed_};
  folder.found = {FoundStep(committed_)};
  world_.controller().NoteFolder(uid, folder);
  EXPECT_EQ(world_.controller().Saves(uid).size(), records);
}

}  // namespace
}  // namespace ravel::coordinator
