// NCCL between processes that share device 0: each rank is this program again, executed with the
// environment that a daemon gives to trainers that share a GPU.

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include <absl/strings/str_cat.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "kernels/cuda_nccl.h"
#include "tests/worker/comm/group_testing.h"
#include "tests/worker/comm/nccl_testing.h"
#include "worker/daemon/shared_gpu.h"

namespace ravel::comm {
namespace {

constexpr char kRank[] = "RAVEL_NCCL_TEST_RANK";
constexpr char kSize[] = "RAVEL_NCCL_TEST_SIZE";
constexpr char kTask[] = "RAVEL_NCCL_TEST_TASK";
constexpr int kRankSocket = 3;
constexpr char kRankFilter[] = "--gtest_filter=NcclGpuRank.DoesItsTask";
constexpr std::chrono::seconds kSetup{120};  // contexts of one device are made in turns

bool SendText(int fd, const std::string& text) {
  const auto length = static_cast<uint32_t>(text.size());
  return send(fd, &length, sizeof(length), MSG_NOSIGNAL) == sizeof(length) &&
         send(fd, text.data(), length, MSG_NOSIGNAL) == static_cast<ssize_t>(length);
}

std::string ReceiveText(int fd) {
  uint32_t length = 0;
  if (recv(fd, &length, sizeof(length), MSG_WAITALL) != sizeof(length) || length > 1 << 20) {
    return "<nothing>";
  }
  std::string text(length, '\0');
  return recv(fd, text.data(), length, MSG_WAITALL) == static_cast<ssize_t>(length) ? text
                                                                                    : "<torn>";
}

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
  return std::string(group
                         .AllGather({.tag = {plan::OpCode::kGather, unit, 0},
                                     .shard = shard.data(),
                                     .gathered = gathered.data(),
                                     .shard_elements = 16})
                         .message());
}

// Gathers until told that a peer is lost, or until NCCL says so.
std::string Lose(Communicator& group) {
  std::chrono::steady_clock::time_point told;
  std::thread watchdog([&] {
    ReceiveText(kRankSocket);
    told = std::chrono::steady_clock::now();
    group.Abort("rank 0 is lost");
  });
  std::vector<float> shard(1 << 16);
  std::vector<float> gathered(shard.size() * static_cast<size_t>(group.size()));
  absl::Status status;
  for (int done = 0; status.ok(); ++done) {
    if (done == 3) {
      SendText(kRankSocket, "running");
    }
    status = group.AllGather({.shard = shard.data(),
                              .gathered = gathered.data(),
                              .shard_elements = static_cast<int64_t>(shard.size())});
  }
  watchdog.join();
  return absl::StrCat(static_cast<int>(SecondsSince(told) * 1000), " ms: ", status.ToString());
}

std::string Do(const std::string& task, int rank, int size) {
  const Rendezvous rendezvous =
      [&](std::string_view, std::string record) -> absl::StatusOr<std::vector<std::string>> {
    SendText(kRankSocket, record);
    std::vector<std::string> records;
    for (int r = 0; r < size; ++r) {
      records.push_back(ReceiveText(kRankSocket));
    }
    return records;
  };
  const auto group = CreateHostedNccl({.rank = rank,
                                       .size = size,
                                       .rendezvous = rendezvous,
                                       .setup_timeout = kSetup,
                                       .check_collectives = true});
  if (!group.ok()) {
    return group.status().ToString();
  }
  return task == "script"   ? Script(**group)
         : task == "splits" ? Splits(**group)
         : task == "differ" ? Differ(**group)
                            : Lose(**group);
}

TEST(NcclGpuRank, DoesItsTask) {
  const char* rank = std::getenv(kRank);
  if (rank == nullptr) {
    GTEST_SKIP() << "is run by the other tests, as a process of its own";
  }
  SendText(kRankSocket, Do(std::getenv(kTask), std::atoi(rank), std::atoi(std::getenv(kSize))));
}

// -- the processes

class Ranks {
 public:
  Ranks(const std::string& task, int size) {
    for (int rank = 0; rank < size; ++rank) {
      int ends[2];
      EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
      std::vector<std::string> environment = daemon::SharedGpuEnvironment(
          absl::StrCat("ravel-test-", getpid(), "-", ends[0], "-", rank));
      environment.push_back(absl::StrCat(kRank, "=", rank));
      environment.push_back(absl::StrCat(kSize, "=", size));
      environment.push_back(absl::StrCat(kTask, "=", task));
      for (char** entry = environ; *entry != nullptr; ++entry) {
        environment.emplace_back(*entry);
      }
      pids_.push_back(Execute(ends[1], environment));
      close(ends[1]);
      sockets_.push_back(ends[0]);
    }
    std::vector<std::string> records;
    for (const int socket : sockets_) {
      records.push_back(ReceiveText(socket));
    }
    for (const int socket : sockets_) {
      for (const std::string& record : records) {
        SendText(socket, record);
      }
    }
  }
  ~Ranks() {
    for (size_t rank = 0; rank < pids_.size(); ++rank) {
      close(sockets_[rank]);
      kill(pids_[rank], SIGKILL);
      waitpid(pids_[rank], nullptr, 0);
    }
  }
  Ranks(const Ranks&) = delete;
  Ranks& operator=(const Ranks&) = delete;

  std::string Report(int rank) { return ReceiveText(sockets_[static_cast<size_t>(rank)]); }
  void Tell(int rank) { SendText(sockets_[static_cast<size_t>(rank)], "go"); }
  void Kill(int rank) { kill(pids_[static_cast<size_t>(rank)], SIGKILL); }

 private:
  static pid_t Execute(int socket, const std::vector<std::string>& environment) {
    std::vector<char*> variables;
    for (const std::string& text : environment) {
      variables.push_back(const_cast<char*>(text.c_str()));  // execve does not write to them
    }
    variables.push_back(nullptr);
    std::string filter = kRankFilter;
    std::string program = "/proc/self/exe";
    char* const arguments[] = {program.data(), filter.data(), nullptr};
    const pid_t pid = fork();
    if (pid == 0) {  // async-signal-safe calls only
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      dup2(socket, kRankSocket);
      dup2(open("/dev/null", O_WRONLY), STDOUT_FILENO);  // what it says comes by its socket
      execve(program.c_str(), arguments, variables.data());
      _exit(127);
    }
    return pid;
  }

  std::vector<pid_t> pids_;
  std::vector<int> sockets_;
};

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
    Ranks ranks(task, GetParam());
    for (int rank = 0; rank < GetParam(); ++rank) {
      EXPECT_EQ(ranks.Report(rank), "fine") << "rank " << rank;
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
  Ranks ranks("differ", GetParam());
  for (int rank = 0; rank < GetParam(); ++rank) {
    const std::string text = ranks.Report(rank);
    EXPECT_NE(text.find("of unit 3"), std::string::npos) << text;
    EXPECT_NE(text.find("of unit 7"), std::string::npos) << text;
  }
}

TEST_P(NcclGpuTest, SurvivorsOfAKilledRankAreReleasedByTheirAbort) {
  Ranks ranks("lose", GetParam());
  for (int rank = 0; rank < GetParam(); ++rank) {
    ASSERT_EQ(ranks.Report(rank), "running");
  }
  ranks.Kill(0);
  for (int rank = 1; rank < GetParam(); ++rank) {
    ranks.Tell(rank);
    const std::string report = ranks.Report(rank);
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
