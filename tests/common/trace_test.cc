#include "common/trace.h"

#include <cstdlib>
#include <filesystem>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/file_writer.h"

namespace ravel::trace {
namespace {

using ::testing::HasSubstr;

Event Made(int64_t step, const char* op, const char* stream, int64_t begin_us, int64_t end_us) {
  return {.begin_ns = begin_us * 1000,
          .end_ns = end_us * 1000,
          .step = step,
          .phase = "only",
          .unit = "layers.0",
          .op = op,
          .stream = stream};
}

class TraceTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = ::testing::TempDir() + "trace_XXXXXX";
    folder_ = mkdtemp(pattern.data());
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }
  std::string Path(const char* name) const { return folder_ + "/" + name; }
  std::string folder_;
};

TEST_F(TraceTest, KeepsTheNewest) {
  Recorder recorder(3);
  for (int64_t i = 0; i < 5; ++i) {
    recorder.Record(Made(i, "Forward", "compute", 10 * i, 10 * i + 5));
  }
  EXPECT_EQ(recorder.dropped(), 2);
  const std::vector<Event> events = recorder.Take();
  ASSERT_EQ(events.size(), 3u);
  EXPECT_EQ(events[0].step, 2);
  EXPECT_EQ(events[2].step, 4);
  EXPECT_TRUE(recorder.Take().empty());
}

TEST_F(TraceTest, MergesOnOneTimeAxis) {
  // The clocks of the two hosts started at different times; rank 1 begins 40 us after rank 0.
  ASSERT_TRUE(WriteChromeTrace(Path("a.json"),
                               {.job = "j", .rank = 0, .wall_minus_monotonic_ns = 1'000'000},
                               {Made(7, "Forward", "compute", 100, 150),
                                Made(7, "ReduceScatter", "reduce", 150, 160)})
                  .ok());
  ASSERT_TRUE(WriteChromeTrace(Path("b.json"),
                               {.job = "j", .rank = 1, .wall_minus_monotonic_ns = 540'000},
                               {Made(7, "Forward", "compute", 600, 650)})
                  .ok());
  const auto merged = MergeChromeTraces({Path("a.json"), Path("b.json")});
  ASSERT_TRUE(merged.ok()) << merged.status();
  double begin_of_rank_1 = -1;
  for (const json::Value& event : merged->Find("traceEvents")->AsArray()) {
    if (event.Find("ph")->AsString() == "X" && event.Find("pid")->AsInt() == 1) {
      EXPECT_EQ(event.Find("name")->AsString(), "7/0/only/layers.0/Forward");
      begin_of_rank_1 = event.Find("ts")->AsDouble();
    }
  }
  EXPECT_DOUBLE_EQ(begin_of_rank_1, 40);
  const auto gantt = TextGantt(*merged, -1, 9);
  ASSERT_TRUE(gantt.ok()) << gantt.status();
  // 90 us in 9 columns.
  EXPECT_THAT(*gantt, HasSubstr("step 7, 0.090 ms"));
  EXPECT_THAT(*gantt, HasSubstr("rank 0 compute FFFFF....\n"));
  EXPECT_THAT(*gantt, HasSubstr("rank 0 reduce  .....R...\n"));
  EXPECT_THAT(*gantt, HasSubstr("rank 1 compute ....FFFFF\n"));
  EXPECT_EQ(TextGantt(*merged, 8, 9).status().code(), absl::StatusCode::kNotFound);
}

TEST_F(TraceTest, RefusesWhatItDidNotWrite) {
  ASSERT_TRUE(WriteFileAtomically(Path("x.json"), "{\"traceEvents\": []}").ok());
  const auto foreign = MergeChromeTraces({Path("x.json")});
  EXPECT_THAT(std::string(foreign.status().message()), HasSubstr("x.json: expected the trace"));
  ASSERT_TRUE(WriteFileAtomically(Path("y.json"), "{\"trace").ok());
  const auto torn = MergeChromeTraces({Path("y.json")});
  EXPECT_THAT(std::string(torn.status().message()), HasSubstr("y.json"));
  ASSERT_TRUE(WriteChromeTrace(Path("z.json"), {.rank = 3}, {}).ok());
  const auto twice = MergeChromeTraces({Path("z.json"), Path("z.json")});
  EXPECT_THAT(std::string(twice.status().message()), HasSubstr("rank 3 is in"));
  EXPECT_FALSE(MergeChromeTraces({Path("missing.json")}).ok());
}

TEST_F(TraceTest, StallsAreLargestFirstAndSmallOnesAreLeftOut) {
  std::vector<Event> events = {Made(1, "Gather", "gather", 0, 10),
                               Made(1, "Forward", "compute", 500, 900),
                               Made(1, "Backward", "compute", 905, 1000)};
  events[1].wait_ns = 490'000;
  events[2].wait_ns = 5'000;
  const json::Value document = ToChromeTrace({.rank = 2}, events);
  const std::vector<Stall> stalls = FindStalls(document, 1);
  ASSERT_EQ(stalls.size(), 1u);
  EXPECT_EQ(stalls[0].rank, 2);
  EXPECT_EQ(stalls[0].instruction, "Forward layers.0 (only, turn 0)");
  EXPECT_NEAR(stalls[0].share, 0.49, 1e-9);
  EXPECT_EQ(FindStalls(document, 1, 0.001).size(), 2u);
}

// Two gathers and two reduces, one of each beside a pass; what moves nothing, and evaluations, do
// not count.
TEST_F(TraceTest, OverlapCountsWhatRunsBesideAPass) {
  std::vector<Event> events = {Made(1, "Gather", "gather", 0, 10),
                               Made(1, "Gather", "gather", 10, 20),
                               Made(1, "Gather", "gather", 20, 25),
                               Made(1, "Forward", "compute", 10, 40),
                               Made(1, "Backward", "compute", 40, 70),
                               Made(1, "ReduceScatter", "reduce", 60, 75),
                               Made(1, "ReduceScatter", "reduce", 75, 90),
                               Made(1, "OptimizerStep", "compute", 85, 100),
                               Made(1, "Gather", "gather", 200, 300)};
  for (const size_t moves : {0U, 1U, 5U, 6U, 8U}) {
    events[moves].bytes = 64;
  }
  events[4].issue_ns = 7'000;
  events[6].issue_ns = 90'000;
  events[8].phase = "eval";
  const std::vector<StepOverlap> overlaps = CountOverlaps(ToChromeTrace({.rank = 4}, events), 1);
  ASSERT_EQ(overlaps.size(), 1u);
  EXPECT_EQ(overlaps[0].rank, 4);
  EXPECT_EQ(overlaps[0].gathers, 2);
  EXPECT_EQ(overlaps[0].hidden_gathers, 1);
  EXPECT_EQ(overlaps[0].reduces, 2);
  EXPECT_EQ(overlaps[0].hidden_reduces, 1);
  // Until 10, and from 70 to 85, when the optimizer begins.
  EXPECT_NEAR(overlaps[0].exposed_seconds, 25e-6, 1e-12);
  EXPECT_NEAR(overlaps[0].exposed_share, 0.25, 1e-9);
  EXPECT_NEAR(overlaps[0].longest_issue_seconds, 7e-6, 1e-12);
  EXPECT_TRUE(CountOverlaps(ToChromeTrace({.rank = 4}, events), 2).empty());
}

TEST_F(TraceTest, WaitsForOtherRanksNameTheLateOneAndWhatItDid) {
  // Rank 1 is late in Backward and, before its last collective, outside of any instruction.
  Event reduce = Made(1, "ReduceScatter", "reduce", 100, 510);
  reduce.peer_wait_ns = 400'000;
  reduce.peer_wait_begin_ns = 105'000;
  reduce.peer = 1;
  Event statistics = Made(1, "StatsReduce", "reduce", 510, 600);
  statistics.peer_wait_ns = 60'000;
  statistics.peer_wait_begin_ns = 520'000;
  statistics.peer = 1;
  ASSERT_TRUE(WriteChromeTrace(Path("a.json"),
                               {.rank = 0},
                               {Made(1, "Backward", "compute", 0, 100), reduce, statistics})
                  .ok());
  ASSERT_TRUE(WriteChromeTrace(Path("b.json"),
                               {.rank = 1},
                               {Made(1, "Backward", "compute", 0, 500),
                                Made(1, "ReduceScatter", "reduce", 500, 515),
                                Made(1, "StatsReduce", "reduce", 580, 600)})
                  .ok());
  const auto merged = MergeChromeTraces({Path("a.json"), Path("b.json")});
  ASSERT_TRUE(merged.ok()) << merged.status();
  const std::vector<Stall> stalls = FindStalls(*merged, 1);
  ASSERT_EQ(stalls.size(), 2u);
  EXPECT_EQ(stalls[0].rank, 0);
  EXPECT_EQ(stalls[0].instruction, "ReduceScatter layers.0 (only, turn 0)");
  EXPECT_NEAR(stalls[0].seconds, 400e-6, 1e-9);
  EXPECT_EQ(stalls[0].late_rank, 1);
  EXPECT_EQ(stalls[0].late_instruction, "Backward layers.0 (only, turn 0)");
  EXPECT_EQ(stalls[1].late_instruction, "before StatsReduce layers.0 (only, turn 0)");
  const std::vector<LateRank> late = FindLateRanks(*merged, -1);
  ASSERT_EQ(late.size(), 1u);
  EXPECT_EQ(late[0].rank, 1);
  EXPECT_NEAR(late[0].seconds, 460e-6, 1e-9);
  EXPECT_EQ(late[0].instruction, "Backward layers.0 (only, turn 0)");
}

}  // namespace
}  // namespace ravel::trace
