#pragma once

// Groups of ranks for the tests of communicators: the same script runs on every transport.

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "worker/comm/communicator.h"
#include "worker/comm/rendezvous.h"

namespace ravel::comm {

inline constexpr std::chrono::seconds kTestTimeout{20};

// Rendezvous between threads.
class Board {
 public:
  explicit Board(int size) : records_(static_cast<size_t>(size)) {}
  Rendezvous ForRank(int rank);

 private:
  std::mutex mutex_;
  std::condition_variable all_there_;
  std::vector<std::string> records_;
  size_t published_ = 0;
};

// The communicator of one rank; fails the test when it cannot be made. Of "mixed", two ranks are on
// one host.
std::unique_ptr<Communicator> MakeCommunicator(const std::string& transport,
                                               int rank,
                                               int size,
                                               const Rendezvous& rendezvous);

// Runs `body` on `size` ranks, each a thread with its own communicator.
void RunRanks(const std::string& transport,
              int size,
              const std::function<void(Communicator&)>& body);

// What rank `rank` puts at `index` of round `round`: exact in fp32, different everywhere.
inline float ValueOf(int round, int rank, int64_t index) {
  return static_cast<float>(round * 1000 + rank * 100) + static_cast<float>(index % 8191) * 0.125f;
}

// A pseudo-random script of every collective with sizes from 0 up, checked value by value against
// what was put in. Returns an empty text, or what was wrong: it also runs in forked processes,
// where no test framework listens.
std::string RunScript(Communicator& group, uint64_t seed, int rounds);

// The same on memory that the caller has set aside in its arena: each of `common` (nullptr: none)
// and `symmetric` has ScriptBytes(group.size()). `members` are the values' ranks.
struct ScriptPlace {
  std::vector<int> members;
  std::byte* common = nullptr;
  std::byte* symmetric = nullptr;
};
int64_t ScriptBytes(int size);
std::string RunScriptAt(Communicator& group, const ScriptPlace& place, uint64_t seed, int rounds);

inline double SecondsSince(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace ravel::comm
