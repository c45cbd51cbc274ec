// A job that goes back while another coordinator still publishes for it, and one that is cut off.

#include "coordinator/saves/rollback.h"

#include <functional>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <absl/strings/match.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/store/blob_tree.h"
#include "common/store/memory_store.h"
#include "coordinator/saves/saves.h"
#include "tests/testing/memory_blobs.h"
#include "tests/testing/saved_state.h"

namespace ravel::coordinator {
namespace {

testing::SavedWorld RolledBackWorld() {
  return testing::MakeWorld(testing::InventoryOf({{5, 3}, {4}}), 1, 20261130);
}

std::vector<int64_t> StepsLeftIn(const store::ObjectStore& store) {
  std::vector<int64_t> steps;
  const absl::StatusOr<StepListing> listing = ListSteps(store);
  EXPECT_TRUE(listing.ok()) << listing.status();
  for (const CommittedStepInfo& info : listing->steps) {
    steps.push_back(info.step);
  }
  return steps;
}

// Runs `hook` once, after a folder has moved aside.
class StoreOfRollback : public store::MemoryStore {
 public:
  absl::Status PublishIfAbsent(std::string_view from, std::string_view to) override {
    const absl::Status published = MemoryStore::PublishIfAbsent(from, to);
    if (hook && absl::StartsWith(std::string(to), "rolled-back-")) {
      std::exchange(hook, nullptr)();
    }
    return published;
  }

  std::function<void()> hook;
};

TEST(RollbackTest, ASealedSaveIsNotPublishedBehindIt) {
  StoreOfRollback store;
  const testing::SavedWorld saved = RolledBackWorld();
  for (const int64_t step : {10, 20}) {
    ASSERT_TRUE(testing::Save(store, saved, {.step = step, .epoch = 4, .attempt = 1}).ok());
  }
  const ckpt::AttemptKey late = {
      .step = 30, .epoch = 4, .attempt = 1, .job_tag = ckpt::JobTag("job-1")};
  const auto seals = testing::WriteAllRanks(store, saved, late);
  ASSERT_TRUE(seals.ok()) << seals.status();
  absl::Status theirs;
  store.hook = [&] {
    theirs = CommitSave(store, saved.save_plan, testing::ContextOf(saved, late), *seals).status();
  };
  ASSERT_TRUE(RollBack(store, {.job = "job-1", .step = 10, .epoch = 5, .end_epoch = 5}).ok());
  EXPECT_FALSE(store.hook) << "20 moved";
  EXPECT_FALSE(theirs.ok());
  EXPECT_EQ(StepsLeftIn(store), std::vector<int64_t>{10});
}

// Each try is of another epoch.
TEST(RollbackTest, OneThatIsCutOffAnywhereIsEndedByTheNextTry) {
  const testing::SavedWorld saved = RolledBackWorld();
  for (int64_t changes = 0;; ++changes) {
    SCOPED_TRACE(changes);
    auto blobs = std::make_unique<testing::CutOffBlobs>();
    testing::CutOffBlobs& raw = *blobs;
    store::BlobTree store(std::move(blobs), "job");
    for (const int64_t step : {10, 20, 30}) {
      ASSERT_TRUE(testing::Save(store, saved, {.step = step, .epoch = 4, .attempt = 1}).ok());
    }
    ASSERT_TRUE(MarkBad(store, 30, "rot").ok());
    raw.left = changes;
    const bool whole =
        RollBack(store, {.job = "job-1", .step = 10, .epoch = 5, .end_epoch = 5}).ok();
    raw.left = testing::CutOffBlobs::kAll;
    const absl::Status again =
        RollBack(store, {.job = "job-1", .step = 10, .epoch = 6, .end_epoch = 6});
    ASSERT_TRUE(again.ok()) << again;
    EXPECT_EQ(StepsLeftIn(store), std::vector<int64_t>{10});
    EXPECT_FALSE(*store::Exists(store, "bad/step-0000000030"));
    std::multiset<std::string> moved;
    for (const std::string folder : {"rolled-back-e5", "rolled-back-e6"}) {
      const auto entries = store.List(folder);
      for (const store::ListedEntry& entry :
           entries.ok() ? *entries : std::vector<store::ListedEntry>()) {
        moved.insert(entry.name);
      }
    }
    EXPECT_EQ(moved.count("step-0000000020"), 1U);
    EXPECT_EQ(moved.count("step-0000000030"), 1U);
    if (whole) {
      EXPECT_GT(changes, 4);
      return;
    }
  }
}

// A save that replaces a BAD step was cut off while it moved that one away.
TEST(RollbackTest, AStepThatHasTheNameOfABadCopyTooMovesThere) {
  auto blobs = std::make_unique<testing::CutOffBlobs>();
  testing::CutOffBlobs& raw = *blobs;
  store::BlobTree store(std::move(blobs), "job");
  const testing::SavedWorld saved = RolledBackWorld();
  for (const int64_t step : {10, 20}) {
    ASSERT_TRUE(testing::Save(store, saved, {.step = step, .epoch = 4, .attempt = 1}).ok());
  }
  ASSERT_TRUE(MarkBad(store, 20, "rot").ok());
  raw.left = 1;
  ASSERT_FALSE(store.PublishIfAbsent("step-0000000020", "bad/step-0000000020.e5.a1.step").ok());
  raw.left = testing::CutOffBlobs::kAll;
  const absl::Status done =
      RollBack(store, {.job = "job-1", .step = 10, .epoch = 6, .end_epoch = 6});
  ASSERT_TRUE(done.ok()) << done;
  EXPECT_EQ(StepsLeftIn(store), std::vector<int64_t>{10});
  EXPECT_TRUE(*store::Exists(store, "bad/step-0000000020.e5.a1.step/COMMIT"));
}

}  // namespace
}  // namespace ravel::coordinator
