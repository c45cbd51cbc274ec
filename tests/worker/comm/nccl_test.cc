// NCCL communicators over emulated devices and the emulated NCCL: streams, setting up, failing.

#include <cstring>
#include <latch>
#include <thread>

#include <absl/strings/str_cat.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "kernels/cuda_host/nccl_group.h"
#include "tests/worker/comm/group_testing.h"
#include "tests/worker/comm/nccl_testing.h"
#include "worker/comm/collective_ledger.h"
#include "worker/comm/communicator_factory.h"
#include "worker/comm/nccl_root.h"

namespace ravel::comm {
namespace {

using kernels::CudaGpu;
using kernels::CudaMemory;
using kernels::CudaStream;
using ::testing::HasSubstr;

std::string TextOf(const absl::Status& status) {
  return std::string(status.message());
}

// A rank with its device, as a trainer has it.
struct DeviceRank {
  std::unique_ptr<CudaGpu> gpu;
  std::unique_ptr<CudaStream> stream;
  std::unique_ptr<Communicator> group;
};

DeviceRank MakeRank(NcclOptions options) {
  DeviceRank rank;
  auto gpu = OpenTestGpu();
  EXPECT_TRUE(gpu.ok()) << gpu.status();
  rank.gpu = *std::move(gpu);
  rank.stream = *rank.gpu->MakeCopyStream(CudaGpu::Priority::kNormal);
  options.gpu = rank.gpu.get();
  auto group = CreateNcclCommunicator(options);
  EXPECT_TRUE(group.ok()) << group.status();
  rank.group = group.ok() ? *std::move(group) : nullptr;
  return rank;
}

class NcclTest : public ::testing::Test {
 protected:
  NcclTest() {
    UseTestLibraries();
    InjectNcclFaults(kNoFaults);
  }
  ~NcclTest() override { InjectNcclFaults(kNoFaults); }

  // Ranks as threads; `options` but for rank, size and rendezvous.
  static void Run(int size,
                  const NcclOptions& options,
                  const std::function<void(DeviceRank&)>& body) {
    Board board(size);
    std::vector<std::thread> threads;
    for (int r = 0; r < size; ++r) {
      threads.emplace_back([&, r] {
        NcclOptions own = options;
        own.rank = r;
        own.size = size;
        own.rendezvous = board.ForRank(r);
        DeviceRank rank = MakeRank(own);
        if (rank.group != nullptr) {
          body(rank);
        }
      });
    }
    for (std::thread& thread : threads) {
      thread.join();
    }
  }
};

TEST_F(NcclTest, TensorCollectivesAreWorkOfAStreamOnMemoryOfTheArena) {
  constexpr int64_t kShard = 1000;
  constexpr int kSize = 3;
  Run(kSize, {}, [](DeviceRank& rank) {
    Communicator& group = *rank.group;
    EXPECT_EQ(group.backend(), kernels::Backend::kCuda);
    EXPECT_STREQ(group.transport(), "nccl");
    EXPECT_FALSE(group.shared_memory());
    ASSERT_TRUE(group
                    .AllocateArena({.private_bytes = kShard * kSize * kElementBytes,
                                    .symmetric_bytes = kShard * kSize * kElementBytes})
                    .ok());
    auto pinned = rank.gpu->AllocatePinned(kShard * kSize * kElementBytes);
    ASSERT_TRUE(pinned.ok());
    auto* host = static_cast<float*>(pinned->data());
    auto* gathered = reinterpret_cast<float*>(group.arena(plan::MemoryKind::kPrivate));
    auto* staging = reinterpret_cast<float*>(group.arena(plan::MemoryKind::kSymmetric));
    float* own = gathered + group.rank() * kShard;
    for (int64_t i = 0; i < kShard; ++i) {
      host[i] = ValueOf(1, group.rank(), i);
    }
    // Nobody waits in between: the stream orders everything.
    rank.stream->CopyMemory(own, host, kShard * kElementBytes);
    ASSERT_TRUE(group
                    .AllGather({.shard = own,
                                .gathered = gathered,
                                .shard_elements = kShard,
                                .stream = rank.stream.get()})
                    .ok());
    rank.stream->CopyMemory(staging, gathered, kShard * kSize * kElementBytes);
    const auto views = group.ExchangePieces({.staging = staging,
                                             .receive = gathered,
                                             .shard_elements = kShard,
                                             .contributors = kSize,
                                             .stream = rank.stream.get()});
    ASSERT_TRUE(views.ok()) << views.status();
    EXPECT_EQ(views->pieces[static_cast<size_t>(group.rank())], staging + group.rank() * kShard);
    for (int r = 0; r < kSize; ++r) {
      rank.stream->CopyMemory(
          host + r * kShard, views->pieces[static_cast<size_t>(r)], kShard * kElementBytes);
    }
    ASSERT_TRUE(group.ReleasePieces({}).ok());
    ASSERT_TRUE(WaitForStream(*rank.stream, group).ok());
    for (int r = 0; r < kSize; ++r) {  // every rank staged all shards: each piece is this shard
      for (int64_t i = 0; i < kShard; ++i) {
        ASSERT_EQ(host[r * kShard + i], ValueOf(1, group.rank(), i)) << r << " " << i;
      }
    }
    ASSERT_TRUE(group.Failure().ok());
    const auto logs = group.ledger().logs();
    EXPECT_EQ(logs[0]->snapshot().completed, logs[0]->snapshot().sequence);
    ASSERT_TRUE(group.Barrier({}).ok());
  });
}

TEST_F(NcclTest, DelaysOfCollectivesChangeNothing) {
  InjectNcclFaults({-1, -1, -1, -1, 2000});
  RunRanks("nccl", 3, [](Communicator& group) { EXPECT_EQ(RunScript(group, 5, 40), ""); });
}

TEST_F(NcclTest, BlocksAndSplitsReachTheLibraryAndAllIsClosedNotAborted) {
  const auto before = CountsOfNccl();
  Run(2, {.max_ctas = 3}, [](DeviceRank& rank) {
    const auto part = rank.group->Split({.name = "gather", .members = {0, 1}});
    ASSERT_TRUE(part.ok()) << part.status();
    EXPECT_TRUE((*part)->Barrier({}).ok());
    ASSERT_TRUE(rank.group->Barrier({}).ok());
  });
  const auto after = CountsOfNccl();
  EXPECT_EQ(after.inits - before.inits, 2);
  EXPECT_EQ(after.splits - before.splits, 2);
  EXPECT_EQ(after.max_ctas, 3);
  EXPECT_EQ(after.destroys - before.destroys, 4);
  EXPECT_EQ(after.aborts, before.aborts);
}

TEST_F(NcclTest, PeerThatNeverComesEndsTheSetUpWithItsDeadline) {
  InjectNcclFaults({1, -1, -1, -1, -1});
  Board board(2);
  std::vector<std::thread> threads;
  std::vector<absl::Status> ended(2);
  for (int r = 0; r < 2; ++r) {
    threads.emplace_back([&, r] {
      ended[static_cast<size_t>(r)] =
          CreateHostedNccl({.rank = r,
                            .size = 2,
                            .rendezvous = board.ForRank(r),
                            .setup_timeout = std::chrono::milliseconds(2000)})
              .status();
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  for (size_t r = 0; r < 2; ++r) {
    EXPECT_EQ(ended[r].code(), absl::StatusCode::kDeadlineExceeded) << ended[r];
    EXPECT_THAT(TextOf(ended[r]),
                HasSubstr(absl::StrCat("rank ", r, " joins group world: not all ranks came")));
  }
}

TEST_F(NcclTest, SetUpThatHangsIsCancelledByItsOwner) {
  InjectNcclFaults({1, -1, -1, -1, -1});
  Board board(2);
  std::vector<std::thread> threads;
  const auto start = std::chrono::steady_clock::now();
  for (int r = 0; r < 2; ++r) {
    threads.emplace_back([&, r] {
      const auto group = CreateHostedNccl(
          {.rank = r, .size = 2, .rendezvous = board.ForRank(r), .keep_going = [&] {
             return SecondsSince(start) < 0.2 ? absl::OkStatus()
                                              : absl::AbortedError("a peer is lost");
           }});
      EXPECT_EQ(group.status().code(), absl::StatusCode::kAborted) << group.status();
      EXPECT_THAT(TextOf(group.status()), HasSubstr("a peer is lost"));
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  EXPECT_LT(SecondsSince(start), 5.0);
}

TEST_F(NcclTest, SplitThatHangsEndsWithItsDeadline) {
  InjectNcclFaults({-1, 0, -1, -1, -1});
  Run(2, {.setup_timeout = std::chrono::milliseconds(3000)}, [](DeviceRank& rank) {
    const auto part = rank.group->Split({.name = "outer", .members = {0, 1}});
    EXPECT_FALSE(part.ok());
    EXPECT_THAT(TextOf(part.status()), HasSubstr("outer"));
    EXPECT_FALSE(rank.group->Barrier({}).ok());
  });
}

// What a trainer does: the step thread waits for its device, the watchdog asks and aborts.
TEST_F(NcclTest, AsyncErrorIsFoundByTheWatchdogAndNamesGroupRankAndOperation) {
  Run(2, {}, [](DeviceRank& rank) {
    Communicator& group = *rank.group;
    group.ledger().SetUnitNames({"embed", "layers.0"});
    ASSERT_TRUE(group.AllocateArena({.private_bytes = 8 * kElementBytes}).ok());
    ASSERT_TRUE(group.Barrier({}).ok());
    if (group.rank() == 1) {
      InjectNcclFaults({-1, -1, -1, 1, -1});
    }
    auto* gathered = reinterpret_cast<float*>(group.arena(plan::MemoryKind::kPrivate));
    // The error may come while this is still under way.
    absl::Status failure = group.AllGather({.tag = {plan::OpLabel::kGather, 1, 0},
                                            .shard = gathered + 4 * group.rank(),
                                            .gathered = gathered,
                                            .shard_elements = 4,
                                            .stream = rank.stream.get()});
    const auto start = std::chrono::steady_clock::now();
    std::thread watchdog([&] {
      while (failure.ok() && SecondsSince(start) < 10) {
        failure = group.Failure();
        std::this_thread::yield();
      }
      group.Abort(TextOf(failure));
    });
    watchdog.join();
    EXPECT_TRUE(rank.stream->Synchronize().ok()) << "aborted work leaves the device";
    EXPECT_LT(SecondsSince(start), 5.0);
    EXPECT_EQ(failure.code(), absl::StatusCode::kUnavailable) << failure;
    EXPECT_THAT(TextOf(failure), HasSubstr("group world"));
    EXPECT_THAT(TextOf(failure), HasSubstr(absl::StrCat("rank ", group.rank(), " of 2")));
    EXPECT_THAT(TextOf(failure), HasSubstr("Gather of layers.0"));
    EXPECT_THAT(TextOf(failure),
                HasSubstr(group.rank() == 1 ? "injected system error" : "remote process exited"));
    EXPECT_EQ(group.Barrier({}), failure) << "a failure is final";
  });
}

TEST_F(NcclTest, AbortFromAnotherThreadEndsRunningAndEnqueuedWork) {
  std::latch all_issued(2);
  std::latch all_seen(2);
  Run(2, {}, [&](DeviceRank& rank) {
    Communicator& group = *rank.group;
    const auto part = group.Split({.name = "reduce", .members = {0, 1}});
    ASSERT_TRUE(part.ok()) << part.status();
    ASSERT_TRUE(group.AllocateArena({.private_bytes = 64 * kElementBytes}).ok());
    ASSERT_TRUE(group.Barrier({}).ok());
    InjectNcclFaults({-1, -1, 0, -1, -1});  // rank 0 hangs in what it starts from now on
    auto* memory = reinterpret_cast<float*>(group.arena(plan::MemoryKind::kPrivate));
    for (Communicator* on : {&group, part->get(), &group}) {
      EXPECT_TRUE(on->AllGather({.shard = memory + 8 * group.rank(),
                                 .gathered = memory,
                                 .shard_elements = 8,
                                 .stream = rank.stream.get()})
                      .ok());
    }
    all_issued.arrive_and_wait();
    EXPECT_FALSE(*rank.stream->Done());
    all_seen.arrive_and_wait();
    std::thread watchdog([&] { (*part)->Abort("told to stop"); });
    const auto start = std::chrono::steady_clock::now();
    watchdog.join();
    EXPECT_TRUE(rank.stream->Synchronize().ok());
    EXPECT_LT(SecondsSince(start), 5.0);
    EXPECT_EQ(group.Failure(), absl::AbortedError("told to stop"));
    EXPECT_EQ((*part)->Barrier({}), absl::AbortedError("told to stop"));
  });
}

// -- graphs

// A rank's gather of eight values, kept and captured by all ranks at once.
struct CapturedGather {
  static constexpr int64_t kShard = 8;
  kernels::CudaCallLog log{kernels::CudaCallLog::Collectives::kKept};
  kernels::CudaCalls calls;
  std::unique_ptr<kernels::CudaGraph> graph;
  float* memory = nullptr;

  absl::Status Issue(DeviceRank& rank, int64_t generation) const {
    return rank.group->AllGather({.tag = {.generation = generation},
                                  .shard = memory + kShard * rank.group->rank(),
                                  .gathered = memory,
                                  .shard_elements = kShard,
                                  .stream = rank.stream.get()});
  }
  void Capture(DeviceRank& rank) {
    ASSERT_TRUE(rank.group->Captures().ok());
    const int64_t bytes = 2 * kShard * kElementBytes;
    ASSERT_TRUE(rank.group->AllocateArena({.private_bytes = bytes}).ok());
    memory = reinterpret_cast<float*>(rank.group->arena(plan::MemoryKind::kPrivate));
    log.Record();
    rank.stream->set_log(&log);
    ASSERT_TRUE(Issue(rank, 1).ok());
    rank.stream->set_log(nullptr);
    ASSERT_TRUE(log.Finish()) << log.difference();
    calls = log.calls();
    ASSERT_EQ(calls.size(), 1u);
    EXPECT_EQ(NameOf(calls[0]), "a gather of NCCL");
    ASSERT_TRUE(rank.group->MarkPassed(*rank.stream).ok());
    ASSERT_TRUE(WaitForStream(*rank.stream, *rank.group).ok());
    rank.stream->BeginCapture();
    ASSERT_TRUE(rank.stream->Do(calls[0]).ok());
    auto captured = rank.stream->EndCapture();
    ASSERT_TRUE(captured.ok()) << captured.status();
    graph = std::make_unique<kernels::CudaGraph>(*std::move(captured));
    ASSERT_TRUE(rank.group->Barrier({}).ok());
  }
  // Leaves the gather to the graph.
  absl::Status Launch(DeviceRank& rank, int64_t generation) {
    log.Follow(calls);
    rank.stream->set_log(&log);
    RETURN_IF_ERROR(Issue(rank, generation));
    rank.stream->set_log(nullptr);
    EXPECT_TRUE(log.Finish()) << log.difference();
    rank.stream->Launch(*graph);
    return rank.group->MarkPassed(*rank.stream);
  }
};

TEST_F(NcclTest, AGatherOfAGraphIsInTheLedgerAndThroughWhereItIsMarked) {
  Run(2, {}, [](DeviceRank& rank) {
    CapturedGather gather;
    gather.Capture(rank);
    const std::shared_ptr<const IssueLog> ledger = rank.group->ledger().logs()[0];
    for (int64_t generation = 2; generation < 5; ++generation) {
      const auto byte = static_cast<uint8_t>(10 * generation + rank.group->rank());
      rank.stream->FillBytes(gather.memory, 0, 2 * CapturedGather::kShard * kElementBytes);
      rank.stream->FillBytes(gather.memory + CapturedGather::kShard * rank.group->rank(),
                             byte,
                             CapturedGather::kShard * kElementBytes);
      const uint64_t before = ledger->snapshot().sequence;
      ASSERT_TRUE(gather.Launch(rank, generation).ok());
      EXPECT_EQ(ledger->snapshot().sequence, before + 1);
      EXPECT_EQ(ledger->Last(1)[0].record.generation, generation);
      ASSERT_TRUE(WaitForStream(*rank.stream, *rank.group).ok());
      ASSERT_TRUE(rank.group->Failure().ok());
      EXPECT_EQ(ledger->snapshot().completed, before + 1);
      const auto* bytes = reinterpret_cast<const uint8_t*>(gather.memory);
      EXPECT_EQ(bytes[0], 10 * generation);
      EXPECT_EQ(bytes[CapturedGather::kShard * kElementBytes], 10 * generation + 1);
    }
    ASSERT_TRUE(rank.group->Barrier({}).ok());  // by the hash of all of them
    // A call that differs is not done, nor what came before it.
    gather.log.Follow(gather.calls);
    rank.stream->set_log(&gather.log);
    rank.stream->FillBytes(gather.memory, 0, 4);
    rank.stream->set_log(nullptr);
    EXPECT_FALSE(gather.log.Finish());
    EXPECT_THAT(gather.log.difference(), HasSubstr("a fill is new"));
    ASSERT_TRUE(WaitForStream(*rank.stream, *rank.group).ok());
    EXPECT_EQ(*reinterpret_cast<const uint8_t*>(gather.memory), 40);
  });
}

// As NCCL wants it: all ranks launch a collective with a graph, or none does. Neither can tell.
TEST_F(NcclTest, AGatherOfAGraphMeetsNoneOfAnotherRanksHostAndAbortLeavesGraphsAlone) {
  std::latch both_wait(2);
  Run(2, {}, [&](DeviceRank& rank) {
    CapturedGather gather;
    gather.Capture(rank);
    rank.stream->FillBytes(gather.memory, 0, 2 * CapturedGather::kShard * kElementBytes);
    rank.stream->FillBytes(gather.memory + CapturedGather::kShard * rank.group->rank(),
                           1,
                           CapturedGather::kShard * kElementBytes);
    ASSERT_TRUE((rank.group->rank() == 0 ? gather.Launch(rank, 2) : gather.Issue(rank, 2)).ok());
    const auto start = std::chrono::steady_clock::now();
    while (SecondsSince(start) < 0.05) {
      EXPECT_TRUE(rank.group->Failure().ok());
      std::this_thread::yield();
    }
    EXPECT_FALSE(*rank.stream->Done());
    both_wait.arrive_and_wait();
    // Returns though the graph is there, which NCCL waits for.
    rank.group->Abort("told to stop");
    EXPECT_TRUE(rank.stream->Synchronize().ok());
    EXPECT_LT(SecondsSince(start), 5.0);
    EXPECT_EQ(rank.group->Failure(), absl::AbortedError("told to stop"));
    const auto* bytes = reinterpret_cast<const uint8_t*>(gather.memory);
    EXPECT_EQ(bytes[CapturedGather::kShard * kElementBytes * (1 - rank.group->rank())], 0);
  });
}

TEST_F(NcclTest, RanksThatCompareCollectivesCaptureNone) {
  Run(2, {.check_collectives = true}, [](DeviceRank& rank) {
    EXPECT_THAT(TextOf(rank.group->Captures()), HasSubstr("share a device"));
    ASSERT_TRUE(rank.group->Barrier({}).ok());
  });
}

TEST_F(NcclTest, DifferentTensorCollectivesAreNamedWhereTheyAreChecked) {
  Run(3, {.check_collectives = true}, [](DeviceRank& rank) {
    Communicator& group = *rank.group;
    ASSERT_TRUE(group.AllocateArena({.private_bytes = 4096}).ok());
    auto* memory = reinterpret_cast<float*>(group.arena(plan::MemoryKind::kPrivate));
    const int unit = group.rank() == 2 ? 7 : 3;
    absl::Status status = group.AllGather({.tag = {plan::OpLabel::kGather, unit, 0},
                                           .shard = memory + (4 + unit) * group.rank(),
                                           .gathered = memory,
                                           .shard_elements = 4 + unit,
                                           .stream = rank.stream.get()});
    if (status.ok()) {
      status = WaitForStream(*rank.stream, group);
    }
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
    EXPECT_THAT(TextOf(status), HasSubstr("of unit 3"));
    EXPECT_THAT(TextOf(status), HasSubstr("rank 2 issued"));
    EXPECT_THAT(TextOf(status), HasSubstr("of unit 7"));
  });
}

TEST_F(NcclTest, HostCollectivesFindTensorCollectivesThatDiffered) {
  Run(2, {}, [](DeviceRank& rank) {
    Communicator& group = *rank.group;
    ASSERT_TRUE(group.AllocateArena({.private_bytes = 4096}).ok());
    auto* memory = reinterpret_cast<float*>(group.arena(plan::MemoryKind::kPrivate));
    ASSERT_TRUE(group
                    .AllGather({.tag = {plan::OpLabel::kGather, group.rank(), 0},
                                .shard = memory + 8 * group.rank(),
                                .gathered = memory,
                                .shard_elements = 8,
                                .stream = rank.stream.get()})
                    .ok());
    const absl::Status status = group.Barrier({});
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
    EXPECT_THAT(TextOf(status), HasSubstr(kMismatchText));
  });
}

TEST_F(NcclTest, AnIdIsGoodForOneGroup) {
  auto gpu = OpenTestGpu();
  ASSERT_TRUE(gpu.ok()) << gpu.status();
  const auto id = kernels::MakeNcclId(**gpu);
  ASSERT_TRUE(id.ok()) << id.status();
  for (const bool works : {true, false}) {
    const auto group =
        kernels::NcclGroup::Begin(**gpu, *id, {.name = "once", .ranks = 1, .rank = 0});
    ASSERT_TRUE(group.ok()) << group.status();
    absl::StatusOr<bool> settled = (*group)->Settled();
    while (settled.ok() && !*settled) {
      settled = (*group)->Settled();
    }
    EXPECT_EQ(settled.ok(), works) << settled.status();
  }
}

TEST_F(NcclTest, RecordThatIsNoIdIsRefusedWithoutShowingIt) {
  for (const std::string record : {"nccl1:5ec7e7", "shm1:5ec7e7", ""}) {
    const auto group =
        CreateHostedNccl({.rank = 1, .size = 2, .rendezvous = [&](std::string_view, std::string) {
                            return std::vector<std::string>{record, "nccl1:member"};
                          }});
    EXPECT_EQ(group.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(TextOf(group.status()), ::testing::Not(HasSubstr("5ec7e7")));
  }
}

TEST_F(NcclTest, TransportNeedsADevice) {
  const auto group = CreateCommunicator({.transport = "nccl"});
  EXPECT_EQ(group.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(TextOf(group.status()), HasSubstr("needs a CUDA device"));
}

// What the emulated device refuses: the runtime may wait for the device there, and so for peers.
TEST_F(NcclTest, MemoryThatIsMadeBesideACollectiveIsFound) {
  Run(2, {}, [](DeviceRank& rank) {
    Communicator& group = *rank.group;
    ASSERT_TRUE(group.AllocateArena({.private_bytes = 64}).ok());
    auto* gathered = reinterpret_cast<float*>(group.arena(plan::MemoryKind::kPrivate));
    ASSERT_TRUE(group
                    .AllGather({.shard = gathered + 4 * group.rank(),
                                .gathered = gathered,
                                .shard_elements = 4,
                                .stream = rank.stream.get()})
                    .ok());
    const absl::Status refused = rank.gpu->AllocateDevice(64).status();
    EXPECT_THAT(TextOf(refused), HasSubstr("while it waits for peers: nccl"));
    EXPECT_THAT(TextOf(rank.gpu->AllocatePinned(64).status()), HasSubstr("waits for peers"));
    ASSERT_TRUE(WaitForStream(*rank.stream, group).ok());
    const absl::StatusOr<kernels::CudaMemory> made = rank.gpu->AllocateDevice(64);
    EXPECT_TRUE(made.ok()) << made.status();
    // Ranks share the device: freed before that, it would wait for the other's barrier, and so for
    // this rank's.
    ASSERT_TRUE(group.Barrier({}).ok());
  });
}

TEST(SharedMemory, OfAContainerIsNamedWhereNcclMayNeedMore) {
  EXPECT_EQ(SmallSharedMemory("/proc"),
            " (/proc has 0 bytes, and NCCL may need more: mount memory there)");
  EXPECT_EQ(SmallSharedMemory("/nonexistent"),
            " (there is no /nonexistent, which NCCL may need: mount memory there)");
}

}  // namespace
}  // namespace ravel::comm
