#include "coordinator/jobs/retention_turn.h"

#include <gtest/gtest.h>

namespace ravel::coordinator {
namespace {

TEST(RetentionTurnTest, OneRunsAndWhatIsAskedMeanwhileFollowsOnce) {
  RetentionTurn turn;
  EXPECT_TRUE(turn.Begin(false));
  EXPECT_FALSE(turn.Begin(false));
  EXPECT_FALSE(turn.Begin(false));
  EXPECT_TRUE(turn.EndOk());
  EXPECT_TRUE(turn.Begin(false));
  EXPECT_FALSE(turn.EndOk());
  EXPECT_TRUE(turn.Begin(false)) << "nothing runs now";
}

TEST(RetentionTurnTest, AFailureIsTriedAgainLaterAndLater) {
  RetentionTurn turn;
  EXPECT_EQ(turn.due_ms(), -1);
  int64_t now_ms = 1000;
  for (const int64_t wait_ms : {5, 10, 20, 40, 80, 160, 320, 600, 600}) {
    ASSERT_TRUE(turn.Begin(false));
    EXPECT_FALSE(turn.Begin(false)) << "the next try does for both";
    EXPECT_EQ(turn.EndFailed(now_ms), now_ms + wait_ms * 1000);
    EXPECT_FALSE(turn.Due(turn.due_ms() - 1));
    now_ms = turn.due_ms();
    EXPECT_TRUE(turn.Due(now_ms));
  }
  ASSERT_TRUE(turn.Begin(false));
  EXPECT_FALSE(turn.Due(now_ms)) << "under way";
  EXPECT_FALSE(turn.EndOk());
  EXPECT_EQ(turn.due_ms(), -1);
  ASSERT_TRUE(turn.Begin(false));
  EXPECT_EQ(turn.EndFailed(0), 5000) << "the first failure again";
}

TEST(RetentionTurnTest, TheSaveThatWantsRoomIsAskedForAfterTheFirstThatSucceeds) {
  RetentionTurn turn;
  ASSERT_TRUE(turn.Begin(true));
  turn.EndFailed(0);
  ASSERT_TRUE(turn.Begin(false));
  EXPECT_FALSE(turn.EndOk());
  EXPECT_TRUE(turn.TakeSaveAfter());
  EXPECT_FALSE(turn.TakeSaveAfter());
}

TEST(ReleaseTurnTest, ItIsDueUntilItHasBeenDone) {
  ReleaseTurn turn;
  EXPECT_FALSE(turn.Due(1000));
  EXPECT_FALSE(turn.TakeLastTry());
  int64_t now_ms = 1000;
  turn.Want(now_ms);
  for (const int64_t wait_s : {5, 10, 20, 40, 80, 160, 320, 640, 1280, 2560, 3600, 3600}) {
    EXPECT_TRUE(turn.Due(now_ms));
    EXPECT_EQ(turn.EndFailed(now_ms), now_ms + wait_s * 1000);
    now_ms += wait_s * 1000;
    EXPECT_FALSE(turn.Due(now_ms - 1));
  }
  EXPECT_TRUE(turn.TakeLastTry());
  EXPECT_FALSE(turn.TakeLastTry()) << "once";
  turn.EndOk();
  EXPECT_FALSE(turn.Due(now_ms));
  turn.Want(now_ms);
  turn.EndOk();
  EXPECT_FALSE(turn.TakeLastTry()) << "it was done";
}

}  // namespace
}  // namespace ravel::coordinator
