// Groups that are split off a communicator: of a mesh, concurrently, in the parent's arena.

#include <atomic>
#include <cstring>
#include <future>

#include <absl/strings/str_cat.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/worker/comm/group_testing.h"
#include "worker/comm/collective_ledger.h"

namespace ravel::comm {
namespace {

using ::testing::HasSubstr;

// Rank o * inner + i.
struct MeshCase {
  std::string transport;
  int outer;
  int inner;
  int size() const { return outer * inner; }
};

std::string MeshCaseName(const ::testing::TestParamInfo<MeshCase>& info) {
  return absl::StrCat(info.param.transport, "_", info.param.outer, "x", info.param.inner);
}

std::vector<int> InnerMembers(const MeshCase& mesh, int rank) {
  std::vector<int> members;
  for (int i = 0; i < mesh.inner; ++i) {
    members.push_back(rank / mesh.inner * mesh.inner + i);
  }
  return members;
}

std::vector<int> OuterMembers(const MeshCase& mesh, int rank) {
  std::vector<int> members;
  for (int o = 0; o < mesh.outer; ++o) {
    members.push_back(o * mesh.inner + rank % mesh.inner);
  }
  return members;
}

std::vector<int> AllMembers(const MeshCase& mesh) {
  std::vector<int> members;
  for (int r = 0; r < mesh.size(); ++r) {
    members.push_back(r);
  }
  return members;
}

std::unique_ptr<Communicator> MustSplit(Communicator& whole,
                                        const std::string& name,
                                        const std::vector<int>& members) {
  auto part = whole.Split({.name = name, .members = members});
  EXPECT_TRUE(part.ok()) << part.status();
  return part.ok() ? *std::move(part) : nullptr;
}

class SplitTest : public ::testing::TestWithParam<MeshCase> {};

// The last rank of all comes late to each group: whoever shares a group with it says so, by its
// rank in the whole, and once.
TEST_P(SplitTest, WaitsAreForTheRankThatCameLast) {
  const MeshCase& mesh = GetParam();
  if (mesh.transport == "nccl") {
    GTEST_SKIP() << "a device does not tell for whom it has waited";
  }
  constexpr auto kLate = std::chrono::milliseconds(30);
  constexpr int kRounds = 10;
  RunRanks(mesh.transport, mesh.size(), [&](Communicator& whole) {
    const std::unique_ptr<Communicator> inner =
        MustSplit(whole, "inner", InnerMembers(mesh, whole.rank()));
    ASSERT_TRUE(whole.Barrier({}).ok());
    inner->TakePeerWait();
    const int late = mesh.size() - 1;
    const bool waits = whole.rank() != late && whole.rank() / mesh.inner == late / mesh.inner;
    int as_expected = 0;  // in any other round another rank was not scheduled for longer
    for (int round = 0; round < kRounds; ++round) {
      if (whole.rank() == late) {
        const auto start = std::chrono::steady_clock::now();
        while (std::chrono::steady_clock::now() - start < kLate) {
          std::this_thread::yield();
        }
      }
      ASSERT_TRUE(inner->Barrier({}).ok());
      const PeerWait wait = inner->TakePeerWait();
      as_expected += waits ? wait.rank == late && wait.nanoseconds > 10'000'000
                           : wait.nanoseconds < 25'000'000;
      EXPECT_EQ(inner->TakePeerWait().rank, -1);
      ASSERT_TRUE(whole.Barrier({}).ok());
      inner->TakePeerWait();
    }
    EXPECT_GT(as_expected, 0) << "rank " << whole.rank();
  });
}

TEST_P(SplitTest, PartsOfAMeshRunConcurrentlyFromTheirOwnThreads) {
  const MeshCase& mesh = GetParam();
  RunRanks(mesh.transport, mesh.size(), [&](Communicator& whole) {
    const std::vector<std::pair<std::string, std::vector<int>>> kinds = {
        {"gather", InnerMembers(mesh, whole.rank())},
        {"reduce", InnerMembers(mesh, whole.rank())},
        {"outer", OuterMembers(mesh, whole.rank())},
        {"stats", AllMembers(mesh)}};
    std::vector<std::unique_ptr<Communicator>> parts;
    parts.push_back(MustSplit(whole, kinds[0].first, kinds[0].second));
    const int64_t each = ScriptBytes(mesh.size());
    ASSERT_TRUE(whole
                    .AllocateArena({.symmetric_bytes = each * 4,
                                    .common_bytes = each * (2 + mesh.inner),
                                    .common_copies = mesh.outer})
                    .ok());
    for (size_t kind = 1; kind < kinds.size(); ++kind) {
      parts.push_back(MustSplit(whole, kinds[kind].first, kinds[kind].second));
    }
    std::vector<std::thread> threads;
    std::vector<std::string> wrong(kinds.size());
    for (size_t kind = 0; kind < kinds.size(); ++kind) {
      Communicator& part = *parts[kind];
      const std::vector<int>& members = kinds[kind].second;
      ASSERT_EQ(part.size(), static_cast<int>(members.size()));
      ASSERT_EQ(members[static_cast<size_t>(part.rank())], whole.rank());
      const int64_t at = static_cast<int64_t>(kind) * each;
      ScriptPlace place = {.members = members,
                           .common = whole.arena(plan::MemoryKind::kCommon) + at,
                           .symmetric = whole.arena(plan::MemoryKind::kSymmetric) + at};
      if (kind == 2) {  // has members in every copy, each with its slice in its own
        place.common += whole.rank() % mesh.inner * each;
      } else if (kind == 3) {
        place.common = nullptr;
      }
      threads.emplace_back(
          [&, place, kind] { wrong[kind] = RunScriptAt(part, place, 31 + kind, 30); });
    }
    for (std::thread& thread : threads) {
      thread.join();
    }
    EXPECT_THAT(wrong, ::testing::Each(""));
    EXPECT_TRUE(whole.Barrier({}).ok());
  });
}

TEST_P(SplitTest, ReplicasHaveCopiesOfTheCommonMemory) {
  const MeshCase& mesh = GetParam();
  RunRanks(mesh.transport, mesh.size(), [&](Communicator& whole) {
    const auto inner = MustSplit(whole, "shard", InnerMembers(mesh, whole.rank()));
    ASSERT_TRUE(whole.AllocateArena({.common_bytes = 5000, .common_copies = mesh.outer}).ok());
    std::byte* common = whole.arena(plan::MemoryKind::kCommon);
    ASSERT_EQ(common, inner->arena(plan::MemoryKind::kCommon));
    const int replica = whole.rank() / mesh.inner;
    if (inner->rank() == 0) {
      for (int i = 0; i < 5000; ++i) {
        ASSERT_EQ(common[i], std::byte{0});
      }
      common[4999] = static_cast<std::byte>(replica + 1);
    }
    ASSERT_TRUE(whole.Barrier({}).ok());
    if (whole.shared_memory()) {
      EXPECT_EQ(common[4999], static_cast<std::byte>(replica + 1));
    }
    ASSERT_TRUE(whole.Barrier({}).ok());
  });
}

// What HFSDP does once a step: each replica owns a piece of the shard, in its own copy of the
// gathered weights.
TEST_P(SplitTest, OuterGatherInPlaceCopiesBetweenCopiesOfTheCommonMemory) {
  const MeshCase& mesh = GetParam();
  constexpr int64_t kPiece = 70001;
  RunRanks(mesh.transport, mesh.size(), [&](Communicator& whole) {
    const auto inner = MustSplit(whole, "shard", InnerMembers(mesh, whole.rank()));
    const auto outer = MustSplit(whole, "outer", OuterMembers(mesh, whole.rank()));
    const int64_t shard = kPiece * mesh.outer;
    ASSERT_TRUE(whole
                    .AllocateArena({.common_bytes = shard * mesh.inner * kElementBytes,
                                    .common_copies = mesh.outer})
                    .ok());
    auto* gathered = reinterpret_cast<float*>(whole.arena(plan::MemoryKind::kCommon));
    float* model_weight = gathered + inner->rank() * shard;
    float* main_weight = model_weight + outer->rank() * kPiece;
    for (int round = 0; round < 3; ++round) {
      for (int64_t i = 0; i < kPiece; ++i) {
        main_weight[i] = ValueOf(round, whole.rank(), i);
      }
      ASSERT_TRUE(outer
                      ->AllGather({.tag = {plan::OpLabel::kOuterGather, 0, 0},
                                   .shard = main_weight,
                                   .gathered = model_weight,
                                   .shard_elements = kPiece})
                      .ok());
      ASSERT_TRUE(inner
                      ->AllGather({.tag = {plan::OpLabel::kGather, 0, 0},
                                   .shard = model_weight,
                                   .gathered = gathered,
                                   .shard_elements = shard})
                      .ok());
      for (int i = 0; i < mesh.inner; ++i) {
        for (int o = 0; o < mesh.outer; ++o) {
          for (int64_t e = 0; e < kPiece; ++e) {
            ASSERT_EQ(gathered[i * shard + o * kPiece + e], ValueOf(round, o * mesh.inner + i, e));
          }
        }
      }
      ASSERT_TRUE(whole.Barrier({}).ok());  // all have read
    }
  });
}

// Weights that stay gathered: the shard is a slice of the buffer that the gather fills.
TEST_P(SplitTest, ResidentWeightsAreGatheredAroundTheOwnSlice) {
  const MeshCase& mesh = GetParam();
  constexpr int64_t kShard = 100003;
  RunRanks(mesh.transport, mesh.size(), [&](Communicator& whole) {
    const auto inner = MustSplit(whole, "shard", InnerMembers(mesh, whole.rank()));
    const int64_t bytes = kShard * mesh.inner * kElementBytes;
    ASSERT_TRUE(whole.AllocateArena({.private_bytes = bytes, .symmetric_bytes = bytes}).ok());
    const std::vector<int> members = InnerMembers(mesh, whole.rank());
    for (const auto kind : {plan::MemoryKind::kPrivate, plan::MemoryKind::kSymmetric}) {
      auto* gathered = reinterpret_cast<float*>(inner->arena(kind));
      float* own = gathered + inner->rank() * kShard;
      for (int round = 0; round < 3; ++round) {
        for (int64_t i = 0; i < kShard; ++i) {
          own[i] = ValueOf(round, whole.rank(), i);
        }
        ASSERT_TRUE(
            inner->AllGather({.shard = own, .gathered = gathered, .shard_elements = kShard}).ok());
        for (size_t r = 0; r < members.size(); ++r) {
          for (int64_t i = 0; i < kShard; ++i) {
            ASSERT_EQ(gathered[static_cast<int64_t>(r) * kShard + i],
                      ValueOf(round, members[r], i));
          }
        }
      }
    }
  });
}

TEST_P(SplitTest, PiecesOfTwoByteElements) {
  const MeshCase& mesh = GetParam();
  constexpr int64_t kShard = 1001;
  RunRanks(mesh.transport, mesh.size(), [&](Communicator& whole) {
    const auto outer = MustSplit(whole, "outer", OuterMembers(mesh, whole.rank()));
    const std::vector<int> members = OuterMembers(mesh, whole.rank());
    ASSERT_TRUE(whole.AllocateArena({.symmetric_bytes = kShard * mesh.outer * 2}).ok());
    auto* staging = reinterpret_cast<uint16_t*>(whole.arena(plan::MemoryKind::kSymmetric));
    const auto value = [](int rank, int64_t index) {
      return static_cast<uint16_t>(rank * 9001 + index);
    };
    for (int64_t i = 0; i < kShard * mesh.outer; ++i) {
      staging[i] = value(whole.rank(), i);
    }
    std::vector<uint16_t> receive(static_cast<size_t>(kShard * mesh.outer));
    const auto views = outer->ExchangePieces({.tag = {plan::OpLabel::kOuterReduce, 0, 0},
                                              .staging = reinterpret_cast<const float*>(staging),
                                              .receive = reinterpret_cast<float*>(receive.data()),
                                              .shard_elements = kShard,
                                              .contributors = mesh.outer,
                                              .element_bytes = 2});
    ASSERT_TRUE(views.ok()) << views.status();
    for (size_t r = 0; r < members.size(); ++r) {
      const auto* piece = reinterpret_cast<const uint16_t*>(views->pieces[r]);
      for (int64_t i = 0; i < kShard; ++i) {
        ASSERT_EQ(piece[i], value(members[r], outer->rank() * kShard + i));
      }
    }
    ASSERT_TRUE(outer->ReleasePieces({}).ok());
  });
}

TEST_P(SplitTest, TheLedgerHoldsAllGroupsOfARank) {
  const MeshCase& mesh = GetParam();
  RunRanks(mesh.transport, mesh.size(), [&](Communicator& whole) {
    const auto inner = MustSplit(whole, "shard", InnerMembers(mesh, whole.rank()));
    ASSERT_TRUE(inner->Barrier({plan::OpLabel::kGather, 4, 0}).ok());
    if (mesh.transport == "mixed") {  // two ranks on each host
      EXPECT_STREQ(inner->transport(), mesh.inner <= 2 ? "shm" : "gloo");
      EXPECT_EQ(inner->shared_memory(), mesh.inner <= 2);
    }
    auto logs = inner->ledger().logs();
    std::erase_if(logs, [](const auto& log) { return log->group().name == "host"; });
    ASSERT_EQ(logs.size(), 2u);
    EXPECT_EQ(logs[0]->group().name, "world");
    EXPECT_EQ(logs[1]->group().name, "shard");
    EXPECT_EQ(logs[1]->group().members, InnerMembers(mesh, whole.rank()));
    const std::vector<IssueLog::Entry> entries = logs[1]->Last(10);
    ASSERT_EQ(entries.size(), 1u);
    EXPECT_EQ(entries[0].record.unit, 4);
    EXPECT_EQ(logs[1]->snapshot().completed, 1u);
    ASSERT_TRUE(whole.Barrier({}).ok());
  });
}

INSTANTIATE_TEST_SUITE_P(Meshes,
                         SplitTest,
                         ::testing::Values(MeshCase{"local", 1, 1},
                                           MeshCase{"local", 2, 2},
                                           MeshCase{"local", 4, 2},
                                           MeshCase{"shm", 1, 2},
                                           MeshCase{"shm", 2, 1},
                                           MeshCase{"shm", 2, 3},
                                           MeshCase{"shm", 4, 2},
                                           MeshCase{"gloo", 2, 1},
                                           MeshCase{"gloo", 2, 2},
                                           MeshCase{"gloo", 2, 3},
                                           MeshCase{"mixed", 2, 1},
                                           MeshCase{"mixed", 2, 2},
                                           MeshCase{"mixed", 2, 3},
                                           MeshCase{"mixed", 3, 2},
                                           MeshCase{"nccl", 2, 1},
                                           MeshCase{"nccl", 2, 2},
                                           MeshCase{"nccl", 2, 3}),
                         MeshCaseName);

class SplitFailureTest : public ::testing::TestWithParam<MeshCase> {};

// Rank 0 aborts its outer group; every other rank waits in an inner group whose first member does
// not come, and in the outer groups at the same time.
TEST_P(SplitFailureTest, AbortOfOnePartIsThatOfAll) {
  const MeshCase& mesh = GetParam();
  std::promise<void> over;
  std::shared_future<void> all_released(over.get_future());
  std::atomic<int> released = 0;
  RunRanks(mesh.transport, mesh.size(), [&](Communicator& whole) {
    const auto inner = MustSplit(whole, "shard", InnerMembers(mesh, whole.rank()));
    const auto outer = MustSplit(whole, "outer", OuterMembers(mesh, whole.rank()));
    ASSERT_TRUE(whole.Barrier({}).ok());
    if (whole.rank() == 0 || (inner->rank() == 0 && whole.shared_memory())) {
      if (whole.rank() == 0) {
        outer->Abort("told to stop");
        EXPECT_EQ(inner->Barrier({}), absl::AbortedError("told to stop"));
        EXPECT_EQ(whole.Barrier({}), absl::AbortedError("told to stop"));
      }
      all_released.wait();
      return;
    }
    if (!whole.shared_memory()) {  // such a rank hears from its own watchdog
      inner->Abort("told to stop");
    }
    EXPECT_EQ(inner->Barrier({}).code(), absl::StatusCode::kAborted);
    EXPECT_EQ(outer->Barrier({}), absl::AbortedError("told to stop"));
    if (++released == mesh.outer * (mesh.inner - 1)) {
      over.set_value();
    }
  });
}

TEST_P(SplitFailureTest, MismatchNamesTheGroupAndTheRanksOfTheWhole) {
  const MeshCase& mesh = GetParam();
  RunRanks(mesh.transport, mesh.size(), [&](Communicator& whole) {
    whole.ledger().SetUnitNames({"embed", "layers.0", "layers.1"});
    const auto inner = MustSplit(whole, "shard", InnerMembers(mesh, whole.rank()));
    ASSERT_TRUE(whole.Barrier({}).ok());
    if (whole.rank() < mesh.size() - mesh.inner) {
      return;  // other replicas agree: nothing to see
    }
    const int unit = whole.rank() == mesh.size() - 1 ? 2 : 1;
    const absl::Status status = inner->Barrier({plan::OpLabel::kGather, unit, 0});
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
    const std::string text(status.message());
    EXPECT_THAT(text, HasSubstr("group shard"));
    EXPECT_THAT(text, HasSubstr("Gather of layers.0"));
    EXPECT_THAT(text, HasSubstr("Gather of layers.1"));
    EXPECT_THAT(text, HasSubstr(absl::StrCat("rank ", mesh.size() - 1, " issued")));
  });
}

TEST_P(SplitFailureTest, GroupsThatDisagreeAreRefusedOnEveryRank) {
  const MeshCase& mesh = GetParam();
  RunRanks(mesh.transport, mesh.size(), [&](Communicator& whole) {
    std::vector<int> members = InnerMembers(mesh, whole.rank());
    if (whole.rank() == mesh.size() - 1) {
      members = {whole.rank()};
    }
    const auto part = whole.Split({.name = "shard", .members = members});
    EXPECT_EQ(part.status().code(), absl::StatusCode::kFailedPrecondition) << part.status();
    EXPECT_THAT(std::string(part.status().message()),
                HasSubstr(absl::StrCat("{", mesh.size() - 1, "}")));
    EXPECT_FALSE(whole.Barrier({}).ok());
  });
}

// A replica that is done does not take the others with it.
TEST_P(SplitFailureTest, LeavingOneGroupLeavesTheOthersAlone) {
  const MeshCase& mesh = GetParam();
  std::atomic<int> left = 0;
  std::promise<void> gone;
  std::shared_future<void> first_replica_gone(gone.get_future());
  RunRanks(mesh.transport, mesh.size(), [&](Communicator& whole) {
    auto inner = MustSplit(whole, "shard", InnerMembers(mesh, whole.rank()));
    ASSERT_TRUE(inner->Barrier({}).ok());
    ASSERT_TRUE(whole.Barrier({}).ok());
    if (whole.rank() < mesh.inner) {
      inner = nullptr;
      if (++left == mesh.inner) {
        gone.set_value();
      }
      return;
    }
    first_replica_gone.wait();
    for (int i = 0; i < 100; ++i) {
      ASSERT_TRUE(inner->Barrier({}).ok());
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Meshes,
                         SplitFailureTest,
                         ::testing::Values(MeshCase{"local", 2, 2},
                                           MeshCase{"shm", 2, 2},
                                           MeshCase{"shm", 2, 3},
                                           MeshCase{"gloo", 2, 2},
                                           MeshCase{"mixed", 2, 2},
                                           MeshCase{"mixed", 2, 3},
                                           MeshCase{"nccl", 2, 2}),
                         MeshCaseName);

}  // namespace
}  // namespace ravel::comm
