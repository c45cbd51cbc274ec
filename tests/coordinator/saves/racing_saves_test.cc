// Two coordinators at one checkpoint folder: what one of them removes while the other publishes it.

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/store/memory_store.h"
#include "coordinator/saves/retention.h"
#include "coordinator/saves/saves.h"
#include "coordinator/saves/step_inspection.h"
#include "tests/testing/saved_state.h"

namespace ravel::coordinator {
namespace {

using ::testing::HasSubstr;

constexpr ckpt::AttemptKey kRaced = {.step = 20, .epoch = 1, .attempt = 1};

testing::SavedWorld RacedWorld() {
  return testing::MakeWorld(testing::InventoryOf({{5, 3}, {4}}), 2, 20261127);
}

// Runs `hook` once, before a folder gets its name as a step.
class InterruptedStore : public store::MemoryStore {
 public:
  absl::Status PublishIfAbsent(std::string_view from, std::string_view to) override {
    if (hook && ckpt::ParseStepName(to)) {
      std::exchange(hook, nullptr)();
    }
    return MemoryStore::PublishIfAbsent(from, to);
  }

  std::function<void()> hook;
};

TEST(RacingSavesTest, AttemptsOfLaterEpochsAreAnotherCoordinators) {
  store::MemoryStore store;
  const testing::SavedWorld saved = RacedWorld();
  const ckpt::AttemptKey later = {.step = 20, .epoch = 2, .attempt = 71};
  ASSERT_TRUE(testing::WriteAllRanks(store, saved, kRaced).ok());
  ASSERT_TRUE(testing::WriteAllRanks(store, saved, later).ok());
  EXPECT_EQ(*CleanAttempts(store, std::nullopt, 2), std::vector<ckpt::AttemptKey>{kRaced});
  EXPECT_EQ(*ListAttempts(store), std::vector<ckpt::AttemptKey>{later});
}

TEST(RacingSavesTest, AnAttemptThatIsRemovedWhileItIsPublishedIsWholeOrGone) {
  const testing::SavedWorld saved = RacedWorld();
  for (int64_t at = 0; at < 30; ++at) {
    SCOPED_TRACE(at);
    InterruptedStore store;
    const auto seals = testing::WriteAllRanks(store, saved, kRaced);
    ASSERT_TRUE(seals.ok());
    store.hook = [&] {  // another coordinator, cut off after so many operations
      store.FailFrom(store.operations() + at, absl::UnavailableError("stopped here"));
      WithdrawAttempt(store, kRaced).IgnoreError();
      store.FailFrom(-1, absl::OkStatus());
    };
    const auto committed =
        CommitSave(store, saved.save_plan, testing::ContextOf(saved, kRaced), *seals);
    const bool good =
        InspectStep(store, 20, InspectionDepth::kDeep).condition == StepCondition::kGood;
    EXPECT_EQ(committed.ok(), good) << committed.status();
    EXPECT_EQ(*store::Exists(store, "step-0000000020"), good) << "a torn step";
    ASSERT_TRUE(CleanAttempts(store, std::nullopt).ok());
    EXPECT_TRUE(ListAttempts(store)->empty());
  }
}

TEST(RacingSavesTest, ADescribedAttemptWhoseFilesAreGoneIsPassedOver) {
  InterruptedStore store;
  const testing::SavedWorld saved = RacedWorld();
  const auto seals = testing::WriteAllRanks(store, saved, kRaced);
  store.hook = [&] { store.FailFrom(store.operations(), absl::UnavailableError("stopped")); };
  const SaveContext context = testing::ContextOf(saved, kRaced);
  ASSERT_FALSE(CommitSave(store, saved.save_plan, context, *seals).ok());
  store.FailFrom(-1, absl::OkStatus());
  const std::string model = ckpt::AttemptName(kRaced) + "/model";
  ASSERT_TRUE(store.Withdraw(model + "/" + store.List(model)->front().name).ok());
  const auto settled = SettleDescribedAttempt(store, context.job, kRaced);
  ASSERT_TRUE(settled.ok()) << settled.status();
  EXPECT_EQ(settled->state, SettledState::kIncomplete);
  EXPECT_THAT(settled->reason, HasSubstr("missing"));
}

}  // namespace
}  // namespace ravel::coordinator
