// A job that goes back while another coordinator still publishes for it, and one that is cut off.

#include "coordinator/saves/rollback.h"

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include <absl/strings/match.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/store/memory_store.h"
#include "coordinator/saves/saves.h"
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
class WatchedStore : public store::MemoryStore {
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
  WatchedStore store;
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

}  // namespace
}  // namespace ravel::coordinator
