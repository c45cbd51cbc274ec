// NCCL between processes that share device 0: each rank is this program again, executed with the
// environment that a daemon gives to trainers that share a GPU.

#include <cstdio>
#include <string>
#include <thread>
#include <vector>

#include <absl/strings/str_cat.h>
#include <gtest/gtest.h>

#include "kernels/cuda_host/nccl_group.h"
#include "tests/gpu/rank_processes.h"
#include "tests/worker/comm/group_testing.h"
#include "tests/worker/comm/nccl_testing.h"

namespace ravel::comm {
namespace {

using testing::HearFromTest;
using testing::IsRankProcess;
using testing::RankProcesses;
using testing::RankRole;
using testing::TellTest;
using testing::TestRendezvous;
using testing::TheRankRole;

constexpr char kRankTest[] = "NcclGpuRank.DoesItsTask";
constexpr std::chrono::seconds kSetup{120};  // contexts of one device are made in turns
constexpr std::chrono::seconds kNamedWithin{5};

// -- what a rank does

std::string Script(Communicator& group) {
  std::string wrong = RunScript(group, 29, 24);
  return wrong.empty() ? "fine" : wrong;
}

// Gather, reduce and statistics groups by split, in use by threads of their own.
std::string Splits(Communicator& whole) {
  const int64_t each = ScriptBytes(whole.size());
  absl::Status made = whole.AllocateArena({.symmetric_bytes = 2 * each, .common_bytes = 2 * each});
  std::vector<int> everyone;
  for (int r = 0; r < whole.size(); ++r) {
    everyone.push_back(r);
  }
  std::string wrong[2] = {"not run", "not run"};
  std::unique_ptr<Communicator> parts[2];
  for (int p = 0; p < 2 && made.ok(); ++p) {
    auto part = whole.Split({.name = p == 0 ? "gather" : "reduce", .members = everyone});
    made = part.status();
    if (made.ok()) {
      parts[p] = *std::move(part);
    }
  }
  if (!made.ok()) {
    return made.ToString();
  }
  std::vector<std::thread> threads;
  for (int p = 0; p < 2; ++p) {
    threads.emplace_back([&, p] {
      wrong[p] = RunScriptAt(*parts[p],
                             {.members = everyone,
                              .common = whole.arena(plan::MemoryKind::kCommon) + p * each,
                              .symmetric = whole.arena(plan::MemoryKind::kSymmetric) + p * each},
                             31 + static_cast<uint64_t>(p),
                             8);
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  return wrong[0].empty() && wrong[1].empty() ? "fine" : wrong[0] + " " + wrong[1];
}

std::string Differ(Communicator& group) {
  std::vector<float> shard(16);
  std::vector<float> gathered(16 * static_cast<size_t>(group.size()));
  const int unit = group.rank() == group.size() - 1 ? 7 : 3;
  absl::Status status = group.AllGather({.tag = {plan::OpLabel::kGather, unit, 0},
                                         .shard = shard.data(),
                                         .gathered = gathered.data(),
                                         .shard_elements = 16});
  // The call may end before what peers announced has been looked at: a trainer's watchdog asks.
  const auto deadline = std::chrono::steady_clock::now() + kNamedWithin;
  while (status.ok() && std::chrono::steady_clock::now() < deadline) {
    status = group.Failure();
  }
  return std::string(status.message());
}

// Gathers until told that a peer is lost, or until NCCL says so.
std::string Lose(Communicator& group) {
  std::chrono::steady_clock::time_point told;
  std::thread watchdog([&] {
    HearFromTest();
    told = std::chrono::steady_clock::now();
    group.Abort("rank 0 is lost");
  });
  std::vector<float> shard(1 << 16);
  std::vector<float> gathered(shard.size() * static_cast<size_t>(group.size()));
  absl::Status status;
  for (int done = 0; status.ok(); ++done) {
    if (done == 3) {
      TellTest("running");
    }
    status = group.AllGather({.shard = shard.data(),
                              .gathered = gathered.data(),
                              .shard_elements = static_cast<int64_t>(shard.size())});
  }
  watchdog.join();
  return absl::StrCat(static_cast<int>(SecondsSince(told) * 1000), " ms: ", status.ToString());
}

std::string Do(const RankRole& role) {
  const auto group = CreateHostedNccl({.rank = role.rank,
                                       .size = role.size,
                                       .rendezvous = TestRendezvous(),
                                       .setup_timeout = kSetup,
                                       .check_collectives = true});
  if (!group.ok()) {
    return group.status().ToString();
  }
  return role.task == "script"   ? Script(**group)
         : role.task == "splits" ? Splits(**group)
         : role.task == "differ" ? Differ(**group)
                                 : Lose(**group);
}

TEST(NcclGpuRank, DoesItsTask) {
  if (!IsRankProcess()) {
    GTEST_SKIP() << "is run by the other tests, as a process of its own";
  }
  TellTest(Do(TheRankRole()));
}

// -- the processes

class NcclGpuTest : public ::testing::TestWithParam<int> {
 protected:
  void SetUp() override {
    UseTestLibraries();
    const auto gpu = OpenTestGpu();
    if (!gpu.ok()) {
      GTEST_SKIP() << gpu.status();
    }
    const auto version = kernels::NcclVersion((*gpu)->library());
    if (!version.ok()) {
      GTEST_SKIP() << version.status();
    }
    RecordProperty("nccl", *version);
  }

  static void ExpectFine(const std::string& task) {
    RankProcesses ranks(kRankTest, task, GetParam());
    for (int rank = 0; rank < GetParam(); ++rank) {
      EXPECT_EQ(ranks.Hear(rank), "fine") << "rank " << rank;
    }
  }
};

TEST_P(NcclGpuTest, RandomScriptGivesWhatEveryRankPutIn) {
  ExpectFine("script");
}

TEST_P(NcclGpuTest, SplitsRunConcurrently) {
  ExpectFine("splits");
}

TEST_P(NcclGpuTest, RanksThatDifferAreNamed) {
  RankProcesses ranks(kRankTest, "differ", GetParam());
  for (int rank = 0; rank < GetParam(); ++rank) {
    const std::string text = ranks.Hear(rank);
    EXPECT_NE(text.find("of unit 3"), std::string::npos) << text;
    EXPECT_NE(text.find("of unit 7"), std::string::npos) << text;
  }
}

TEST_P(NcclGpuTest, SurvivorsOfAKilledRankAreReleasedByTheirAbort) {
  RankProcesses ranks(kRankTest, "lose", GetParam());
  for (int rank = 0; rank < GetParam(); ++rank) {
    ASSERT_EQ(ranks.Hear(rank), "running");
  }
  ranks.Kill(0);
  for (int rank = 1; rank < GetParam(); ++rank) {
    ranks.Tell(rank, "go");
    const std::string report = ranks.Hear(rank);
    int milliseconds = -1;
    ASSERT_EQ(std::sscanf(report.c_str(), "%d ms", &milliseconds), 1) << report;
    EXPECT_LT(milliseconds, 2000) << report;
    EXPECT_NE(report.find("rank"), std::string::npos) << report;
    std::printf("[ rank %d released: %s ]\n", rank, report.c_str());
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, NcclGpuTest, ::testing::Values(2, 4));

}  // namespace
}  // namespace ravel::comm
