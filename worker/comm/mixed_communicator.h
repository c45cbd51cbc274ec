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

// The whole group talks over TCP. So does a split, unless each of its groups lies on one host and
// nothing in the way (a process that may not map another's memory, an arena that is not shared):
// then all its groups have the collectives of `shm`. Where the first such split comes before
// AllocateArena, all memory of the arena is shared by the ranks of a host, so that it can be read
// in place; else none is. `shared_memory()` is false on the whole group, so plans with gathers in
// place are refused, and true on a group in shared memory.
absl::StatusOr<std::unique_ptr<Communicator>> CreateMixedCommunicator(const MixedOptions& options);

}  // namespace ravel::comm
