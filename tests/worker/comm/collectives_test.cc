// Ranks as threads, on every transport.

#include <algorithm>
#include <array>
#include <atomic>
#include <future>
#include <latch>
#include <set>
#include <thread>

#include <absl/strings/escaping.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_split.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include "tests/worker/comm/group_testing.h"
#include "worker/comm/communicator_factory.h"
#include "worker/comm/local_communicator.h"
#include "worker/comm/shared_segment.h"

namespace ravel::comm {
namespace {

using ::testing::HasSubstr;

struct GroupCase {
  std::string transport;
  int size;
};

std::string CaseName(const ::testing::TestParamInfo<GroupCase>& info) {
  return absl::StrCat(info.param.transport, "_", info.param.size);
}

std::vector<GroupCase> AllGroups() {
  std::vector<GroupCase> cases;
  for (const char* transport : {"local", "shm", "gloo", "mixed", "nccl"}) {
    for (int size : {1, 2, 3, 4, 5, 8}) {
      cases.push_back({transport, size});
    }
  }
  return cases;
}

class CollectivesTest : public ::testing::TestWithParam<GroupCase> {};

TEST_P(CollectivesTest, RandomScriptGivesWhatEveryRankPutIn) {
  const GroupCase& group_case = GetParam();
  RunRanks(group_case.transport, group_case.size, [](Communicator& group) {
    EXPECT_EQ(RunScript(group, 17, 60), "");
    EXPECT_GT(group.issued().sequence, 60u);
  });
}

TEST_P(CollectivesTest, ArenaIsZeroAndItsKindsDoNotOverlap) {
  const GroupCase& group_case = GetParam();
  RunRanks(group_case.transport, group_case.size, [](Communicator& group) {
    const ArenaSizes sizes{.private_bytes = 5000, .symmetric_bytes = 9000, .common_bytes = 12000};
    ASSERT_TRUE(group.AllocateArena(sizes).ok());
    std::byte* const own[] = {group.arena(plan::MemoryKind::kPrivate),
                              group.arena(plan::MemoryKind::kSymmetric)};
    const int64_t bytes[] = {sizes.private_bytes, sizes.symmetric_bytes};
    for (int kind = 0; kind < 2; ++kind) {
      for (int64_t i = 0; i < bytes[kind]; ++i) {
        ASSERT_EQ(own[kind][i], std::byte{0});
        own[kind][i] = static_cast<std::byte>(group.rank() * 2 + kind + 1);
      }
    }
    ASSERT_TRUE(group.Barrier({}).ok());
    for (int64_t i = 0; i < sizes.common_bytes; ++i) {
      ASSERT_EQ(group.arena(plan::MemoryKind::kCommon)[i], std::byte{0});
    }
    for (int kind = 0; kind < 2; ++kind) {
      EXPECT_EQ(own[kind][bytes[kind] - 1], static_cast<std::byte>(group.rank() * 2 + kind + 1));
    }
    ASSERT_TRUE(group.Barrier({}).ok());
  });
}

TEST_P(CollectivesTest, IssueHashesAreEqualOnAllRanks) {
  const GroupCase& group_case = GetParam();
  std::mutex mutex;
  std::vector<Communicator::IssueState> states;
  RunRanks(group_case.transport, group_case.size, [&](Communicator& group) {
    const uint64_t before = group.issued().sequence;  // ranks of several hosts have met already
    for (int unit = 0; unit < 10; ++unit) {
      ASSERT_TRUE(group.Barrier({plan::OpLabel::kGather, unit, 0}).ok());
    }
    const std::lock_guard<std::mutex> lock(mutex);
    states.push_back(group.issued());
    EXPECT_EQ(states.back().sequence, before + 10u);
  });
  ASSERT_EQ(states.size(), static_cast<size_t>(group_case.size));
  for (const Communicator::IssueState& state : states) {
    EXPECT_EQ(state.hash, states[0].hash);
  }
}

INSTANTIATE_TEST_SUITE_P(Groups, CollectivesTest, ::testing::ValuesIn(AllGroups()), CaseName);

class FailureTest : public ::testing::TestWithParam<GroupCase> {};

TEST_P(FailureTest, MismatchNamesBothRanksAndUnitsOnEveryRank) {
  const GroupCase& group_case = GetParam();
  const int odd_rank = group_case.size - 1;
  std::latch told(group_case.size);
  RunRanks(group_case.transport, group_case.size, [&](Communicator& group) {
    EXPECT_TRUE(group.Barrier({}).ok());
    std::vector<float> shard(16);
    std::vector<float> gathered(16 * static_cast<size_t>(group.size()));
    absl::Status status;
    if (group.rank() == odd_rank) {
      status = group.Barrier({plan::OpLabel::kStatsReduce, 7, 0});
    } else {
      status = group.AllGather({.tag = {plan::OpLabel::kGather, 3, 0},
                                .shard = shard.data(),
                                .gathered = gathered.data(),
                                .shard_elements = 16});
    }
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("of unit 3"));
    EXPECT_THAT(std::string(status.message()), HasSubstr("of unit 7"));
    EXPECT_THAT(std::string(status.message()), HasSubstr(absl::StrCat("rank ", odd_rank)));
    EXPECT_EQ(group.Barrier({}), status) << "a failure is final";
    // Who leaves closes its connections, which others may see before they have compared.
    told.arrive_and_wait();
  });
}

TEST_P(FailureTest, AbortFromAnotherThreadReleasesABlockedRankAtOnce) {
  const GroupCase& group_case = GetParam();
  const int absent = group_case.size - 1;
  std::promise<void> over;
  std::shared_future<void> all_released(over.get_future());
  std::atomic<int> blocked = 0;
  RunRanks(group_case.transport, group_case.size, [&](Communicator& group) {
    ASSERT_TRUE(group.Barrier({}).ok());
    if (group.rank() == absent) {
      all_released.wait();  // never joins the second barrier
      return;
    }
    std::chrono::steady_clock::time_point aborted;
    std::thread watchdog([&] {
      std::promise<void>().get_future().wait_for(std::chrono::milliseconds(100));
      aborted = std::chrono::steady_clock::now();
      group.Abort("told to stop");
    });
    const absl::Status status = group.Barrier({plan::OpLabel::kGather, 1, 0});
    watchdog.join();
    // AbortReleasesSurvivorsOfAKilledRank bounds the time. Not to be released takes for ever.
    EXPECT_LT(SecondsSince(aborted), 10);
    EXPECT_EQ(status.code(), absl::StatusCode::kAborted) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("told to stop"));
    EXPECT_EQ(group.Barrier({}).code(), absl::StatusCode::kAborted) << "a failure is final";
    if (++blocked == group_case.size - 1) {
      over.set_value();
    }
  });
}

TEST_P(FailureTest, AbortBeforeACallFailsTheCall) {
  const GroupCase& group_case = GetParam();
  RunRanks(group_case.transport, group_case.size, [](Communicator& group) {
    ASSERT_TRUE(group.Barrier({}).ok());
    group.Abort("first");
    group.Abort("second");
    EXPECT_EQ(group.Barrier({}), absl::AbortedError("first"));
  });
}

TEST_P(FailureTest, RankThatLeavesIsReportedToThoseThatWait) {
  const GroupCase& group_case = GetParam();
  RunRanks(group_case.transport, group_case.size, [](Communicator& group) {
    ASSERT_TRUE(group.Barrier({}).ok());
    if (group.rank() == 0) {
      return;  // destroys its communicator
    }
    const auto start = std::chrono::steady_clock::now();
    const absl::Status status = group.Barrier({});
    EXPECT_FALSE(status.ok());
    EXPECT_LT(SecondsSince(start), 10) << status;
  });
}

TEST_P(FailureTest, ArenaSizesThatDifferAreRefused) {
  const GroupCase& group_case = GetParam();
  RunRanks(group_case.transport, group_case.size, [](Communicator& group) {
    const absl::Status status =
        group.AllocateArena({.private_bytes = 4096, .common_bytes = 4096 + group.rank()});
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  });
}

TEST_P(FailureTest, ArenaBeyondTheMemoryOfTheHostIsAnErrorOnEveryRank) {
  const GroupCase& group_case = GetParam();
  RunRanks(group_case.transport, group_case.size, [](Communicator& group) {
    constexpr int64_t kTooMuch = int64_t{1} << 42;
    const absl::Status status =
        group.AllocateArena({.private_bytes = 0, .symmetric_bytes = kTooMuch, .common_bytes = 0});
    EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
  });
}

INSTANTIATE_TEST_SUITE_P(Groups,
                         FailureTest,
                         ::testing::Values(GroupCase{"local", 2},
                                           GroupCase{"local", 5},
                                           GroupCase{"shm", 2},
                                           GroupCase{"shm", 3},
                                           GroupCase{"gloo", 2},
                                           GroupCase{"gloo", 3},
                                           GroupCase{"mixed", 2},
                                           GroupCase{"mixed", 3},
                                           GroupCase{"nccl", 2},
                                           GroupCase{"nccl", 3}),
                         CaseName);

TEST(CommunicatorFactoryTest, BadOptionsAreNamed) {
  EXPECT_THAT(std::string(CreateCommunicator({.transport = "carrier pigeon"}).status().message()),
              HasSubstr("carrier pigeon: expected local, shm, gloo, mixed or nccl"));
  EXPECT_THAT(std::string(CreateCommunicator({.transport = "local", .size = 2}).status().message()),
              HasSubstr("one rank"));
  EXPECT_FALSE(CreateCommunicator({.transport = "shm", .rank = 2, .size = 2}).ok());
}

// A socket that listens on a port of its own.
class TakenPort {
 public:
  TakenPort() : file_(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof address;
    auto* const any = reinterpret_cast<sockaddr*>(&address);
    EXPECT_EQ(bind(file_, any, size), 0);
    EXPECT_EQ(listen(file_, 1), 0);
    EXPECT_EQ(getsockname(file_, any, &size), 0);
    port_ = ntohs(address.sin_port);
  }
  ~TakenPort() { close(file_); }
  TakenPort(const TakenPort&) = delete;
  TakenPort& operator=(const TakenPort&) = delete;
  int port() const { return port_; }

 private:
  const int file_;
  int port_ = 0;
};

TEST(GlooPortsTest, RanksOfOneHostShareARangeAndPassOverTakenPorts) {
  constexpr int kRanks = 4;
  const TakenPort taken;
  const PortRange range{std::min(taken.port(), 65535 - 63),
                        std::min(taken.port(), 65535 - 63) + 63};
  std::array<std::string, kRanks> records;
  // All stay until the last one is made: a rank that goes earlier breaks connections that its peers
  // still wait for.
  std::vector<absl::StatusOr<std::unique_ptr<Communicator>>> made(kRanks);
  Board board(kRanks);
  std::vector<std::thread> threads;
  for (size_t rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([&, rank] {
      const Rendezvous inner = board.ForRank(static_cast<int>(rank));
      made[rank] = CreateCommunicator({.transport = "gloo",
                                       .rank = static_cast<int>(rank),
                                       .size = kRanks,
                                       .rendezvous =
                                           [&](std::string_view group, std::string record) {
                                             records.at(rank) = record;
                                             return inner(group, std::move(record));
                                           },
                                       .host_address = "127.0.0.1",
                                       .ports = range,
                                       .timeout = kTestTimeout});
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  for (const auto& communicator : made) {
    ASSERT_TRUE(communicator.ok()) << communicator.status();
  }
  std::set<int> ports;
  for (const std::string& record : records) {
    const std::vector<std::string> parts = absl::StrSplit(record.substr(6), ',');
    for (const std::string& part : parts) {
      if (part != "-") {  // a sockaddr_in: family, then the port in network order
        const std::string bytes = absl::HexStringToBytes(part);
        ports.insert(static_cast<uint8_t>(bytes.at(2)) * 256 + static_cast<uint8_t>(bytes.at(3)));
      }
    }
  }
  EXPECT_EQ(ports.size(), 12u) << "each listens on a port of its own";
  EXPECT_GE(*ports.begin(), range.first);
  EXPECT_LE(*ports.rbegin(), range.last);
  EXPECT_FALSE(ports.contains(taken.port()));
}

TEST(GlooPortsTest, ARangeWithoutAFreePortIsNamed) {
  const TakenPort taken;
  const auto made = CreateCommunicator(
      {.transport = "gloo",
       .rank = 0,
       .size = 2,
       .rendezvous = [](std::string_view,
                        const std::string&) -> absl::StatusOr<std::vector<std::string>> {
         return absl::InternalError("a rank that cannot listen told its peers");
       },
       .host_address = "127.0.0.1",
       .ports = {taken.port(), taken.port()},
       .timeout = kTestTimeout});
  EXPECT_EQ(made.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(made.status().message()), HasSubstr("--data-ports"));
}

TEST(MemfdSegmentTest, RecordOfAnotherMemoryIsRefused) {
  auto first = MemfdSegment::Create(2);
  auto second = MemfdSegment::Create(2);
  ASSERT_TRUE(first.ok() && second.ok());
  EXPECT_TRUE(MemfdSegment::Open((*first)->record(), 2).ok());
  EXPECT_FALSE(MemfdSegment::Open((*first)->record(), 3).ok());
  EXPECT_FALSE(MemfdSegment::Open("shm1:member", 2).ok());
  // The descriptor of one with the nonce of the other.
  const std::string one = (*first)->record();
  const std::string other = (*second)->record();
  const auto nonce_at = [](const std::string& text) {
    return text.find(':', text.find(':', 5) + 1);
  };
  const std::string forged = one.substr(0, nonce_at(one)) + other.substr(nonce_at(other));
  EXPECT_EQ(MemfdSegment::Open(forged, 2).status().code(), absl::StatusCode::kFailedPrecondition);
}

}  // namespace
}  // namespace ravel::comm
