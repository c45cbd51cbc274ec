// Beats in, findings out: who differs, who is late, who waits for whom.

#include "coordinator/fleet/collective_watch.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace ravel::coordinator {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::UnorderedElementsAre;

constexpr CollectiveLimits kLimits = {.detection_ms = 1000, .step_seconds = 0.01};

CollectiveState State(const std::string& group,
                      int64_t first,
                      uint64_t sequence,
                      int64_t waiting_ms,
                      uint64_t hash = 0) {
  return {.group = group,
          .first_member = first,
          .sequence = sequence,
          .hash = hash == 0 ? sequence * 77 : hash,
          .completed = waiting_ms > 0 ? sequence - 1 : sequence,
          .waiting_ms = waiting_ms};
}

LedgerEntry Entry(uint64_t sequence,
                  const std::string& op,
                  const std::string& unit,
                  uint64_t hash) {
  return {.sequence = sequence,
          .hash = hash,
          .kind = op == "Gather" ? "all_gather" : "exchange_pieces",
          .op = op,
          .unit = unit,
          .phase = "first",
          .generation = 6,
          .elements = 100,
          .element_bytes = 4};
}

LedgerReport Ledger(const std::string& group,
                    std::vector<int64_t> members,
                    std::vector<LedgerEntry> entries) {
  return {
      .groups = {{.group = group, .members = std::move(members), .entries = std::move(entries)}}};
}

TEST(CollectiveWatchTest, EqualSequencesWithEqualHashesAreFine) {
  CollectiveWatch watch;
  for (int64_t rank = 0; rank < 3; ++rank) {
    watch.OnBeat(rank, {7, "training", {State("world", 0, 20 + static_cast<uint64_t>(rank), 0)}});
  }
  const CollectiveWatch::Outcome outcome = watch.Judge(5000, kLimits);
  EXPECT_TRUE(outcome.ask.empty());
  EXPECT_FALSE(outcome.report);
}

TEST(CollectiveWatchTest, TheFirstDifferingEntryOfBothRanksIsReported) {
  CollectiveWatch watch;
  watch.OnBeat(0, {7, "training", {State("shard", 0, 20, 0)}});
  watch.OnBeat(1, {7, "training", {State("shard", 0, 20, 0, 999)}});
  EXPECT_THAT(watch.Judge(0, kLimits).ask, UnorderedElementsAre(0, 1));
  watch.OnLedger(0,
                 Ledger("shard",
                        {0, 1},
                        {Entry(18, "Gather", "embed", 5),
                         Entry(19, "Gather", "layers.0", 6),
                         Entry(20, "Gather", "layers.1", 7)}));
  EXPECT_FALSE(watch.Judge(10, kLimits).report) << "the other rank has not answered yet";
  watch.OnLedger(1,
                 Ledger("shard",
                        {0, 1},
                        {Entry(18, "Gather", "embed", 5),
                         Entry(19, "Gather", "layers.1", 8),
                         Entry(20, "Gather", "layers.0", 9)}));
  const auto report = watch.Judge(20, kLimits).report;
  ASSERT_TRUE(report);
  EXPECT_TRUE(report->fatal);
  EXPECT_EQ(report->reason, "CollectiveMismatch");
  EXPECT_THAT(report->message, HasSubstr("rank 0 issued all_gather #19 (Gather of layers.0"));
  EXPECT_THAT(report->message, HasSubstr("rank 1 issued all_gather #19 (Gather of layers.1"));
  EXPECT_FALSE(watch.Judge(30, kLimits).report) << "it is said once";
}

TEST(CollectiveWatchTest, RanksThatAreNotEquallyFarAreComparedAtTheirMarks) {
  CollectiveWatch watch;
  CollectiveState a = State("world", 0, 300, 0);
  CollectiveState b = State("world", 0, 400, 0);
  a.mark_sequence = b.mark_sequence = 256;
  a.mark_hash = 1;
  b.mark_hash = 2;
  watch.OnBeat(0, {7, "training", {a}});
  watch.OnBeat(1, {7, "training", {b}});
  EXPECT_THAT(watch.Judge(0, kLimits).ask, UnorderedElementsAre(0, 1));
}

TEST(CollectiveWatchTest, SameNamesOfOtherRanksAreOtherGroups) {
  CollectiveWatch watch;
  watch.OnBeat(0, {7, "training", {State("shard", 0, 20, 0, 1)}});
  watch.OnBeat(2, {7, "training", {State("shard", 2, 20, 0, 2)}});
  EXPECT_TRUE(watch.Judge(0, kLimits).ask.empty());
}

TEST(CollectiveWatchTest, ALateRankIsNamedWithWhatItHasNotIssued) {
  CollectiveWatch watch;
  watch.OnBeat(0, {6, "training", {State("world", 0, 21, 1200)}});
  watch.OnBeat(1, {6, "training", {State("world", 0, 20, 0)}});
  watch.OnBeat(2, {6, "training", {State("world", 0, 21, 1100)}});
  EXPECT_THAT(watch.Judge(0, kLimits).ask, UnorderedElementsAre(0, 1));
  watch.OnLedger(0, Ledger("world", {0, 1, 2}, {Entry(21, "Gather", "layers.3", 5)}));
  EXPECT_FALSE(watch.Judge(100, kLimits).report) << "rank 1 may still answer";
  auto report = watch.Judge(600, kLimits).report;
  ASSERT_TRUE(report);
  EXPECT_FALSE(report->fatal);
  EXPECT_EQ(report->reason, "Stall");
  EXPECT_EQ(report->rank, 1);
  EXPECT_THAT(report->message,
              HasSubstr("rank 1 has not issued all_gather #21 (Gather of layers.3"));
  EXPECT_THAT(report->message, HasSubstr("of step 7 in group world; ranks 0,2 wait since 1.2 s"));
  EXPECT_THAT(report->message, HasSubstr("does not answer"));
  EXPECT_THAT(watch.LastWord(1), HasSubstr("layers.3"));
  EXPECT_EQ(watch.LastWord(0), "");
  EXPECT_FALSE(watch.Judge(13'000, kLimits).report) << "a hiccup of 13 s ends nothing";
  report = watch.Judge(59'100, kLimits).report;
  ASSERT_TRUE(report) << "60 s after the wait began it ends the epoch";
  EXPECT_TRUE(report->fatal);
  EXPECT_FALSE(watch.Judge(60'000, kLimits).report);
}

TEST(CollectiveWatchTest, TheEndOfARankNamesWhatOthersWaitForAtOnce) {
  CollectiveWatch watch;
  CollectiveState waits = State("world", 0, 21, 300);
  waits.waiting_in = "all_gather #21 (Gather of layers.3)";
  watch.OnBeat(0, {6, "training", {waits}});
  watch.OnBeat(1, {6, "training", {State("world", 0, 20, 0)}});
  EXPECT_THAT(watch.LastWord(1),
              HasSubstr("rank 1 has not issued all_gather #21 (Gather of layers.3) of step 7"));
  EXPECT_EQ(watch.LastWord(0), "");
}

TEST(CollectiveWatchTest, ALateRankThatComesIsForgotten) {
  CollectiveWatch watch;
  watch.OnBeat(0, {6, "training", {State("world", 0, 21, 1200)}});
  watch.OnBeat(1, {6, "training", {State("world", 0, 20, 0)}});
  EXPECT_EQ(watch.Judge(0, kLimits).ask.size(), 2u);
  watch.OnBeat(1, {6, "training", {State("world", 0, 21, 0)}});
  watch.OnBeat(0, {6, "training", {State("world", 0, 21, 0)}});
  EXPECT_TRUE(watch.Judge(5000, kLimits).ask.empty());
  EXPECT_FALSE(watch.Judge(9000, kLimits).report);
}

TEST(CollectiveWatchTest, SavesAndFirstStepsMayTakeTheirTime) {
  CollectiveWatch watch;
  watch.OnBeat(0, {6, "training", {State("world", 0, 21, 60000)}});
  watch.OnBeat(1, {6, "saving", {State("world", 0, 20, 0)}});
  watch.Judge(0, kLimits);
  EXPECT_FALSE(watch.Judge(60000, kLimits).report);

  watch.OnBeat(1, {0, "training", {State("world", 0, 20, 0)}});
  const CollectiveLimits first_step = {.detection_ms = 1000, .step_seconds = 0};
  const auto report = watch.Judge(120000, first_step).report;
  ASSERT_TRUE(report);
  EXPECT_FALSE(report->fatal);
}

TEST(CollectiveWatchTest, SlowStepsMoveTheLimits) {
  const CollectiveLimits slow = {.detection_ms = 1000, .step_seconds = 10};
  EXPECT_EQ(slow.notice_ms(), 20000);
  EXPECT_EQ(slow.stall_ms(), 60'000);
  const CollectiveLimits slower = {.detection_ms = 1000, .step_seconds = 30, .stall_factor = 4};
  EXPECT_EQ(slower.stall_ms(), 120'000);
  EXPECT_EQ(kLimits.notice_ms(), 1000);
  EXPECT_EQ(kLimits.stall_ms(), 60'000);
}

// Rank 2 waits for rank 1, which waits in another group for rank 3: that one is late.
TEST(CollectiveWatchTest, TheChainOfWaitsIsFollowedToItsEnd) {
  CollectiveWatch watch;
  watch.OnBeat(0, {6, "training", {State("shard", 0, 9, 1500), State("outer", 0, 4, 0)}});
  watch.OnBeat(1, {6, "training", {State("shard", 0, 8, 0), State("outer", 1, 5, 1500)}});
  watch.OnBeat(3, {6, "training", {State("shard", 2, 8, 0), State("outer", 1, 4, 0)}});
  EXPECT_THAT(watch.Judge(0, kLimits).ask, ElementsAre(3, 1));
}

// Each waits in a collective that the other has not issued.
TEST(CollectiveWatchTest, RanksThatWaitForEachOtherAreADeadlockWithBothNames) {
  CollectiveWatch watch;
  watch.OnBeat(0, {6, "training", {State("gather", 0, 9, 1500), State("reduce", 0, 4, 0)}});
  watch.OnBeat(1, {6, "training", {State("gather", 0, 8, 0), State("reduce", 0, 5, 1500)}});
  EXPECT_THAT(watch.Judge(0, kLimits).ask, UnorderedElementsAre(0, 1));
  watch.OnLedger(0, Ledger("gather", {0, 1}, {Entry(9, "Gather", "layers.1", 5)}));
  watch.OnLedger(1, Ledger("reduce", {0, 1}, {Entry(5, "ReduceScatter", "layers.2", 6)}));
  const auto report = watch.Judge(10, kLimits).report;
  ASSERT_TRUE(report);
  EXPECT_TRUE(report->fatal);
  EXPECT_EQ(report->reason, "CollectiveMismatch");
  EXPECT_THAT(report->message, HasSubstr("(Gather of layers.1"));
  EXPECT_THAT(report->message, HasSubstr("(ReduceScatter of layers.2"));
}

}  // namespace
}  // namespace ravel::coordinator
