#pragma once

// Sizes and places: pure. A gang is one of the job's allowed sizes or nothing.

#include <cstdint>
#include <string>
#include <vector>

#include "common/model/job_spec.h"
#include "common/status.h"

namespace ravel::coordinator {

// Free devices of one node.
struct NodeOffer {
  std::string node_id;
  std::string host_id;
  std::string address;
  std::vector<int64_t> devices;  // ordinals, ascending
};

struct RankPlace {
  std::string node_id;
  std::string host_id;
  std::string address;
  int64_t device = 0;
  bool operator==(const RankPlace&) const = default;
};

// The place that shares memory: the host, or a node that does not know its host.
std::string HostOf(const std::string& host_id, const std::string& node_id);

// The largest allowed size that is at most `free` and at most the wanted count; 0 when there is
// none.
int64_t ChooseSize(const std::vector<int64_t>& sizes, int64_t wanted, int64_t free);
int64_t ChooseSize(const plan::JobSpec& spec, int64_t free);

// Ranks in order: few nodes, ranks of one host together, ties by node id. `size` must not exceed
// what is offered.
std::vector<RankPlace> PlaceRanks(int64_t size, std::vector<NodeOffer> offers);

// `local` for one rank; as forced by the spec; else shm when all ranks share a host; when they do
// not, mixed where a node has several of them, and gloo where none has. Forced shm over several
// hosts is FailedPrecondition naming them.
absl::StatusOr<std::string> ChooseTransport(plan::Transport wanted,
                                            const std::vector<RankPlace>& places);
// The same by kind of device: GPUs talk through nccl, wherever they are.
absl::StatusOr<std::string> TransportOf(bool cpu_devices,
                                        plan::Transport wanted,
                                        const std::vector<RankPlace>& places);
absl::StatusOr<std::string> TransportOf(const plan::JobSpec& spec,
                                        const std::vector<RankPlace>& places);
// Returns true if ranks over this transport share memory.
bool SharesMemory(const std::string& transport);

}  // namespace ravel::coordinator
