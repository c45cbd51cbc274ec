#include "coordinator/saves/store_checkpoint_keeper.h"

#include <chrono>
#include <filesystem>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/plan/layout/mesh.h"
#include "common/plan/numerics.h"
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

class StoreCheckpointKeeperTest : public KeeperFolder {};

TEST_F(StoreCheckpointKeeperTest, StepsThatTheRecordLacksAreDescribed) {
  ASSERT_TRUE(Launch(ours_).ok());
  for (const int64_t step : {10, 20, 30}) {
    SaveStep(step);
  }
  ASSERT_TRUE(MarkBad(files_, 20, "rot").ok());
  const absl::StatusOr<FolderView> view = keeper_.Look(ours_, {});
  ASSERT_TRUE(view.ok()) << view.status();
  const absl::StatusOr<StepListing> listing = ListSteps(files_);
  ASSERT_TRUE(listing.ok()) << listing.status();
  ASSERT_EQ(view->found.size(), 3U);
  for (size_t i = 0; i < 3; ++i) {
    const FoundSave& found = view->found[i];
    const CommittedStepInfo& info = listing->steps[2 - i];  // newest first
    EXPECT_EQ(found.saved.save.step, 10 + 10 * static_cast<int64_t>(i));
    EXPECT_EQ(found.saved.save.path, files_.Locate(info.directory));
    EXPECT_EQ(found.saved.save.bytes, info.commit.bytes);
    EXPECT_GT(found.saved.save.bytes, 0);
    EXPECT_EQ(found.saved.save.files, info.commit.files);
    EXPECT_EQ(found.saved.save.save_id.size(), 2 * info.commit.save_id.size());
    EXPECT_EQ(found.saved.epoch, 1);
    EXPECT_EQ(found.saved.attempt, 1);
    EXPECT_EQ(found.saved.world_size, 1);
    EXPECT_EQ(found.bad, i == 1);
  }
  // A restore above the recorded commit tells of them, too.
  const auto restore = keeper_.PrepareRestore(ours_,
                                              {.committed_step = 10,
                                               .has_commit = true,
                                               .has_run = true,
                                               .known_saves = {view->found[0].saved.save.save_id}});
  ASSERT_TRUE(restore.ok()) << restore.status();
  EXPECT_EQ(restore->step, 30);
  ASSERT_EQ(restore->found.size(), 2U);
  EXPECT_EQ(restore->found[0].saved.save.step, 20);
  EXPECT_EQ(restore->found[1].saved.save.step, 30);
  const absl::StatusOr<RestorePoint> again = Relaunch(30);
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_TRUE(again->found.empty()) << "the record is not behind";
  // A commit of another job is no step of this one.
  std::set<std::string> known;
  for (const FoundSave& found : view->found) {
    known.insert(found.saved.save.save_id);
  }
  const absl::StatusOr<FolderView> none = keeper_.Look(ours_, known);
  ASSERT_TRUE(none.ok()) << none.status();
  EXPECT_TRUE(none->found.empty());
  EXPECT_EQ(none->steps.size(), 3U);
}

TEST_F(StoreCheckpointKeeperTest, RetentionKeepsTheLastStepsAndThePeriodicOnes) {
  ASSERT_TRUE(Launch(ours_).ok());
  for (const int64_t step : {10, 20, 30, 40, 50}) {
    SaveStep(step);
  }
  ours_.spec.checkpoint.keep_every_steps = 20;
  const absl::StatusOr<std::vector<int64_t>> deleted = keeper_.Retain(ours_, -1);
  ASSERT_TRUE(deleted.ok()) << deleted.status();
  EXPECT_EQ(*deleted, (std::vector<int64_t>{10, 30}));
  EXPECT_EQ(Steps(), (std::set<int64_t>{20, 40, 50}));
}

// Two coordinators of one job: each lists while the other deletes.
TEST_F(StoreCheckpointKeeperTest, RetentionsAtTheSameTimeKeepTheSameSteps) {
  ASSERT_TRUE(Launch(ours_).ok());
  StoreCheckpointKeeper other(&clock_);
  int64_t step = 0;
  // A round is some eighty fsyncs: a disk that takes long for each makes fewer.
  const auto enough = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  for (int round = 0; round < 25 && (round < 8 || std::chrono::steady_clock::now() < enough);
       ++round) {
    for (int i = 0; i < 4; ++i) {
      SaveStep(++step);
    }
    absl::StatusOr<std::vector<int64_t>> theirs;
    std::thread thread([&] { theirs = other.Retain(ours_, -1); });
    const absl::StatusOr<std::vector<int64_t>> mine = keeper_.Retain(ours_, -1);
    thread.join();
    ASSERT_TRUE(mine.ok()) << mine.status();
    ASSERT_TRUE(theirs.ok()) << theirs.status();
    ASSERT_EQ(Steps(), std::set<int64_t>{step});
    ASSERT_EQ(ListSteps(files_)->damaged.size(), 0U);
  }
}

TEST_F(StoreCheckpointKeeperTest, AdmissionMakesNoFolderAndTouchesNone) {
  ASSERT_TRUE(keeper_.Check(ours_).ok());
  EXPECT_FALSE(std::filesystem::exists(files_.root()));
  // A folder that only looks like a probe of ours is somebody's.
  std::filesystem::create_directories(files_.root() + "/write-probe/precious");
  ASSERT_TRUE(keeper_.Check(ours_).ok());
  EXPECT_TRUE(std::filesystem::exists(files_.root() + "/write-probe/precious"));
  ours_.spec.checkpoint.store = "file:///proc";
  EXPECT_THAT(std::string(keeper_.Check(ours_).message()), HasSubstr("spec.checkpoint.store"));
}

TEST_F(StoreCheckpointKeeperTest, AFolderOfAnotherClusterIsNeitherReadNorChanged) {
  ASSERT_TRUE(Launch(ours_).ok());
  SaveStep(10);
  SaveStep(20);
  const std::string attempt = "step-0000000030.e1.a1." + ckpt::JobTagText("job-1") + ".tmp";
  ASSERT_TRUE(files_.MakeDirectory(attempt).ok());
  CheckpointJob theirs = Another("cluster-b", "job-2");
  EXPECT_THAT(std::string(keeper_.Check(theirs).message()), HasSubstr("of another cluster"));
  theirs.spec.checkpoint.resume_from = "none";
  theirs.spec.checkpoint.fresh = true;
  EXPECT_FALSE(keeper_.Check(theirs).ok()) << "not even when asked for";
  EXPECT_FALSE(Launch(theirs).ok());
  EXPECT_FALSE(keeper_.Retain(theirs, -1).ok());
  EXPECT_FALSE(keeper_.Release(theirs, {.has_run = true}).ok());
  EXPECT_FALSE(keeper_.Commit(theirs, SaveRequest()).ok());
  EXPECT_EQ(Steps(), (std::set<int64_t>{10, 20}));
  EXPECT_TRUE(*store::Exists(files_, attempt));
  EXPECT_EQ(Relaunch(20)->step, 20);
}

TEST_F(StoreCheckpointKeeperTest, AStoreThatIsAwayEmptyOrReplacedIsNeverAStartFromNothing) {
  ASSERT_TRUE(Launch(ours_).ok());
  SaveStep(10);
  const std::string away = scratch_.path() + "/away";
  std::filesystem::rename(files_.root(), away);
  EXPECT_TRUE(absl::IsUnavailable(Relaunch(10).status())) << "unmounted";
  EXPECT_FALSE(std::filesystem::exists(files_.root())) << "and nothing is made in its place";
  std::filesystem::create_directory(files_.root());
  EXPECT_TRUE(absl::IsUnavailable(Relaunch(10).status())) << "emptied";
  // It had no commit yet, but has run: its folder is known to exist.
  EXPECT_TRUE(absl::IsUnavailable(keeper_.PrepareRestore(ours_, {.has_run = true}).status()));
  ASSERT_TRUE(ClaimFolder(files_, {"cluster-b", "job-2", "default/job", 0}, Takeover::kNever).ok());
  EXPECT_TRUE(absl::IsFailedPrecondition(Relaunch(10).status())) << "replaced by another";
  std::filesystem::remove_all(files_.root());
  std::filesystem::rename(away, files_.root());
  EXPECT_EQ(Relaunch(10)->step, 10) << "back";
}

TEST_F(StoreCheckpointKeeperTest, AFolderOfAnEarlierReleaseGetsItsOwnerByProofOnly) {
  ASSERT_TRUE(files_.MakeRoot().ok());
  SaveStep(10);
  EXPECT_TRUE(absl::IsUnavailable(Relaunch(20).status())) << "not the step that is recorded";
  EXPECT_FALSE(*store::Exists(files_, "OWNER"));
  EXPECT_EQ(Relaunch(10)->step, 10);
  EXPECT_TRUE(*store::Exists(files_, "OWNER"));
}

TEST_F(StoreCheckpointKeeperTest, DeletedCheckpointsOfAReaderThatWasKilledGo) {
  ASSERT_TRUE(Launch(ours_).ok());
  SaveStep(10);
  const int64_t now_s = clock_.WallMs() / 1000;
  ASSERT_TRUE(PinStep(files_, {.step = 10, .holder = "reader-1", .until_s = now_s + 5}, "").ok());
  ASSERT_TRUE(keeper_.RemoveAll(ours_).ok());
  EXPECT_EQ(Steps(), std::set<int64_t>{10}) << "being read";
  clock_.AdvanceMs(7000);
  ASSERT_TRUE(keeper_.RemoveAll(ours_).ok());
  EXPECT_FALSE(*store::Exists(files_, "step-0000000010"));
}

TEST_F(StoreCheckpointKeeperTest, TheStepThatALaunchReadsIsNotDeletedUnderIt) {
  ASSERT_TRUE(Launch(ours_).ok());
  SaveStep(10);
  ASSERT_EQ(Relaunch(10)->step, 10);
  SaveStep(20);
  EXPECT_TRUE(keeper_.Retain(ours_, -1)->empty());
  keeper_.EndRestore("job-1");
  EXPECT_EQ(*keeper_.Retain(ours_, -1), std::vector<int64_t>{10});
}

TEST_F(StoreCheckpointKeeperTest, TheStepThatARollbackAsksForIsKeptUntilTheLaunchAfterIt) {
  ASSERT_TRUE(Launch(ours_).ok());
  SaveStep(10);
  SaveStep(20);
  ASSERT_TRUE(keeper_.CheckRollback(ours_, 10).ok());
  EXPECT_FALSE(keeper_.CheckRollback(ours_, 15).ok());
  // Commits that were on their way when it was asked for.
  SaveStep(30);
  SaveStep(40);
  EXPECT_EQ(*keeper_.Retain(ours_, -1), (std::vector<int64_t>{20, 30}));
  RestoreQuery query;
  query.committed_step = query.rollback_step = 10;
  query.has_commit = query.has_run = true;
  const absl::StatusOr<RestorePoint> start = keeper_.PrepareRestore(ours_, query);
  ASSERT_TRUE(start.ok()) << start.status();
  EXPECT_EQ(start->step, 10);
  EXPECT_EQ(Steps(), (std::set<int64_t>{10}));
  keeper_.EndRestore("job-1");
  SaveStep(20);
  EXPECT_EQ(*keeper_.Retain(ours_, -1), std::vector<int64_t>{10});
}

TEST_F(StoreCheckpointKeeperTest, AFinishedSaveWhoseSealsWereLostIsCommittedBeforeCleaning) {
  ASSERT_TRUE(Launch(ours_).ok());
  SaveStep(10);
  const testing::SavedWorld saved = testing::MakeWorld(testing::InventoryOf({{5, 3}, {4}}), 2, 7);
  const uint32_t tag = ckpt::JobTag("job-1");
  for (const int64_t step : {20, 30}) {
    const ckpt::AttemptKey key = {.step = step, .epoch = 4, .attempt = 1, .job_tag = tag};
    ASSERT_TRUE(testing::WriteAllRanks(files_, saved, key).ok());
  }
  const ckpt::AttemptKey torn = {.step = 40, .epoch = 4, .attempt = 1, .job_tag = tag};
  ASSERT_TRUE(testing::WriteRank(files_, saved, torn, 1).ok());
  RestoreQuery query = {.committed_step = 10, .has_commit = true, .has_run = true};
  std::vector<int64_t> planned;
  query.plan = [&](int64_t ranks) -> absl::StatusOr<std::shared_ptr<const PlannedWorld>> {
    planned.push_back(ranks);
    auto world = std::make_shared<PlannedWorld>();
    world->plan = testing::MakeWorld(testing::InventoryOf({{5, 3}, {4}}), ranks, 7).world;
    return std::shared_ptr<const PlannedWorld>(world);
  };
  const absl::StatusOr<RestorePoint> restore = keeper_.PrepareRestore(ours_, query);
  ASSERT_TRUE(restore.ok()) << restore.status();
  EXPECT_EQ(restore->step, 30);
  ASSERT_TRUE(restore->settled);
  EXPECT_EQ(restore->settled->save.step, 30);
  EXPECT_EQ(restore->settled->epoch, 4);
  EXPECT_EQ(restore->settled->world_size, 2);
  EXPECT_EQ(planned, (std::vector<int64_t>{1, 2})) << "one seal of 40, then both of 30";
  EXPECT_TRUE(ListAttempts(files_)->empty());
  EXPECT_EQ(Steps(), (std::set<int64_t>{10, 30}));
}

// Another coordinator describes the save, which removes its seals, while this one plans.
TEST_F(StoreCheckpointKeeperTest, AFinishedSaveThatAnotherCoordinatorDescribesIsCommitted) {
  ASSERT_TRUE(Launch(ours_).ok());
  SaveStep(10);
  const testing::SavedWorld saved = testing::MakeWorld(testing::InventoryOf({{5, 3}, {4}}), 2, 7);
  const ckpt::AttemptKey key = {
      .step = 20, .epoch = 4, .attempt = 1, .job_tag = ckpt::JobTag("job-1")};
  const auto seals = testing::WriteAllRanks(files_, saved, key);
  ASSERT_TRUE(seals.ok()) << seals.status();
  RestoreQuery query = {.committed_step = 10, .has_commit = true, .has_run = true};
  query.plan = [&](int64_t) -> absl::StatusOr<std::shared_ptr<const PlannedWorld>> {
    testing::WatchedStore other(&files_, [](testing::StoreCall call, std::string_view path) {
      const bool publishes = call == testing::StoreCall::kPublish && path.ends_with(".tmp");
      return publishes ? absl::UnavailableError("stopped here") : absl::OkStatus();
    });
    EXPECT_FALSE(CommitSave(other, saved.save_plan, testing::ContextOf(saved, key), *seals).ok());
    return absl::NotFoundError("no world of that size");  // seals were missing already
  };
  const absl::StatusOr<RestorePoint> restore = keeper_.PrepareRestore(ours_, query);
  ASSERT_TRUE(restore.ok()) << restore.status();
  EXPECT_EQ(restore->step, 20);
  ASSERT_TRUE(restore->settled);
  EXPECT_EQ(restore->settled->save.step, 20);
}

TEST_F(StoreCheckpointKeeperTest, AManifestNamesEveryAxisAndHowItsJobComputes) {
  ASSERT_TRUE(Launch(ours_).ok());
  ours_.spec.virtual_ranks = 8;
  const testing::SavedWorld saved = TwoReplicas();
  auto world = std::make_shared<PlannedWorld>();
  world->plan = saved.world;
  const ckpt::AttemptKey key = {
      .step = 10, .epoch = 1, .attempt = 1, .job_tag = ckpt::JobTag("job-1")};
  const auto seals = testing::WriteAllRanks(files_, saved, key);
  ASSERT_TRUE(seals.ok()) << seals.status();
  const SaveRequest request = {
      .job_uid = "job-1", .step = 10, .epoch = 1, .attempt = 1, .world = world, .seals = *seals};
  const absl::StatusOr<CommittedSave> commit = keeper_.Commit(ours_, request);
  ASSERT_TRUE(commit.ok()) << commit.status();
  const auto step = store::CommittedStep::Open(&files_, "step-0000000010");
  ASSERT_TRUE(step.ok()) << step.status();
  const std::vector<ckpt::MeshAxisRecord> mesh = {{"replicate", 2}, {"shard", 2}};
  EXPECT_EQ(step->manifest().mesh, mesh);
  EXPECT_EQ(step->manifest().numerics, plan::NumericsOf(ours_.spec));
  EXPECT_EQ(step->manifest().virtual_ranks, 8);
  // Described, but not yet renamed when the coordinator died: the mesh tells how many ranks it has.
  std::filesystem::rename(files_.Locate("step-0000000010"), files_.Locate(ckpt::AttemptName(key)));
  RestoreQuery query = {.has_run = true};
  query.plan = [&](int64_t) { return std::shared_ptr<const PlannedWorld>(request.world); };
  const absl::StatusOr<RestorePoint> restore = keeper_.PrepareRestore(ours_, query);
  ASSERT_TRUE(restore.ok()) << restore.status();
  ASSERT_TRUE(restore->settled);
  EXPECT_EQ(restore->settled->world_size, 4);
  EXPECT_EQ(restore->settled->save.mesh, "replicate 2, shard 2");
  EXPECT_EQ(commit->mesh, "replicate 2, shard 2");
}

TEST_F(StoreCheckpointKeeperTest, OtherNumericsAreRefusedBeforeAdmissionAndToldAtALaunch) {
  ASSERT_TRUE(Launch(ours_).ok());
  SaveStep(10, "compute=bf16 device=gpu virtualRanks=4");
  ours_.spec.virtual_ranks = 4;
  const std::string changed = "compute was bf16 and is fp32; device was gpu and is cpu";
  EXPECT_EQ(Relaunch(10)->numerics_change, changed);
  for (const std::string& start : {std::string("10"), files_.Locate("step-0000000010")}) {
    CheckpointJob next = Another("cluster-a", "new");
    next.spec.name = start == "10" ? "job" : "next";
    next.spec.checkpoint.resume_from = start;
    const absl::Status refused = keeper_.Check(next);
    EXPECT_TRUE(absl::IsInvalidArgument(refused)) << refused;
    EXPECT_THAT(std::string(refused.message()), HasSubstr("spec.checkpoint.resumeFrom: "));
    EXPECT_THAT(std::string(refused.message()), HasSubstr(changed));
    next.spec.checkpoint.allow_numerics_change = true;
    EXPECT_TRUE(keeper_.Check(next).ok()) << keeper_.Check(next);
    EXPECT_EQ(Launch(next)->numerics_change, changed);
  }
}

TEST_F(StoreCheckpointKeeperTest, AStepOfAReleaseWithoutNumericsIsResumed) {
  ASSERT_TRUE(Launch(ours_).ok());
  SaveStep(10, "f32");
  EXPECT_EQ(Relaunch(10)->numerics_change, "");
  CheckpointJob next = Another("cluster-a", "new");
  next.spec.name = "next";
  next.spec.checkpoint.resume_from = files_.Locate("step-0000000010");
  EXPECT_TRUE(keeper_.Check(next).ok());
}

TEST_F(StoreCheckpointKeeperTest, AManifestByteIsProofAndNothingIsLeft) {
  ASSERT_TRUE(Launch(ours_).ok());
  SaveStep(10);
  const std::string path = files_.Locate("step-0000000010/manifest.pb");
  std::string bytes = testing::ReadText(path);
  bytes[40] = static_cast<char>(bytes[40] ^ 1);
  testing::WriteText(path, bytes);
  const absl::Status none = Relaunch(10).status();
  EXPECT_TRUE(absl::IsDataLoss(none)) << none;
  EXPECT_THAT(std::string(none.message()), HasSubstr("step 10: manifest.pb: checksum"));
}

TEST_F(StoreCheckpointKeeperTest, ASecondReaderDecidesWhetherAStepIsDamaged) {
  ASSERT_TRUE(Launch(ours_).ok());
  SaveStep(10);
  EXPECT_EQ(*keeper_.Condemn(ours_, 10, "a trainer's word"), StepVerdict::kGood);
  EXPECT_EQ(Steps(), std::set<int64_t>{10}) << "not marked";
  const std::string path =
      files_.Locate("step-0000000010/model/shard-00001-model-00001-of-00001.safetensors");
  const std::string bytes = testing::ReadText(path);
  testing::WriteText(path, bytes.substr(0, bytes.size() - 1));
  EXPECT_EQ(*keeper_.Condemn(ours_, 10, "truncated"), StepVerdict::kUnreadable);
  EXPECT_EQ(Steps(), std::set<int64_t>{10});
  std::string flipped = bytes;
  flipped.back() = static_cast<char>(flipped.back() ^ 1);
  testing::WriteText(path, flipped);
  EXPECT_EQ(*keeper_.Condemn(ours_, 10, "crc32c"), StepVerdict::kDamaged);
  EXPECT_TRUE(ListSteps(files_)->steps.front().bad);
  ASSERT_TRUE(keeper_.Mark(ours_, 10, MarkChange::kUnmarkBad, "").ok());
  EXPECT_FALSE(ListSteps(files_)->steps.front().bad);
}

TEST_F(StoreCheckpointKeeperTest, OldLeftoversGoAndAreListedBefore) {
  ASSERT_TRUE(Launch(ours_).ok());
  SaveStep(10);
  ASSERT_TRUE(store::MakeDirectories(files_, "bad/step-0000000005.e1.a1.step").ok());
  ASSERT_TRUE(store::MakeDirectories(files_, "rolled-back-e3/step-0000000020").ok());
  const absl::StatusOr<FolderView> view = keeper_.Look(ours_, {});
  ASSERT_TRUE(view.ok()) << view.status();
  EXPECT_EQ(view->steps, std::vector<int64_t>{10});
  ASSERT_EQ(view->leftovers.size(), 2U);
  const int64_t changed_ms = view->leftovers.front().changed_ms;
  ASSERT_GT(changed_ms, 0);
  ASSERT_TRUE(RemoveOldLeftovers(files_, "job-1", changed_ms + kLeftoverAgeMs - 60'000)->empty());
  EXPECT_EQ(*RemoveOldLeftovers(files_, "job-1", changed_ms + kLeftoverAgeMs + 60'000),
            std::vector<std::string>{"bad/step-0000000005.e1.a1.step"});
}

TEST_F(StoreCheckpointKeeperTest, JobsOfTwoNamespacesNeverShareAFolder) {
  plan::JobSpec spec = ours_.spec;
  const std::string root = keeper_.Root(spec);
  spec.namespace_name = "team";
  EXPECT_NE(keeper_.Root(spec), root);
}

}  // namespace
}  // namespace ravel::coordinator
