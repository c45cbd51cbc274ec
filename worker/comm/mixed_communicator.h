#pragma once

// Ranks on several hosts, some of which share one: TCP between hosts, shared memory within one.

#include <memory>
#include <string>

#include "worker/comm/communicator.h"
#include "worker/comm/gloo_communicator.h"

namespace ravel::comm {

struct MixedOptions {
  GlooOptions gloo;
  // Ranks with equal keys can map each other's memory; empty: HostKey of gloo.host_address.
  std::string host_key;
};

// The key of this process: trainers of one daemon have the same.
std::string HostKey(const std::string& host_address);

// The whole group talks over TCP, and so does a split, unless each of its groups lies on one host:
// then all of them have the collectives of `shm`. The first such split comes before AllocateArena,
// whose memory is then shared by the ranks of a host, so that it can be read in place; after an
// arena that is not shared, all splits talk over TCP. If a process may not map another's memory,
// the result is a communicator of `gloo`, and a warning says why. `shared_memory()` is false on the
// whole group, so plans with gathers in place are refused, and true on a group in shared memory.
absl::StatusOr<std::unique_ptr<Communicator>> CreateMixedCommunicator(const MixedOptions& options);

}  // namespace ravel::comm
