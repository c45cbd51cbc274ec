// What a job tells about a slow worker: the stall report of its traces names the rank that the
// others waited for, and what it was in.

#include <algorithm>
#include <chrono>
#include <memory>
#include <string>
#include <string_view>

#include <absl/strings/str_cat.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/json.h"
#include "tests/testing/eventually.h"
#include "tests/testing/mini_cluster.h"

namespace ravel::testing {
namespace {

using std::chrono::seconds;
using ::testing::HasSubstr;

class StallReportTest : public ::testing::TestWithParam<std::string> {};

TEST_P(StallReportTest, NamesTheRankThatOthersWaitedForAndWhatItWasIn) {
  absl::StatusOr<std::unique_ptr<MiniCluster>> started = MiniCluster::Start({}, kPatientDetection);
  ASSERT_TRUE(started.ok()) << started.status();
  MiniCluster& cluster = **started;
  ASSERT_EQ(cluster.StartWorker("w0"), absl::OkStatus());
  // It is late by seconds in the two steps that are traced, three times in each: more than a busy
  // machine makes of the others.
  std::string faults;
  for (int turn = 4; turn <= 9; ++turn) {
    absl::StrAppend(
        &faults, turn == 4 ? "" : ",", "execute.Backward.layers.1@", turn, ":stall=600ms");
  }
  ASSERT_EQ(cluster.StartWorker("w1", {{"RAVEL_FAULTS", faults}}), absl::OkStatus());
  ASSERT_EQ(cluster.StartWorker("w2"), absl::OkStatus());
  ASSERT_EQ(cluster.WaitForReadyNodes(3), absl::OkStatus());
  WriteTokens(cluster.folder() + "/tokens.bin", 20000, TinyJob().vocabulary);
  TinyJob job = {.name = "slow",
                 .tokens_path = cluster.folder() + "/tokens.bin",
                 .store = cluster.folder() + "/store",
                 .workers = 3,
                 .steps = 4,
                 .global_batch = 8,
                 .transport = GetParam()};
  job.more_spec =
      absl::StrCat("  observability:\n    trace: {firstStep: 2, lastStep: 3, directory: \"",
                   cluster.folder(),
                   "/traces\"}\n");
  ASSERT_EQ(cluster.Submit(job), absl::OkStatus());
  ASSERT_EQ(cluster.WaitForSuccess("slow", seconds(60)), absl::OkStatus());

  // Ranks follow the workers' names.
  const RunResult text = cluster.Ctl({"trace", "stalls", cluster.folder() + "/traces"});
  ASSERT_EQ(text.exit_code, 0) << text.err;
  EXPECT_THAT(text.out, HasSubstr("rank 1 was waited for")) << text.out;
  const RunResult report =
      cluster.Ctl({"trace", "stalls", cluster.folder() + "/traces", "-o", "json"});
  ASSERT_EQ(report.exit_code, 0) << report.err;
  const absl::StatusOr<json::Value> document = json::Parse(report.out);
  ASSERT_TRUE(document.ok()) << document.status();
  const json::Array& late = document->Find("lateRanks")->AsArray();
  ASSERT_FALSE(late.empty()) << report.out;
  EXPECT_EQ(late[0].Find("rank")->AsInt(), 1) << report.out;
  EXPECT_THAT(late[0].Find("instruction")->AsString(), HasSubstr("Backward layers.1"))
      << report.out;
  // Both others waited for at least two of the three turns.
  EXPECT_GT(late[0].Find("seconds")->AsDouble(), 1.8) << report.out;
  const json::Array& stalls = document->Find("items")->AsArray();
  // The longest stall for which it is blamed: the machine may have held another rank up for longer.
  const auto stall = std::find_if(stalls.begin(), stalls.end(), [](const json::Value& each) {
    const json::Value* const late_rank = each.Find("lateRank");
    return late_rank != nullptr && late_rank->AsInt() == 1;
  });
  ASSERT_NE(stall, stalls.end()) << report.out;
  EXPECT_NE(stall->Find("rank")->AsInt(), 1) << report.out;
  EXPECT_THAT(stall->Find("instruction")->AsString(), HasSubstr("layers.1")) << report.out;
}

int64_t BytesOf(const json::Value& lines, const std::string& what, const char* name) {
  for (const json::Value& line : lines.AsArray()) {
    if (line.Find("what")->AsString() == what) {
      const json::Value* const bytes = line.Find(name);
      return bytes == nullptr ? -1 : bytes->AsInt();
    }
  }
  return -2;
}

// The same job's memory, of both ranks, at its start and its end.
TEST(MemoryLedgerTest, PlannedAndMeasuredBytesOfEachRank) {
  absl::StatusOr<std::unique_ptr<MiniCluster>> started = MiniCluster::Start();
  ASSERT_TRUE(started.ok()) << started.status();
  MiniCluster& cluster = **started;
  ASSERT_EQ(cluster.StartWorkers(2), absl::OkStatus());
  WriteTokens(cluster.folder() + "/tokens.bin", 20000, TinyJob().vocabulary);
  TinyJob job = {.name = "memory",
                 .tokens_path = cluster.folder() + "/tokens.bin",
                 .store = cluster.folder() + "/store",
                 .steps = 4,
                 .hidden = 96,
                 .intermediate = 260};
  job.more_spec =
      absl::StrCat("  observability:\n    trace: {firstStep: 2, lastStep: 2, directory: \"",
                   cluster.folder(),
                   "/traces\"}\n");
  ASSERT_EQ(cluster.Submit(job), absl::OkStatus());
  ASSERT_EQ(cluster.WaitForSuccess("memory", seconds(60)), absl::OkStatus());
  const RunResult report =
      cluster.Ctl({"trace", "memory", cluster.folder() + "/traces", "-o", "json"});
  ASSERT_EQ(report.exit_code, 0) << report.err;
  const absl::StatusOr<json::Value> document = json::Parse(report.out);
  ASSERT_TRUE(document.ok()) << document.status();
  const json::Array& ranks = document->Find("items")->AsArray();
  ASSERT_EQ(ranks.size(), 2u) << report.out;
  for (const json::Value& rank : ranks) {
    for (const char* when : {"start", "end"}) {
      const json::Value* const moment = rank.Find(when);
      ASSERT_NE(moment, nullptr) << report.out;
      for (const char* use :
           {"weights", "gradients", "optimizer state", "activations", "staging"}) {
        const int64_t planned = BytesOf(*moment->Find("uses"), use, "plannedBytes");
        EXPECT_GT(planned, 0) << use;
      }
      const json::Value& process = *moment->Find("process");
      // All of it is there from the start. Pages that ranks share count in part, and in whole for
      // the rank that ends last.
      const int64_t arena = BytesOf(process, "arena", "plannedBytes");
      const int64_t measured = BytesOf(process, "arena", "measuredBytes");
      const int64_t slack = arena / 50 + (1 << 20);
      EXPECT_GE(measured, arena - slack) << report.out;
      EXPECT_LE(measured, (when == std::string_view("end") ? 2 * arena : arena) + slack)
          << report.out;
      EXPECT_GT(BytesOf(process, "communicator control blocks", "measuredBytes"), 0);
      EXPECT_GT(BytesOf(process, "save staging", "plannedBytes"), 0);
      EXPECT_GT(BytesOf(process, "programs and libraries", "measuredBytes"), 0);
    }
    EXPECT_GT(BytesOf(*rank.Find("end")->Find("process"), "data files", "measuredBytes"), 0);
  }
  const RunResult table = cluster.Ctl({"trace", "memory", cluster.folder() + "/traces"});
  EXPECT_THAT(table.out, HasSubstr("optimizer state")) << table.err;
  // Each group of the model has a line in the log of the first rank.
  const RunResult logs = cluster.Ctl({"logs", "memory"});
  EXPECT_THAT(logs.out, HasSubstr("wire/step")) << logs.err;
  EXPECT_THAT(logs.out, HasSubstr("layers.1"));
  EXPECT_THAT(logs.out, HasSubstr("memory at the end: by use"));
}

INSTANTIATE_TEST_SUITE_P(Transports,
                         StallReportTest,
                         ::testing::Values("shm", "gloo"),
                         [](const auto& test) { return test.param; });

}  // namespace
}  // namespace ravel::testing
