#pragma once

// Ranks as processes of several hosts, over TCP.

#include <chrono>
#include <memory>
#include <string>

#include "common/net_address.h"
#include "worker/comm/communicator.h"
#include "worker/comm/rendezvous.h"

namespace ravel::comm {

struct GlooOptions {
  int rank = 0;
  int size = 1;
  Rendezvous rendezvous;
  std::string host_address;
  // The sockets on which this rank waits for its peers have these: one for each, until all are
  // connected.
  PortRange ports = {};
  std::chrono::milliseconds timeout = std::chrono::seconds(30);
};

// Connects to every peer before it returns. Every transfer has the time-out, so it must exceed the
// time by which ranks may fall behind each other; a lost peer is normally seen at once, and Abort
// ends any wait. Unavailable: an address that is not this host's, or no port that is free.
absl::StatusOr<std::unique_ptr<Communicator>> CreateGlooCommunicator(const GlooOptions& options);

}  // namespace ravel::comm
