#pragma once

// Measures how long a rank's collectives on one communicator waited, by the member that came last.

#include <cstdint>
#include <vector>

#include "common/signed_size.h"
#include "worker/comm/communicator.h"

namespace ravel::comm {

// Returns the time of the steady clock.
int64_t SteadyNs();

// Used from one thread at a time.
class PeerWaits {
 public:
  explicit PeerWaits(int size) : by_member_(Size(size)) {}

  // A wait that began at `begin_ns` and has just ended, because `member` came.
  void Add(int member, int64_t begin_ns);
  // All since the last call; `members`: ranks of the whole group, by member.
  PeerWait Take(const std::vector<int>& members);

 private:
  std::vector<int64_t> by_member_;
  int64_t longest_ns_ = 0;
  int64_t longest_begin_ns_ = 0;
};

}  // namespace ravel::comm
