// Deletion of steps while others save, pin and delete in the same folder.

#include "coordinator/saves/retention.h"

#include <functional>
#include <memory>
#include <string>

#include <absl/strings/str_cat.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/store/blob_tree.h"
#include "common/store/memory_store.h"
#include "coordinator/saves/checkpoint_pins.h"
#include "coordinator/saves/saves.h"
#include "coordinator/saves/step_inspection.h"
#include "tests/testing/memory_blobs.h"
#include "tests/testing/saved_state.h"
#include "tests/testing/watched_store.h"

namespace ravel::coordinator {
namespace {

using store::ObjectStore;

constexpr int64_t kCallsToTry = 500;
constexpr int64_t kPinnedUntil = 50;

class DeletionTest : public ::testing::TestWithParam<bool> {
 protected:
  std::unique_ptr<ObjectStore> MakeStore() const {
    if (GetParam()) {
      return std::make_unique<store::MemoryStore>();
    }
    return std::make_unique<store::BlobTree>(std::make_unique<testing::MemoryBlobs>(), "job");
  }
  absl::Status SaveStep(ObjectStore& files, int64_t step, int64_t epoch) const {
    return testing::Save(files, saved_, {.step = step, .epoch = epoch, .attempt = epoch}).status();
  }
  static absl::Status Retain(ObjectStore& files) {
    return ApplyRetention(files, {.keep_last = 1}, {}).status();
  }
  static bool IsGood(const ObjectStore& files, int64_t step) {
    return InspectStep(files, step, InspectionDepth::kDeep).condition == StepCondition::kGood;
  }
  // One retention for each call that it makes: `prepare` makes the folder, `meanwhile` runs before
  // that call, `check` looks at the folder afterwards.
  void AtEveryCall(const std::function<void(ObjectStore&)>& prepare,
                   const std::function<void(ObjectStore&)>& meanwhile,
                   const std::function<void(ObjectStore&)>& check) const {
    for (int64_t at = 0; at < kCallsToTry; ++at) {
      SCOPED_TRACE(at);
      const std::unique_ptr<ObjectStore> files = MakeStore();
      prepare(*files);
      bool ran = false;
      testing::WatchedStore watched(files.get(), at, [&] {
        ran = true;
        meanwhile(*files);
      });
      const absl::Status retained = Retain(watched);
      EXPECT_TRUE(retained.ok()) << retained;
      if (!ran) {
        EXPECT_GT(at, 5);
        return;  // all calls have been tried
      }
      check(*files);
    }
    FAIL() << "retention makes more calls than were tried";
  }

  const testing::SavedWorld saved_ = testing::MakeWorld(testing::InventoryOf({{5, 3}, {4}}), 2, 7);
};

INSTANTIATE_TEST_SUITE_P(Stores, DeletionTest, ::testing::Bool(), [](const auto& whole) {
  return whole.param ? "Files" : "Blobs";
});

// A crash left 150 half deleted, the job fell back to 100 and saves 150 anew.
TEST_P(DeletionTest, ThatIsSlowLeavesTheNextStepOfTheNumber) {
  AtEveryCall(
      [&](ObjectStore& files) {
        ASSERT_TRUE(SaveStep(files, 100, 1).ok());
        ASSERT_TRUE(SaveStep(files, 150, 1).ok());
        ASSERT_TRUE(files.Put("step-0000000150/DELETED", "").ok());
        ASSERT_TRUE(files.Withdraw("step-0000000150/COMMIT").ok());
      },
      [&](ObjectStore& files) {
        const absl::Status saved = SaveStep(files, 150, 2);
        ASSERT_TRUE(saved.ok()) << saved;
      },
      [&](ObjectStore& files) {
        EXPECT_TRUE(IsGood(files, 150));
        EXPECT_EQ(ListSteps(files)->steps.front().step, 150);
        EXPECT_TRUE(ListAttempts(files)->empty());
      });
}

// 150 was not the newest when it was listed; after a rollback it is saved anew.
TEST_P(DeletionTest, OfAStepThatARollbackReplacedLeavesTheNewOne) {
  AtEveryCall(
      [&](ObjectStore& files) {
        for (const int64_t step : {100, 150, 200}) {
          ASSERT_TRUE(SaveStep(files, step, 1).ok());
        }
        ASSERT_TRUE(PinStep(files, {.step = 100}, "").ok());
      },
      [&](ObjectStore& files) {
        ASSERT_TRUE(MoveStepsAbove(files, 100, "rolled-back-e2").ok());
        const absl::Status saved = SaveStep(files, 150, 2);
        ASSERT_TRUE(saved.ok()) << saved;
      },
      [&](ObjectStore& files) {
        EXPECT_TRUE(IsGood(files, 150));
        ASSERT_EQ(ListSteps(files)->steps.front().step, 150);
        EXPECT_EQ(ListSteps(files)->steps.front().commit.epoch, 2);
      });
}

// As before, and the coordinator dies after the first thing that it writes.
TEST_P(DeletionTest, OfAReplacedStepThatIsCutOffDoesNotWithdrawTheNewOne) {
  const std::unique_ptr<ObjectStore> files = MakeStore();
  for (const int64_t step : {100, 150, 200}) {
    ASSERT_TRUE(SaveStep(*files, step, 1).ok());
  }
  bool replaced = false;
  const auto gate = [&](int64_t step) {
    if (step == 150) {
      EXPECT_TRUE(MoveStepsAbove(*files, 100, "rolled-back-e2").ok());
      EXPECT_TRUE(SaveStep(*files, 150, 2).ok());
      replaced = true;
    }
    return step == 150;
  };
  bool wrote = false;
  testing::WatchedStore dying(files.get(), [&](testing::StoreCall call, auto) {
    const bool dead = wrote;
    wrote = wrote || (replaced && call == testing::StoreCall::kPut);
    return dead ? absl::UnavailableError("stopped here") : absl::OkStatus();
  });
  ApplyRetention(dying, {.keep_last = 1}, {}, 0, gate).IgnoreError();
  EXPECT_TRUE(replaced);
  EXPECT_TRUE(IsGood(*files, 150));
}

TEST_P(DeletionTest, ThatWasCutOffUnderItsOtherNameIsEnded) {
  bool renamed = false;
  for (int64_t at = 0; at < kCallsToTry; ++at) {
    SCOPED_TRACE(at);
    const std::unique_ptr<ObjectStore> files = MakeStore();
    ASSERT_TRUE(SaveStep(*files, 100, 1).ok());
    ASSERT_TRUE(SaveStep(*files, 150, 1).ok());
    testing::WatchedStore stopped(files.get(), [count = int64_t{0}, at](auto, auto) mutable {
      return count++ < at ? absl::OkStatus() : absl::UnavailableError("stopped here");
    });
    const bool all = Retain(stopped).ok();
    renamed = renamed || !ListAttempts(*files)->empty();
    EXPECT_TRUE(IsGood(*files, 150));
    ASSERT_TRUE(Retain(*files).ok());
    EXPECT_FALSE(*store::Exists(*files, "step-0000000100"));
    EXPECT_TRUE(ListAttempts(*files)->empty());
    if (all) {
      EXPECT_TRUE(renamed);
      return;
    }
  }
  FAIL() << "retention makes more calls than were tried";
}

// The coordinator that withdrew the step died before it looked at pins, or could not list them.
TEST_P(DeletionTest, OfAPinnedStepIsTakenBackByTheNextRetention) {
  for (const bool dies : {false, true}) {
    SCOPED_TRACE(dies);
    const std::unique_ptr<ObjectStore> files = MakeStore();
    ASSERT_TRUE(SaveStep(*files, 100, 1).ok());
    ASSERT_TRUE(SaveStep(*files, 150, 1).ok());
    bool pinned = false;
    testing::WatchedStore first(files.get(), [&](testing::StoreCall call, std::string_view path) {
      if (call == testing::StoreCall::kPut && path == "step-0000000100/DELETED") {
        EXPECT_TRUE(PinStep(*files, {.step = 100}, "").ok());
        pinned = true;
        return absl::OkStatus();
      }
      const bool fails = pinned && (dies || path == ckpt::kPinsFolder);
      return fails ? absl::UnavailableError("stopped here") : absl::OkStatus();
    });
    EXPECT_FALSE(Retain(first).ok());
    EXPECT_TRUE(*store::Exists(*files, "step-0000000100/DELETED"));
    ASSERT_TRUE(Retain(*files).ok());
    EXPECT_FALSE(*store::Exists(*files, "step-0000000100/DELETED"));
    EXPECT_TRUE(IsGood(*files, 100));
  }
}

// One coordinator withdraws a step, and takes that back because of a pin. A second one begins in
// between; another pin is set while it deletes.
TEST_P(DeletionTest, IsNotEndedByAnotherOnceTheStepIsPinned) {
  int kept = 0;
  absl::Status pinned;
  AtEveryCall(
      [&](ObjectStore& files) {
        ASSERT_TRUE(SaveStep(files, 100, 1).ok());
        ASSERT_TRUE(SaveStep(files, 150, 1).ok());
        ASSERT_TRUE(files.Put("step-0000000100/DELETED", "").ok());
      },
      [&](ObjectStore& files) {
        ASSERT_TRUE(store::WithdrawIfThere(files, "step-0000000100/DELETED").ok());
        pinned = PinStep(files, {.step = 100, .holder = "job-1"}, "");
      },
      [&](ObjectStore& files) {
        EXPECT_EQ(IsGood(files, 100), pinned.ok()) << pinned;
        kept += pinned.ok() ? 1 : 0;
        ASSERT_TRUE(Retain(files).ok());
        EXPECT_EQ(IsGood(files, 100), pinned.ok()) << pinned;
        EXPECT_TRUE(ListAttempts(files)->empty());
      });
  EXPECT_GT(kept, 5);
}

// PinStep writes its mark, then looks for COMMIT, then for DELETED. `withdrawn`: a coordinator died
// after it had withdrawn the step.
TEST_P(DeletionTest, SeesAPinThatIsBeingSet) {
  constexpr int64_t kBetween = 12;  // calls between the mark and the last look, at most
  for (const bool withdrawn : {false, true}) {
    for (int64_t begin = 0; begin < kCallsToTry * kBetween; ++begin) {
      const int64_t at = begin / kBetween;
      const int64_t end = at + begin % kBetween;
      SCOPED_TRACE(absl::StrCat(withdrawn, " ", at, " ", end));
      const std::unique_ptr<ObjectStore> files = MakeStore();
      ASSERT_TRUE(SaveStep(*files, 100, 1).ok());
      ASSERT_TRUE(SaveStep(*files, 150, 1).ok());
      ASSERT_TRUE(!withdrawn || files->Put("step-0000000100/DELETED", "").ok());
      bool committed = false;
      bool pinned = false;
      int64_t count = 0;
      testing::WatchedStore watched(files.get(), [&](auto, auto) {
        if (count == at) {
          EXPECT_TRUE(store::MakeDirectories(*files, ckpt::kPinsFolder).ok());
          EXPECT_TRUE(files->Put("pins/step-0000000100.job-1", "").ok());
          committed = *store::Exists(*files, "step-0000000100/COMMIT");
        }
        if (count++ == end) {
          pinned = committed && !*store::Exists(*files, "step-0000000100/DELETED");
        }
        return absl::OkStatus();
      });
      ASSERT_TRUE(Retain(watched).ok());
      EXPECT_TRUE(!pinned || IsGood(*files, 100));
      if (at >= count) {
        break;  // all calls have been tried
      }
    }
  }
}

// A store that fails, or a coordinator that dies, at any call; then it is repeated.
TEST_P(DeletionTest, OfAJobsCheckpointsLeavesNothingWhereverItWasCutOff) {
  const std::string job = testing::ContextOf(saved_, {}).job;
  for (int64_t at = 0; at < kCallsToTry; ++at) {
    SCOPED_TRACE(at);
    const std::unique_ptr<ObjectStore> files = MakeStore();
    ASSERT_TRUE(SaveStep(*files, 100, 1).ok());
    ASSERT_TRUE(SaveStep(*files, 150, 1).ok());
    ASSERT_TRUE(
        testing::WriteAllRanks(*files, saved_, {.step = 160, .epoch = 1, .attempt = 1}).ok());
    testing::WatchedStore stopped(files.get(), [count = int64_t{0}, at](auto, auto) mutable {
      return count++ < at ? absl::OkStatus() : absl::UnavailableError("stopped here");
    });
    const absl::Status first = RemoveAllOf(stopped, job, 0);
    EXPECT_TRUE(first.ok() || absl::IsUnavailable(first)) << first;
    ASSERT_TRUE(RemoveAllOf(*files, job, 0).ok());
    EXPECT_TRUE(ListSteps(*files)->steps.empty());
    EXPECT_TRUE(ListSteps(*files)->damaged.empty());
    EXPECT_TRUE(ListAttempts(*files)->empty());
    if (first.ok()) {
      EXPECT_GT(at, 20);
      return;
    }
  }
  FAIL() << "the deletion makes more calls than were tried";
}

TEST_P(DeletionTest, OfAJobsCheckpointsHonoursPinsUntilTheyExpire) {
  const std::string job = testing::ContextOf(saved_, {}).job;
  const std::unique_ptr<ObjectStore> files = MakeStore();
  for (const int64_t step : {100, 150, 200}) {
    ASSERT_TRUE(SaveStep(*files, step, 1).ok());
  }
  ASSERT_TRUE(PinStep(*files, {.step = 100, .holder = "reader-1", .until_s = 50}, "").ok());
  ASSERT_TRUE(PinStep(*files, {.step = 150, .holder = "job-1"}, "").ok());
  testing::WatchedStore late(files.get(), [&](testing::StoreCall call, std::string_view path) {
    if (call == testing::StoreCall::kPut && path == "step-0000000200/DELETED") {
      EXPECT_TRUE(PinStep(*files, {.step = 200, .holder = "job-2"}, "").ok());
    }
    return absl::OkStatus();
  });
  ASSERT_TRUE(RemoveAllOf(late, job, 50).ok());
  EXPECT_EQ(ListSteps(*files)->steps.size(), 3U);
  ASSERT_TRUE(RemoveAllOf(*files, job, 51).ok());
  EXPECT_FALSE(*store::Exists(*files, "step-0000000100")) << "its reader was killed";
  EXPECT_TRUE(IsGood(*files, 150));
  EXPECT_TRUE(IsGood(*files, 200)) << "pinned after it was listed";
}

// Another coordinator's retention, which is not fenced, runs at any call of a rollback.
TEST_P(DeletionTest, DuringARollbackIsNoFailureOfIt) {
  for (int64_t at = 0; at < kCallsToTry; ++at) {
    SCOPED_TRACE(at);
    const std::unique_ptr<ObjectStore> files = MakeStore();
    for (const int64_t step : {100, 150, 200, 250}) {
      ASSERT_TRUE(SaveStep(*files, step, 1).ok());
    }
    ASSERT_TRUE(PinStep(*files, {.step = 100}, "").ok());
    ASSERT_TRUE(
        PinStep(*files, {.step = 150, .holder = "reader-1", .until_s = kPinnedUntil}, "").ok());
    ASSERT_TRUE(MarkBad(*files, 250, "flipped").ok());
    ASSERT_TRUE(files->Put("step-0000000200/DELETED", "").ok());
    bool ran = false;
    testing::WatchedStore watched(files.get(), at, [&] {
      ran = true;
      ASSERT_TRUE(ApplyRetention(*files, {.keep_last = 1}, {}, kPinnedUntil + 1).ok());
    });
    const auto moved = MoveStepsAbove(watched, 100, "rolled-back-e2");
    ASSERT_TRUE(moved.ok()) << moved.status();
    EXPECT_TRUE(IsGood(*files, 100));
    EXPECT_EQ(ListSteps(*files)->steps.size(), 1U);
    EXPECT_TRUE(ListSteps(*files)->damaged.empty());
    EXPECT_FALSE(*store::Exists(*files, "rolled-back-e2/step-0000000200")) << "half a step";
    EXPECT_TRUE(*store::Exists(*files, "rolled-back-e2/step-0000000250/COMMIT"));
    EXPECT_TRUE(*store::Exists(*files, "rolled-back-e2/bad/step-0000000250"));
    if (!ran) {
      EXPECT_GT(at, 10);
      EXPECT_EQ(moved->size(), 2U);
      return;
    }
  }
  FAIL() << "a rollback makes more calls than were tried";
}

}  // namespace
}  // namespace ravel::coordinator
