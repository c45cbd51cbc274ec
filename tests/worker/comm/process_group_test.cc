// Ranks as processes, and one of them killed.

#include <algorithm>
#include <climits>
#include <cstdio>
#include <cstring>

#include <absl/strings/str_cat.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/worker/comm/group_testing.h"
#include "worker/comm/communicator_factory.h"

namespace ravel::comm {
namespace {

bool WriteText(int fd, const std::string& text) {
  const auto length = static_cast<uint32_t>(text.size());
  return write(fd, &length, sizeof(length)) == sizeof(length) &&
         write(fd, text.data(), length) == static_cast<ssize_t>(length);
}

std::string ReadText(int fd) {
  uint32_t length = 0;
  if (read(fd, &length, sizeof(length)) != sizeof(length) || length > 1 << 20) {
    return "<nothing>";
  }
  std::string text(length, '\0');
  size_t done = 0;
  while (done < length) {
    const ssize_t count = read(fd, text.data() + done, length - done);
    if (count <= 0) {
      return "<torn>";
    }
    done += static_cast<size_t>(count);
  }
  return text;
}

// N forked ranks that rendezvous through the test process and report one text each.
class ProcessGroup {
 public:
  using Body = std::function<std::string(Communicator&)>;

  ProcessGroup(const std::string& transport, int size, const Body& body) {
    for (int rank = 0; rank < size; ++rank) {
      int ends[2];
      EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
      const pid_t pid = fork();
      if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        _exit(RunChild(ends[1], transport, rank, size, body));
      }
      close(ends[1]);
      pids_.push_back(pid);
      sockets_.push_back(ends[0]);
    }
    std::vector<std::string> records;
    for (int socket : sockets_) {
      records.push_back(ReadText(socket));
    }
    for (int socket : sockets_) {
      for (const std::string& record : records) {
        EXPECT_TRUE(WriteText(socket, record));
      }
    }
  }

  ~ProcessGroup() {
    for (size_t rank = 0; rank < pids_.size(); ++rank) {
      close(sockets_[rank]);
      kill(pids_[rank], SIGKILL);
      waitpid(pids_[rank], nullptr, 0);
    }
  }

  std::string Report(int rank) { return ReadText(sockets_[static_cast<size_t>(rank)]); }
  void Tell(int rank) { EXPECT_TRUE(WriteText(sockets_[static_cast<size_t>(rank)], "go")); }
  pid_t pid(int rank) const { return pids_[static_cast<size_t>(rank)]; }
  void Kill(int rank) { kill(pid(rank), SIGKILL); }

  // For a body: hears Tell, speaks to Report.
  static void Hear() { ReadText(child_socket_); }
  static void Say(const std::string& text) { WriteText(child_socket_, text); }

 private:
  static int RunChild(
      int socket, const std::string& transport, int rank, int size, const Body& body) {
    child_socket_ = socket;
    const Rendezvous rendezvous =
        [&](std::string_view, std::string record) -> absl::StatusOr<std::vector<std::string>> {
      WriteText(socket, record);
      std::vector<std::string> records;
      for (int r = 0; r < size; ++r) {
        records.push_back(ReadText(socket));
      }
      return records;
    };
    const auto group = MakeCommunicator(transport, rank, size, rendezvous);
    WriteText(socket, group == nullptr ? "no communicator" : body(*group));
    return 0;
  }

  static inline int child_socket_ = -1;
  std::vector<pid_t> pids_;
  std::vector<int> sockets_;
};

class ProcessGroupTest : public ::testing::TestWithParam<std::string> {};

TEST_P(ProcessGroupTest, RandomScriptGivesWhatEveryRankPutIn) {
  for (int size : {1, 2, 3, 4, 5, 8}) {
    ProcessGroup group(GetParam(), size, [](Communicator& own) {
      std::string wrong = RunScript(own, 23, 40);
      return wrong.empty() ? "fine" : wrong;
    });
    for (int rank = 0; rank < size; ++rank) {
      EXPECT_EQ(group.Report(rank), "fine") << "rank " << rank << " of " << size;
    }
  }
}

TEST_P(ProcessGroupTest, AbortReleasesSurvivorsOfAKilledRank) {
  constexpr int kSize = 3;
  constexpr int kVictim = 1;
  int quickest_ms = INT_MAX;  // a busy machine delays some of them
  for (int trial = 0; trial < 5; ++trial) {
    ProcessGroup group(GetParam(), kSize, [](Communicator& own) {
      // The watchdog hears of the death from outside, as a trainer's does.
      std::chrono::steady_clock::time_point told;
      std::thread watchdog([&] {
        ProcessGroup::Hear();
        told = std::chrono::steady_clock::now();
        own.Abort("rank 1 is lost");
      });
      std::vector<float> shard(1 << 18);
      std::vector<float> gathered(shard.size() * kSize);
      absl::Status status;
      for (int64_t done = 0; status.ok(); ++done) {
        if (done == 5) {
          ProcessGroup::Say("running");
        }
        status = own.AllGather({.shard = shard.data(),
                                .gathered = gathered.data(),
                                .shard_elements = static_cast<int64_t>(shard.size())});
      }
      watchdog.join();
      return absl::StrCat(static_cast<int>(SecondsSince(told) * 1000), " ms: ", status.ToString());
    });
    for (int rank = 0; rank < kSize; ++rank) {
      ASSERT_EQ(group.Report(rank), "running");
    }
    group.Kill(kVictim);
    for (int rank : {0, 2}) {
      group.Tell(rank);
      const std::string report = group.Report(rank);
      int milliseconds = -1;
      ASSERT_EQ(std::sscanf(report.c_str(), "%d ms", &milliseconds), 1) << report;
      EXPECT_LT(milliseconds, 5000) << report;
      quickest_ms = std::min(quickest_ms, milliseconds);
    }
  }
  EXPECT_LT(quickest_ms, 500);
}

INSTANTIATE_TEST_SUITE_P(Transports,
                         ProcessGroupTest,
                         ::testing::Values("shm", "gloo", "mixed", "nccl"));

TEST(ShmProcessGroupTest, NothingIsLeftAfterAllRanksAreKilled) {
  ProcessGroup group("shm", 2, [](Communicator& own) {
    const absl::Status made = own.AllocateArena({.symmetric_bytes = 1 << 20});
    ProcessGroup::Say(made.ok() ? "made" : made.ToString());
    ProcessGroup::Hear();
    return std::string();
  });
  ASSERT_EQ(group.Report(0), "made");
  ASSERT_EQ(group.Report(1), "made");
  // The memory has no name that could survive its processes.
  const std::string command = absl::StrCat(
      "readlink /proc/", group.pid(0), "/fd/* 2>/dev/null | grep -c memfd:ravel-group");
  FILE* pipe = popen(command.c_str(), "r");
  char text[16] = {};
  ASSERT_NE(fgets(text, sizeof(text), pipe), nullptr);
  pclose(pipe);
  EXPECT_GE(atoi(text), 1);
}

}  // namespace
}  // namespace ravel::comm
