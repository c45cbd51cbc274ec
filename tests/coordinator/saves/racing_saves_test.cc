// Two coordinators at one checkpoint folder: what one of them removes while the other publishes it.

#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <absl/strings/str_cat.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/mutex.h"
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
    EXPECT_EQ(*store::Exists(store, "step-0000000020"), good)
        << "a torn step: " << committed.status();
    ASSERT_TRUE(CleanAttempts(store, std::nullopt).ok());
    EXPECT_TRUE(ListAttempts(store)->empty());
  }
}

// Objects for two threads of which one runs at a time. The second begins before the first one's
// operation `start`, stops after `some` operations of its own, and goes on before the first one's
// operation `go_on`, or when the first has ended.
class TurnBlobs : public testing::MemoryBlobs {
 public:
  struct Turns {
    int64_t start = 0;
    int64_t some = 0;
    int64_t go_on = 0;
  };
  // Operations of `first`.
  int64_t Run(const Turns& turns,
              const std::function<void()>& first,
              const std::function<void()>& second) {
    turns_ = turns;
    std::thread other([&] {
      is_second_ = true;
      AwaitTurn();
      second();
      const MutexLock lock(turn_mutex_);
      ended_ = true;
      changed_.NotifyAll();
    });
    runs_ = true;
    first();
    runs_ = false;
    Allow(kAll);
    other.join();
    return operations_;
  }

  absl::Status PutIfAbsent(const std::string& key, std::string_view content) override {
    Step();
    return MemoryBlobs::PutIfAbsent(key, content);
  }
  absl::StatusOr<store::BlobFacts> Head(const std::string& key) const override {
    Step();
    return MemoryBlobs::Head(key);
  }
  absl::Status ReadAt(const store::BlobFacts& blob,
                      int64_t offset,
                      std::span<std::byte> out) const override {
    Step();
    return MemoryBlobs::ReadAt(blob, offset, out);
  }
  absl::StatusOr<store::BlobListing> List(const std::string& prefix, Depth depth) const override {
    Step();
    return MemoryBlobs::List(prefix, depth);
  }
  absl::Status Delete(const std::string& key) override {
    Step();
    return MemoryBlobs::Delete(key);
  }

 private:
  static constexpr int64_t kAll = int64_t{1} << 40;

  void Step() const {
    if (is_second_) {
      AwaitTurn();
    } else if (runs_) {
      const int64_t at = operations_++;
      if (at == turns_.start) {
        Allow(turns_.some);
      }
      if (at == turns_.go_on) {
        Allow(kAll);
      }
    }
  }
  void AwaitTurn() const {
    const MutexLock lock(turn_mutex_);
    while (allowed_ == 0) {
      waits_ = true;
      changed_.NotifyAll();
      changed_.Wait(turn_mutex_);
    }
    waits_ = false;
    --allowed_;
  }
  void Allow(int64_t count) const {
    const MutexLock lock(turn_mutex_);
    allowed_ += count;
    waits_ = false;
    changed_.NotifyAll();
    while (!ended_ && !(waits_ && allowed_ == 0)) {
      changed_.Wait(turn_mutex_);
    }
  }

  static inline thread_local bool is_second_ = false;
  Turns turns_;
  bool runs_ = false;               // of the first thread alone
  mutable int64_t operations_ = 0;  // of the first thread alone
  mutable Mutex turn_mutex_;
  mutable CondVar changed_;
  mutable int64_t allowed_ ABSL_GUARDED_BY(turn_mutex_) = 0;
  mutable bool waits_ ABSL_GUARDED_BY(turn_mutex_) = false;
  bool ended_ ABSL_GUARDED_BY(turn_mutex_) = false;
};

// Objects have no rename: a removal takes the files of an attempt one by one, in any moments of a
// commit. A trainer removes a save that no coordinator has answered for while the next one commits
// it.
TEST(RacingSavesTest, AnAttemptOfObjectsThatIsRemovedWhileItIsPublishedIsWholeOrGone) {
  const testing::SavedWorld saved = RacedWorld();
  std::mt19937 random(20261128);
  int64_t commit_operations = 100;
  int64_t committed_ones = 0;
  int64_t removed_ones = 0;
  for (int round = 0; round < 600; ++round) {
    TurnBlobs::Turns turns = {.start = static_cast<int64_t>(random() % commit_operations),
                              .some = static_cast<int64_t>(random() % 30)};
    turns.go_on = turns.start + static_cast<int64_t>(random() % (commit_operations - turns.start));
    SCOPED_TRACE(absl::StrCat(turns.start, " ", turns.some, " ", turns.go_on));
    auto blobs = std::make_unique<TurnBlobs>();
    TurnBlobs& raw = *blobs;
    store::BlobTree store(std::move(blobs), "job");
    const auto seals = testing::WriteAllRanks(store, saved, kRaced);
    ASSERT_TRUE(seals.ok()) << seals.status();
    absl::StatusOr<CommittedStepInfo> committed = absl::UnknownError("not yet");
    const int64_t operations = raw.Run(
        turns,
        [&] {
          committed = CommitSave(store, saved.save_plan, testing::ContextOf(saved, kRaced), *seals);
        },
        [&] { WithdrawAttempt(store, kRaced).IgnoreError(); });
    if (committed.ok()) {
      commit_operations = operations + 2;
    }
    const bool good =
        InspectStep(store, 20, InspectionDepth::kDeep).condition == StepCondition::kGood;
    EXPECT_EQ(committed.ok(), good) << committed.status();
    EXPECT_EQ(*store::Exists(store, "step-0000000020"), good)
        << "a torn step: " << committed.status();
    (good ? committed_ones : removed_ones) += 1;
    ASSERT_TRUE(CleanAttempts(store, std::nullopt).ok());
    EXPECT_TRUE(ListAttempts(store)->empty());
    EXPECT_EQ(InspectStep(store, 20, InspectionDepth::kDeep).condition == StepCondition::kGood,
              good);
  }
  EXPECT_GT(committed_ones, 0);
  EXPECT_GT(removed_ones, 0);
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

// One coordinator describes a save, removes its seals and is cut off after some operations, or
// publishes it, at every call of another one that settles it.
TEST(RacingSavesTest, ASaveWhoseSealsGoWhileItIsSettledIsCommitted) {
  const testing::SavedWorld saved = RacedWorld();
  const SaveContext context = testing::ContextOf(saved, kRaced);
  bool published = false;
  for (int64_t operations = 8; !published; ++operations) {
    bool interrupted = true;
    for (int64_t at = 0; interrupted; ++at) {
      SCOPED_TRACE(absl::StrCat(operations, " ", at));
      store::MemoryStore store;
      const auto seals = testing::WriteAllRanks(store, saved, kRaced);
      ASSERT_TRUE(seals.ok()) << seals.status();
      interrupted = false;
      testing::WatchedStore watched(&store, at, [&] {
        interrupted = true;
        store.FailFrom(store.operations() + operations, absl::UnavailableError("stopped here"));
        const bool all = CommitSave(store, saved.save_plan, context, *seals).ok();
        published = published || (at == 0 && all);
        store.FailFrom(-1, absl::OkStatus());
      });
      const auto settled = SettleAttempt(watched, saved.save_plan, context);
      ASSERT_TRUE(settled.ok()) << settled.status();
      EXPECT_EQ(settled->state, SettledState::kCommitted) << settled->reason;
      EXPECT_EQ(InspectStep(store, 20, InspectionDepth::kDeep).condition, StepCondition::kGood);
    }
  }
}

}  // namespace
}  // namespace ravel::coordinator
