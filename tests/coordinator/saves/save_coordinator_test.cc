// Saves under way, as a pure thing: messages lost, repeated, late, out of order.

#include "coordinator/saves/save_coordinator.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace ravel::coordinator {
namespace {

using ::testing::HasSubstr;
using ::testing::SizeIs;
using Kind = SealAnswer::Kind;

constexpr int64_t kEpoch = 7;

ckpt::Seal SealOf(int64_t rank, int64_t step, int64_t sequence = 0) {
  ckpt::Seal seal;
  seal.step = step;
  seal.epoch = kEpoch;
  seal.attempt = 1;
  seal.writer = rank;
  seal.sequence = sequence;
  return seal;
}

SaveRecord RecordOf(int64_t step, SaveState state, const std::string& reason = "") {
  SaveRecord record;
  record.step = step;
  record.epoch = kEpoch;
  record.attempt = 1;
  record.state = state;
  record.reason = reason;
  record.created_ms = 1000 * step;
  return record;
}

class SaveCoordinatorTest : public ::testing::Test {
 protected:
  SaveCoordinatorTest() { saves_.Enter(kEpoch, 2); }

  SealAnswer Seal(int64_t rank, int64_t step, int64_t committed_step = -1) {
    return saves_.OnSeal(rank, SealOf(rank, step), committed_step, now_ms_, records_);
  }
  SaveFailureAnswer Fail(int64_t rank, int64_t step, const std::string& reason = "StoreFull") {
    return saves_.OnFailed(rank, {.step = step, .reason = reason, .message = "no space"}, records_);
  }
  // As the controller does: the commit of the oldest complete save, and its result.
  int64_t Commit(bool committed = true) {
    const auto key = saves_.NextCommit();
    if (!key) {
      return -1;
    }
    EXPECT_THAT(saves_.TakeSeals(*key), SizeIs(2));
    records_.push_back(RecordOf(key->step, committed ? SaveState::kCommitted : SaveState::kFailed));
    saves_.OnResult(*key, committed);
    return key->step;
  }

  SaveCoordinator saves_;
  std::vector<SaveRecord> records_;
  int64_t now_ms_ = 1000;
};

TEST_F(SaveCoordinatorTest, ASaveIsCommittedOnceWhenAllHaveSealed) {
  Seal(0, 5);
  EXPECT_EQ(Commit(), -1);
  Seal(0, 5);
  EXPECT_EQ(Commit(), -1) << "the same seal twice is one seal";
  Seal(1, 5);
  EXPECT_EQ(Commit(), 5);
  EXPECT_TRUE(saves_.idle());
}

TEST_F(SaveCoordinatorTest, SealsThatComeAgainAreAnsweredFromTheRecord) {
  records_ = {RecordOf(5, SaveState::kCommitted),
              RecordOf(6, SaveState::kFailed, "StoreFull: no space"),
              RecordOf(7, SaveState::kDeleted),
              RecordOf(8, SaveState::kBad),
              RecordOf(9, SaveState::kIntended)};
  EXPECT_EQ(Seal(0, 5).kind, Kind::kCommitted);
  EXPECT_EQ(Seal(0, 6).kind, Kind::kRefused);
  EXPECT_EQ(Seal(0, 6).reason, "StoreFull: no space");
  EXPECT_EQ(Seal(0, 7).kind, Kind::kRefused);
  EXPECT_EQ(Seal(0, 8).kind, Kind::kRefused);
  EXPECT_EQ(Seal(0, 9).kind, Kind::kKept) << "its commit answers";
  EXPECT_TRUE(saves_.idle()) << "none of them opens a save";
}

TEST_F(SaveCoordinatorTest, ALateSealOfAnOlderStepIsRefused) {
  const SealAnswer answer = Seal(0, 5, /*committed_step=*/10);
  EXPECT_EQ(answer.kind, Kind::kRefused);
  EXPECT_THAT(answer.reason, HasSubstr("step 10"));
  EXPECT_TRUE(saves_.idle());
}

TEST_F(SaveCoordinatorTest, CommitsHappenInTheOrderOfSteps) {
  Seal(0, 10);
  Seal(1, 10);
  Seal(0, 5);
  Seal(1, 5);
  const auto first = saves_.NextCommit();
  ASSERT_TRUE(first.has_value());
  EXPECT_EQ(first->step, 5);
  EXPECT_FALSE(saves_.NextCommit().has_value()) << "one at a time";
  EXPECT_TRUE(saves_.OnResult(*first, true).empty());
  EXPECT_EQ(Commit(), 10);
}

TEST_F(SaveCoordinatorTest, AnOlderSaveThatMissesASealDoesNotHoldUpANewerOne) {
  Seal(0, 5);  // rank 1's is lost
  Seal(0, 10);
  Seal(1, 10);
  const auto key = saves_.NextCommit();
  ASSERT_TRUE(key.has_value());
  EXPECT_EQ(key->step, 10);
  const std::vector<EndedSave> older = saves_.OnResult(*key, true);
  ASSERT_THAT(older, SizeIs(1));
  EXPECT_EQ(older.front().key.step, 5);
  EXPECT_TRUE(saves_.idle());
}

TEST_F(SaveCoordinatorTest, ACommitThatFailsLeavesOlderSavesAlone) {
  Seal(0, 5);
  Seal(0, 10);
  Seal(1, 10);
  const auto key = saves_.NextCommit();
  EXPECT_TRUE(saves_.OnResult(*key, false).empty());
  Seal(1, 5);
  EXPECT_EQ(Commit(), 5);
}

TEST_F(SaveCoordinatorTest, TheFirstFailureEndsTheSaveAndIsToldOnce) {
  saves_.OnStarted({.step = 5, .sequence = 3}, now_ms_, records_);
  Seal(1, 5);
  const SaveFailureAnswer first = Fail(0, 5);
  ASSERT_TRUE(first.ended.has_value());
  EXPECT_EQ(first.ended->reason, "StoreFull");
  EXPECT_EQ(first.ended->rank, 0);
  EXPECT_EQ(first.ended->sequence, 3) << "requests that it served fail with it";
  EXPECT_TRUE(first.all_ended) << "the other rank has sealed";
  records_.push_back(RecordOf(5, SaveState::kFailed, "StoreFull"));
  EXPECT_FALSE(Fail(0, 5).ended.has_value());
  EXPECT_FALSE(Fail(1, 5).ended.has_value());
  EXPECT_TRUE(saves_.idle());
}

TEST_F(SaveCoordinatorTest, TheFolderIsRemovedAgainWhenTheLastRankHasStopped) {
  EXPECT_FALSE(Fail(0, 5).all_ended);
  records_.push_back(RecordOf(5, SaveState::kFailed, "StoreFull"));
  EXPECT_FALSE(Fail(0, 5).all_ended) << "repeated";
  saves_.OnStarted({.step = 5}, now_ms_, records_);
  EXPECT_TRUE(saves_.idle()) << "a rank that begins late opens nothing";
  EXPECT_TRUE(Fail(1, 5, "SaveAbandoned").all_ended);
  EXPECT_FALSE(Fail(1, 5, "SaveAbandoned").all_ended);
}

TEST_F(SaveCoordinatorTest, ASealThatCrossesTheEndOfItsSaveIsRefusedAndEndsTheRank) {
  Fail(0, 5);
  records_.push_back(RecordOf(5, SaveState::kFailed, "StoreFull"));
  const SealAnswer answer = Seal(1, 5);
  EXPECT_EQ(answer.kind, Kind::kRefused);
  EXPECT_EQ(answer.reason, "StoreFull");
  EXPECT_TRUE(answer.all_ended);
}

TEST_F(SaveCoordinatorTest, AFailureAfterTheCommitBeganChangesNothing) {
  Seal(0, 5);
  Seal(1, 5);
  ASSERT_TRUE(saves_.NextCommit().has_value());
  EXPECT_FALSE(Fail(0, 5).ended.has_value());
  EXPECT_FALSE(saves_.idle());
}

TEST_F(SaveCoordinatorTest, ASaveThatNoRankEndsExpires) {
  saves_.OnStarted({.step = 5}, now_ms_, records_);
  EXPECT_THAT(saves_.Expire(now_ms_ + 99, 100), SizeIs(0));
  Seal(1, 5);
  const std::vector<EndedSave> expired = saves_.Expire(now_ms_ + 100, 100);
  ASSERT_THAT(expired, SizeIs(1));
  EXPECT_THAT(expired.front().message, HasSubstr("ranks without a seal: 0"));
  EXPECT_TRUE(saves_.idle());
}

TEST_F(SaveCoordinatorTest, ACompleteSaveWaitsForItsCommitAndDoesNotExpire) {
  Seal(0, 5);
  Seal(1, 5);  // the plan of an adopted run is not known yet
  EXPECT_THAT(saves_.Expire(now_ms_ + 1'000'000, 100), SizeIs(0));
  EXPECT_EQ(Commit(), 5);
}

TEST_F(SaveCoordinatorTest, ASkippedSaveIsCountedOnceForAllRanks) {
  const SaveFailed skipped = {.step = 5, .reason = "SaveSkipped", .skipped = true};
  EXPECT_TRUE(saves_.OnFailed(0, skipped, records_).skipped);
  EXPECT_FALSE(saves_.OnFailed(1, skipped, records_).skipped);
  EXPECT_EQ(saves_.skipped(), 1);
}

TEST_F(SaveCoordinatorTest, ANewEpochForgetsWhatWasUnderWay) {
  Seal(0, 5);
  saves_.Enter(kEpoch, 2);
  EXPECT_FALSE(saves_.idle());
  saves_.Enter(kEpoch + 1, 2);
  EXPECT_TRUE(saves_.idle());
}

TEST_F(SaveCoordinatorTest, ARunThatStopsKeepsOnlyTheCommitThatIsUnderWay) {
  Seal(0, 5);
  Seal(1, 5);
  Seal(0, 6);
  const auto key = saves_.NextCommit();
  ASSERT_TRUE(key.has_value());
  saves_.DropUncommitted();
  EXPECT_THAT(saves_.pending(), SizeIs(1));
  saves_.OnResult(*key, true);
  EXPECT_TRUE(saves_.idle());
}

TEST_F(SaveCoordinatorTest, AnOperationKnowsWhatItWaitsFor) {
  OperationRecord operation;
  operation.sequence = 2;
  EXPECT_THAT(saves_.WaitsFor(operation, false), HasSubstr("not asked yet"));
  EXPECT_EQ(saves_.WaitsFor(operation, true), "waiting for the step boundary");
  saves_.OnStarted({.step = 4, .sequence = 1}, now_ms_, records_);
  EXPECT_EQ(saves_.WaitsFor(operation, true),
            "waiting for the save before it: writing step 4 on ranks 0, 1");
  Fail(0, 4);
  saves_.OnStarted({.step = 5, .sequence = 2}, now_ms_, records_);
  EXPECT_EQ(saves_.WaitsFor(operation, true), "writing step 5 on ranks 0, 1");
  Seal(0, 5);
  EXPECT_EQ(saves_.WaitsFor(operation, true), "sealing step 5: ranks 1 are missing");
  Seal(1, 5);
  saves_.NextCommit();
  EXPECT_EQ(saves_.WaitsFor(operation, true), "committing step 5");
}

TEST(SaveCounts, FailuresInARowEndWithACommit) {
  std::vector<SaveRecord> records = {RecordOf(1, SaveState::kFailed),
                                     RecordOf(2, SaveState::kDeleted),
                                     RecordOf(3, SaveState::kFailed, "one"),
                                     RecordOf(4, SaveState::kFailed, "two")};
  EXPECT_EQ(CountSaves(records).failed, 3);
  EXPECT_EQ(CountSaves(records).failed_in_a_row, 2);
  EXPECT_EQ(CountSaves(records).last_reason, "two");
  EXPECT_EQ(CountSaves(records).committed_ms, 2000);
  records.push_back(RecordOf(5, SaveState::kCommitted));
  EXPECT_EQ(CountSaves(records).failed_in_a_row, 0);
}

class FreshnessTest : public ::testing::Test {
 protected:
  FreshnessTest() {
    spec_.every_ms = 1000;
    input_.spec = &spec_;
    input_.counts.committed_ms = 10'000;
    input_.step = 5;
    input_.now_ms = 10'500;
  }
  plan::CheckpointSpec spec_;
  FreshnessInput input_;
};

TEST_F(FreshnessTest, AnOldCommitIsNotFresh) {
  EXPECT_TRUE(CheckpointFresh(input_).status);
  input_.now_ms = 13'000;
  EXPECT_TRUE(CheckpointFresh(input_).status);
  input_.now_ms = 13'001;
  EXPECT_FALSE(CheckpointFresh(input_).status);
  EXPECT_EQ(CheckpointFresh(input_).reason, "TooOld");
  spec_.max_age_ms = 5000;
  EXPECT_TRUE(CheckpointFresh(input_).status) << "the larger of both limits";
}

TEST_F(FreshnessTest, AFailedSaveIsNotFresh) {
  input_.counts.failed_in_a_row = 1;
  input_.counts.last_reason = "StoreFull: no space";
  const JobCondition condition = CheckpointFresh(input_);
  EXPECT_FALSE(condition.status);
  EXPECT_EQ(condition.reason, "SaveFailed");
  EXPECT_THAT(condition.message, HasSubstr("StoreFull"));
}

TEST_F(FreshnessTest, SavesByStepsHaveNoAge) {
  spec_.every_ms = 0;
  input_.now_ms = 1'000'000'000;
  EXPECT_TRUE(CheckpointFresh(input_).status);
}

TEST_F(FreshnessTest, LimitsEndTheJobOnlyWhenTheyAreSetAndPassed) {
  input_.counts.failed_in_a_row = 100;
  input_.now_ms = 1'000'000'000;
  EXPECT_FALSE(PassedLimit(input_).has_value());
  spec_.max_failed_saves = 100;
  EXPECT_FALSE(PassedLimit(input_).has_value());
  spec_.max_failed_saves = 99;
  ASSERT_TRUE(PassedLimit(input_).has_value());
  EXPECT_EQ(PassedLimit(input_)->reason, "SavesFailing");
  spec_.max_failed_saves = 0;
  spec_.max_age_ms = 2000;
  EXPECT_EQ(PassedLimit(input_)->reason, "CheckpointTooOld");
  input_.trained_since_ms = input_.now_ms - 2000;
  EXPECT_FALSE(PassedLimit(input_).has_value()) << "this attempt has had no time to save";
}

TEST(SetCondition, TheTimeIsThatOfTheLastChangeOfStatus) {
  std::vector<JobCondition> conditions;
  EXPECT_TRUE(SetCondition(conditions, {"CheckpointFresh", true, "Committed", "step 1", 10}));
  EXPECT_FALSE(SetCondition(conditions, {"CheckpointFresh", true, "Committed", "step 1", 20}));
  EXPECT_TRUE(SetCondition(conditions, {"CheckpointFresh", true, "Committed", "step 2", 30}));
  EXPECT_EQ(conditions.front().time_ms, 10);
  EXPECT_TRUE(SetCondition(conditions, {"CheckpointFresh", false, "TooOld", "", 40}));
  EXPECT_EQ(conditions.front().time_ms, 40);
  EXPECT_THAT(conditions, SizeIs(1));
}

}  // namespace
}  // namespace ravel::coordinator
