// Whose a checkpoint folder is, who pins its steps, and what else lies in it.

#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/store/memory_store.h"
#include "coordinator/saves/checkpoint_leftovers.h"
#include "coordinator/saves/checkpoint_owner.h"
#include "coordinator/saves/checkpoint_pins.h"
#include "coordinator/saves/retention.h"
#include "tests/testing/fake_clock.h"
#include "tests/testing/saved_state.h"

namespace ravel::coordinator {
namespace {

using store::MemoryStore;
using ::testing::HasSubstr;

const OwnerRecord kOurs = {"cluster-a", "uid-1", "default/job", 5};

absl::Status SaveStep(MemoryStore& store, int64_t step) {
  const testing::SavedWorld saved = testing::MakeWorld(testing::InventoryOf({{5, 3}, {4}}), 1, 7);
  return testing::Save(store, saved, {.step = step, .epoch = 1, .attempt = 1}).status();
}

TEST(CheckpointOwnerTest, RoundTripAndDamage) {
  EXPECT_EQ(*ParseOwner(EncodeOwner(kOurs)), kOurs);
  EXPECT_TRUE(absl::IsDataLoss(ParseOwner("").status()));
  EXPECT_TRUE(absl::IsDataLoss(ParseOwner("{\"format\": \"x\"}").status()));
  std::string later = EncodeOwner(kOurs);
  later.replace(later.find("\"version\": 1"), 12, "\"version\": 2");
  EXPECT_THAT(std::string(ParseOwner(later).status().message()), HasSubstr("OWNER: version"));
}

TEST(CheckpointOwnerTest, TheFirstClaimStays) {
  MemoryStore store;
  EXPECT_TRUE(absl::IsUnavailable(CheckOwner(store, kOurs))) << "an empty folder is nobody's";
  ASSERT_TRUE(ClaimFolder(store, kOurs, Takeover::kNever).ok());
  ASSERT_TRUE(ClaimFolder(store, kOurs, Takeover::kNever).ok()) << "it may be repeated";
  EXPECT_TRUE(CheckOwner(store, kOurs).ok());
  OwnerRecord other = kOurs;
  other.cluster_id = "cluster-b";
  for (const Takeover takeover : {Takeover::kNever, Takeover::kSameCluster}) {
    const absl::Status refused = ClaimFolder(store, other, takeover);
    EXPECT_TRUE(absl::IsFailedPrecondition(refused));
    EXPECT_THAT(std::string(refused.message()), HasSubstr("job default/job (uid uid-1)"));
  }
  EXPECT_TRUE(CheckOwner(store, kOurs).ok());
}

TEST(CheckpointOwnerTest, AJobOfTheSameClusterTakesOverOnlyWhenItMay) {
  MemoryStore store;
  ASSERT_TRUE(ClaimFolder(store, kOurs, Takeover::kNever).ok());
  OwnerRecord next = kOurs;
  next.job_uid = "uid-2";
  EXPECT_FALSE(ClaimFolder(store, next, Takeover::kNever).ok());
  ASSERT_TRUE(ClaimFolder(store, next, Takeover::kSameCluster).ok());
  EXPECT_TRUE(CheckOwner(store, next).ok());
  EXPECT_TRUE(absl::IsFailedPrecondition(CheckOwner(store, kOurs)));
}

TEST(CheckpointOwnerTest, ADamagedOwnerIsNobodysProof) {
  MemoryStore store;
  ASSERT_TRUE(ClaimFolder(store, kOurs, Takeover::kNever).ok());
  ASSERT_TRUE(store.Truncate("OWNER", 10).ok());
  EXPECT_TRUE(absl::IsUnavailable(CheckOwner(store, kOurs)));
}

TEST(CheckpointPinsTest, APinOfAnyHolderKeepsAStepUntilItExpires) {
  MemoryStore store;
  for (const int64_t step : {10, 20, 30, 40}) {
    ASSERT_TRUE(SaveStep(store, step).ok());
  }
  ASSERT_TRUE(PinStep(store, {.step = 10, .holder = "job-1"}, "needed").ok());
  ASSERT_TRUE(PinStep(store, {.step = 20, .holder = "reader-1", .until_s = 100}, "read").ok());
  EXPECT_EQ(*ApplyRetention(store, {.keep_last = 1}, {}, 100), (std::vector<int64_t>{30}));
  EXPECT_EQ(*ApplyRetention(store, {.keep_last = 1}, {}, 101), (std::vector<int64_t>{20}))
      << "the reader was killed long ago";
  EXPECT_FALSE(*store::Exists(store, "pins/step-0000000020.reader-1.x100"));
  ASSERT_TRUE(UnpinStep(store, 10, "").ok());
  EXPECT_TRUE(ApplyRetention(store, {.keep_last = 1}, {}, 101)->empty()) << "another holder's";
  ASSERT_TRUE(UnpinStep(store, 10, "job-1").ok());
  EXPECT_EQ(*ApplyRetention(store, {.keep_last = 1}, {}, 101), (std::vector<int64_t>{10}));
}

TEST(CheckpointPinsTest, AStepThatIsGoneIsNotPinned) {
  MemoryStore store;
  EXPECT_TRUE(absl::IsFailedPrecondition(PinStep(store, {.step = 10, .holder = "job-1"}, "")));
  EXPECT_TRUE(store.List("pins")->empty());
}

TEST(CheckpointPinsTest, TheGateKeepsAStepThatIsBeingRestored) {
  MemoryStore store;
  for (const int64_t step : {10, 20, 30}) {
    ASSERT_TRUE(SaveStep(store, step).ok());
  }
  const auto gate = [](int64_t step) { return step != 10; };
  EXPECT_EQ(*ApplyRetention(store, {.keep_last = 1}, {}, 0, gate), (std::vector<int64_t>{20}));
}

TEST(CheckpointPinsTest, AReaderPinsForAsLongAsItReads) {
  MemoryStore store;
  ASSERT_TRUE(SaveStep(store, 10).ok());
  {
    const testing::FakeClock clock;
    const ReaderPin pin(&store, "step-0000000010", clock);
    const StepListing listing = *ListSteps(store);
    ASSERT_EQ(listing.steps.front().pins.size(), 1U);
    EXPECT_EQ(listing.steps.front().pins.front().until_s,
              clock.WallMs() / 1000 + kReaderPinSeconds);
  }
  EXPECT_FALSE(ListSteps(store)->steps.front().pinned);
}

TEST(CheckpointLeftoversTest, EachIsListedWithItsKind) {
  MemoryStore store;
  ASSERT_TRUE(SaveStep(store, 10).ok());
  const std::string ours = ckpt::JobTagText("uid-1");
  for (const std::string& folder : {"step-0000000020.e1.a1." + ours + ".tmp",
                                    std::string("step-0000000020.e1.a1.0000beef.tmp"),
                                    std::string("step-0000000005"),
                                    std::string("old-uid-1"),
                                    std::string("old-uid-0"),
                                    std::string("rolled-back-e3"),
                                    std::string("bad/step-0000000007.e2.a1.step")}) {
    ASSERT_TRUE(store::MakeDirectories(store, folder).ok());
  }
  std::vector<std::string> listed;
  const absl::StatusOr<std::vector<Leftover>> leftovers = ListLeftovers(store, "uid-1");
  ASSERT_TRUE(leftovers.ok()) << leftovers.status();
  for (const Leftover& leftover : *leftovers) {
    listed.push_back(leftover.path + ": " + std::string(LeftoverKindName(leftover.kind)) +
                     (leftover.removable ? ", removable" : ""));
  }
  EXPECT_THAT(listed,
              ::testing::UnorderedElementsAre(
                  "step-0000000020.e1.a1." + ours + ".tmp: unfinished save, removable",
                  "step-0000000020.e1.a1.0000beef.tmp: save of another job",
                  "step-0000000005: DAMAGED, removable",
                  "old-uid-1: earlier history, removable",
                  "old-uid-0: earlier history",
                  "rolled-back-e3: rolled back",
                  "bad/step-0000000007.e2.a1.step: copy of a bad step, removable"));
  // A store that knows no ages: nothing is old enough.
  EXPECT_TRUE(RemoveOldLeftovers(store, "uid-1", INT64_MAX)->empty());
}

TEST(RetentionTest, ARollbackMovesStepsAndTheirMarksAsideAndMayBeRepeated) {
  MemoryStore store;
  for (const int64_t step : {10, 20, 30}) {
    ASSERT_TRUE(SaveStep(store, step).ok());
  }
  ASSERT_TRUE(MarkBad(store, 30, "flipped").ok());
  ASSERT_TRUE(PinStep(store, {.step = 20, .holder = "job-1"}, "").ok());
  EXPECT_EQ(MoveStepsAbove(store, 10, "rolled-back-e2")->size(), 2U);
  EXPECT_TRUE(MoveStepsAbove(store, 10, "rolled-back-e2")->empty());
  EXPECT_EQ(ListSteps(store)->steps.size(), 1U);
  EXPECT_TRUE(*store::Exists(store, "rolled-back-e2/step-0000000030/COMMIT"));
  EXPECT_TRUE(*store::Exists(store, "rolled-back-e2/bad/step-0000000030"));
  EXPECT_TRUE(*store::Exists(store, "rolled-back-e2/pins/step-0000000020.job-1"));
  ASSERT_TRUE(SaveStep(store, 30).ok()) << "the number is free again";
}

}  // namespace
}  // namespace ravel::coordinator
