#pragma once

// Ranks as processes that share device 0: each is this program again, executed with the
// environment that a daemon gives to trainers that share a GPU, and with a socket to this process.

#include <string>
#include <vector>

#include <sys/types.h>

#include "worker/comm/rendezvous.h"

namespace ravel::testing {

// What a rank's process is to do; in it, as RankRole finds it.
struct RankRole {
  std::string task;
  int rank = 0;
  int size = 1;
};
// Whether this process is a rank's.
bool IsRankProcess();
RankRole TheRankRole();

// Of a rank's process: what goes to the test, and comes from it.
void TellTest(const std::string& text);
std::string HearFromTest();  // "<nothing>" where the test has ended, or nobody listens any more
// Ends a HearFromTest of another thread, and all later ones.
void StopHearing();
// Through the test's process, once: RankProcesses passes the records on.
comm::Rendezvous TestRendezvous();

// The processes; killed with the object. `filter` names the one test that does the rank's task.
class RankProcesses {
 public:
  RankProcesses(const std::string& filter, const std::string& task, int size);
  ~RankProcesses();
  RankProcesses(const RankProcesses&) = delete;
  RankProcesses& operator=(const RankProcesses&) = delete;

  // What a rank tells; "<nothing>" where it has ended.
  std::string Hear(int rank);
  void Tell(int rank, const std::string& text);
  void Kill(int rank);
  // Waits for the process's own end; its exit code, or minus the signal.
  int ExitCodeOf(int rank);

 private:
  std::vector<pid_t> pids_;  // -1: waited for
  std::vector<int> sockets_;
};

}  // namespace ravel::testing
