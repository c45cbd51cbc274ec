// A save whose step has a folder already, which others change meanwhile.

#include "coordinator/saves/taken_name.h"

#include <memory>
#include <string>
#include <utility>

#include <absl/strings/str_replace.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/store/blob_tree.h"
#include "common/store/memory_store.h"
#include "coordinator/saves/retention.h"
#include "coordinator/saves/saves.h"
#include "coordinator/saves/step_inspection.h"
#include "tests/testing/memory_blobs.h"
#include "tests/testing/saved_state.h"
#include "tests/testing/watched_store.h"

namespace ravel::coordinator {
namespace {

using ::testing::HasSubstr;
using testing::StoreCall;
using testing::WatchedStore;

constexpr ckpt::AttemptKey kFirstSave = {.step = 20, .epoch = 1, .attempt = 1};
constexpr ckpt::AttemptKey kTheirSave = {.step = 20, .epoch = 2, .attempt = 1};
constexpr ckpt::AttemptKey kOurSave = {.step = 20, .epoch = 3, .attempt = 1};
constexpr int64_t kManyCalls = 500;

std::unique_ptr<store::ObjectStore> MakeStore(bool whole) {
  if (whole) {
    return std::make_unique<store::MemoryStore>();
  }
  return std::make_unique<store::BlobTree>(std::make_unique<testing::MemoryBlobs>(), "job");
}

testing::SavedWorld TakenWorld() {
  return testing::MakeWorld(testing::InventoryOf({{5, 3}, {4}}), 2, 7);
}

class TakenNameTest : public ::testing::TestWithParam<bool> {
 protected:
  const testing::SavedWorld saved_ = TakenWorld();
};

INSTANTIATE_TEST_SUITE_P(Stores, TakenNameTest, ::testing::Bool(), [](const auto& whole) {
  return whole.param ? "Files" : "Blobs";
});

// The other coordinator saves the bad step anew at every call of ours.
TEST_P(TakenNameTest, TwoThatSaveABadStepAnewKeepTheFirst) {
  bool tried_all = false;
  int theirs_won = 0;
  for (int64_t at = 0; at < kManyCalls && !tried_all; ++at) {
    SCOPED_TRACE(at);
    const std::unique_ptr<store::ObjectStore> files = MakeStore(GetParam());
    ASSERT_TRUE(testing::Save(*files, saved_, kFirstSave).ok());
    ASSERT_TRUE(MarkBad(*files, 20, "flipped").ok());
    const auto seals = testing::WriteAllRanks(*files, saved_, kOurSave);
    ASSERT_TRUE(seals.ok()) << seals.status();
    absl::Status theirs = absl::UnknownError("not yet");
    WatchedStore ours(
        files.get(), at, [&] { theirs = testing::Save(*files, saved_, kTheirSave).status(); });
    const absl::Status result =
        CommitSave(ours, saved_.save_plan, testing::ContextOf(saved_, kOurSave), *seals).status();
    tried_all = absl::IsUnknown(theirs);
    EXPECT_EQ(result.ok(), !theirs.ok()) << result << " " << theirs;
    EXPECT_TRUE(result.ok() || absl::IsAlreadyExists(result)) << result;
    theirs_won += theirs.ok() ? 1 : 0;
    const absl::StatusOr<StepListing> listing = ListSteps(*files);
    ASSERT_TRUE(listing.ok()) << listing.status();
    ASSERT_EQ(listing->steps.size(), 1U);
    EXPECT_EQ(listing->steps[0].commit.epoch, theirs.ok() ? 2 : 3);
    EXPECT_FALSE(listing->steps[0].bad);
    EXPECT_EQ(InspectStep(*files, 20, InspectionDepth::kDeep).condition, StepCondition::kGood);
  }
  EXPECT_TRUE(tried_all);
  EXPECT_GT(theirs_won, 5);
}

TEST_P(TakenNameTest, AStepThatCannotBeReadNowStays) {
  for (const absl::Status& error :
       {absl::UnavailableError("503"), absl::InternalError("Input/output error")}) {
    const std::unique_ptr<store::ObjectStore> files = MakeStore(GetParam());
    ASSERT_TRUE(testing::Save(*files, saved_, kFirstSave).ok());
    const auto seals = testing::WriteAllRanks(*files, saved_, kOurSave);
    ASSERT_TRUE(seals.ok()) << seals.status();
    WatchedStore ours(files.get(), [&](StoreCall call, std::string_view path) {
      return call == StoreCall::kOpen && path == "step-0000000020/COMMIT" ? error
                                                                          : absl::OkStatus();
    });
    const SaveContext context = testing::ContextOf(saved_, kOurSave);
    EXPECT_EQ(CommitSave(ours, saved_.save_plan, context, *seals).status(), error);
    EXPECT_EQ(ListSteps(*files)->steps.front().commit.epoch, 1);
  }
}

TEST_P(TakenNameTest, AStepOfAnotherFormatVersionStays) {
  const std::unique_ptr<store::ObjectStore> files = MakeStore(GetParam());
  ASSERT_TRUE(testing::Save(*files, saved_, kFirstSave).ok());
  const std::string commit = "step-0000000020/COMMIT";
  const std::string later =
      absl::StrReplaceAll(*store::ReadFile(*files, commit, ckpt::kMaxCommitBytes),
                          {{"\"version\": 1", "\"version\": 9"}});
  ASSERT_TRUE(files->Withdraw(commit).ok());
  ASSERT_TRUE(files->Put(commit, later).ok());
  const absl::Status refused = testing::Save(*files, saved_, kOurSave).status();
  EXPECT_TRUE(absl::IsFailedPrecondition(refused)) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr("COMMIT: version 9"));
  EXPECT_EQ(*store::ReadFile(*files, commit, ckpt::kMaxCommitBytes), later);
}

// A store of objects has both names of a step whose move to bad/ was cut off, and takes no third.
TEST(TakenNameOfObjects, AMoveThatWasCutOffHoldsUpNoLaterSave) {
  const testing::SavedWorld saved = TakenWorld();
  bool whole = false;
  for (int64_t changes = 0; changes < kManyCalls && !whole; ++changes) {
    SCOPED_TRACE(changes);
    auto blobs = std::make_unique<testing::CutOffBlobs>();
    testing::CutOffBlobs& raw = *blobs;
    store::BlobTree files(std::move(blobs), "job");
    ASSERT_TRUE(testing::Save(files, saved, kFirstSave).ok());
    ASSERT_TRUE(MarkBad(files, 20, "flipped").ok());
    const auto seals = testing::WriteAllRanks(files, saved, kTheirSave);
    ASSERT_TRUE(seals.ok()) << seals.status();
    raw.left = changes;
    whole = CommitSave(files, saved.save_plan, testing::ContextOf(saved, kTheirSave), *seals).ok();
    raw.left = testing::CutOffBlobs::kAll;
    const absl::Status ours = testing::Save(files, saved, kOurSave).status();
    EXPECT_TRUE(ours.ok() || absl::IsAlreadyExists(ours)) << ours;
    EXPECT_EQ(InspectStep(files, 20, InspectionDepth::kDeep).condition, StepCondition::kGood);
  }
  EXPECT_TRUE(whole);
}

// Retention ends the deletion of the earlier step at every call of ours.
TEST_P(TakenNameTest, AHalfDeletedStepThatGoesMeanwhileIsNoFailure) {
  bool tried_all = false;
  for (int64_t at = 0; at < kManyCalls && !tried_all; ++at) {
    SCOPED_TRACE(at);
    const std::unique_ptr<store::ObjectStore> files = MakeStore(GetParam());
    ASSERT_TRUE(testing::Save(*files, saved_, kFirstSave).ok());
    ASSERT_TRUE(files->Put("step-0000000020/DELETED", "").ok());
    ASSERT_TRUE(files->Withdraw("step-0000000020/COMMIT").ok());
    const auto seals = testing::WriteAllRanks(*files, saved_, kOurSave);
    ASSERT_TRUE(seals.ok()) << seals.status();
    absl::Status retained = absl::UnknownError("not yet");
    WatchedStore ours(
        files.get(), at, [&] { retained = ApplyRetention(*files, {.keep_last = 1}, {}).status(); });
    const auto result =
        CommitSave(ours, saved_.save_plan, testing::ContextOf(saved_, kOurSave), *seals);
    tried_all = absl::IsUnknown(retained);
    EXPECT_TRUE(tried_all || retained.ok()) << retained;
    EXPECT_TRUE(result.ok()) << result.status();
    EXPECT_EQ(InspectStep(*files, 20, InspectionDepth::kDeep).condition, StepCondition::kGood);
  }
  EXPECT_TRUE(tried_all);
}

}  // namespace
}  // namespace ravel::coordinator
