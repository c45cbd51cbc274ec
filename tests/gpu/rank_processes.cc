#include "tests/gpu/rank_processes.h"

#include <cstdint>
#include <cstdlib>

#include <absl/strings/str_cat.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "worker/daemon/shared_gpu.h"

namespace ravel::testing {
namespace {

constexpr char kRank[] = "RAVEL_NCCL_TEST_RANK";
constexpr char kSize[] = "RAVEL_NCCL_TEST_SIZE";
constexpr char kTask[] = "RAVEL_NCCL_TEST_TASK";
constexpr int kRankSocket = 3;
constexpr uint32_t kMostText = 64u << 20;

bool SendText(int fd, const std::string& text) {
  const auto length = static_cast<uint32_t>(text.size());
  if (send(fd, &length, sizeof(length), MSG_NOSIGNAL) != sizeof(length)) {
    return false;
  }
  for (size_t sent = 0; sent < text.size();) {
    const ssize_t part = send(fd, text.data() + sent, text.size() - sent, MSG_NOSIGNAL);
    if (part <= 0) {
      return false;
    }
    sent += static_cast<size_t>(part);
  }
  return true;
}

std::string ReceiveText(int fd) {
  uint32_t length = 0;
  if (recv(fd, &length, sizeof(length), MSG_WAITALL) != sizeof(length) || length > kMostText) {
    return "<nothing>";
  }
  std::string text(length, '\0');
  return recv(fd, text.data(), length, MSG_WAITALL) == static_cast<ssize_t>(length) ? text
                                                                                    : "<torn>";
}

pid_t Execute(const std::string& filter, int socket, const std::vector<std::string>& environment) {
  std::vector<char*> variables;
  for (const std::string& text : environment) {
    variables.push_back(const_cast<char*>(text.c_str()));  // execve does not write to them
  }
  variables.push_back(nullptr);
  std::string only = "--gtest_filter=" + filter;
  std::string program = "/proc/self/exe";
  char* const arguments[] = {program.data(), only.data(), nullptr};
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

}  // namespace

bool IsRankProcess() {
  return std::getenv(kRank) != nullptr;
}

RankRole TheRankRole() {
  return {.task = std::getenv(kTask),
          .rank = std::atoi(std::getenv(kRank)),
          .size = std::atoi(std::getenv(kSize))};
}

void TellTest(const std::string& text) {
  SendText(kRankSocket, text);
}

std::string HearFromTest() {
  return ReceiveText(kRankSocket);
}

void StopHearing() {
  shutdown(kRankSocket, SHUT_RD);
}

comm::Rendezvous TestRendezvous() {
  return [](std::string_view, std::string record) -> absl::StatusOr<std::vector<std::string>> {
    TellTest(record);
    std::vector<std::string> records;
    for (int rank = 0; rank < TheRankRole().size; ++rank) {
      records.push_back(HearFromTest());
    }
    return records;
  };
}

RankProcesses::RankProcesses(const std::string& filter, const std::string& task, int size) {
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
    pids_.push_back(Execute(filter, ends[1], environment));
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

RankProcesses::~RankProcesses() {
  for (size_t rank = 0; rank < pids_.size(); ++rank) {
    close(sockets_[rank]);
    if (pids_[rank] > 0) {
      kill(pids_[rank], SIGKILL);
      waitpid(pids_[rank], nullptr, 0);
    }
  }
}

std::string RankProcesses::Hear(int rank) {
  return ReceiveText(sockets_[static_cast<size_t>(rank)]);
}

void RankProcesses::Tell(int rank, const std::string& text) {
  SendText(sockets_[static_cast<size_t>(rank)], text);
}

void RankProcesses::Kill(int rank) {
  kill(pids_[static_cast<size_t>(rank)], SIGKILL);
}

int RankProcesses::ExitCodeOf(int rank) {
  pid_t& pid = pids_[static_cast<size_t>(rank)];
  int status = 0;
  waitpid(pid, &status, 0);
  pid = -1;
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

}  // namespace ravel::testing
