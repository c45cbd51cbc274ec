#include "worker/comm/peer_waits.h"

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <numeric>

#include "common/signed_size.h"

namespace ravel::comm {

int64_t SteadyNs() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

void PeerWaits::Add(int member, int64_t begin_ns) {
  const int64_t waited_ns = SteadyNs() - begin_ns;
  At(by_member_, member) += waited_ns;
  if (waited_ns > longest_ns_) {
    longest_ns_ = waited_ns;
    longest_begin_ns_ = begin_ns;
  }
}

PeerWait PeerWaits::Take(const std::vector<int>& members) {
  const auto most = std::max_element(by_member_.begin(), by_member_.end());
  if (most == by_member_.end() || *most == 0) {
    return {};
  }
  const PeerWait taken = {
      .nanoseconds = std::accumulate(by_member_.begin(), by_member_.end(), int64_t{0}),
      .rank = At(members, most - by_member_.begin()),
      .longest_begin_ns = longest_begin_ns_};
  std::fill(by_member_.begin(), by_member_.end(), 0);
  longest_ns_ = 0;
  return taken;
}

}  // namespace ravel::comm
