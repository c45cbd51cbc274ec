#include "coordinator/jobs/admission.h"

#include <algorithm>
#include <set>
#include <tuple>

#include <absl/strings/str_cat.h>

#include "common/check.h"

namespace ravel::coordinator {

std::string HostOf(const std::string& host_id, const std::string& node_id) {
  return host_id.empty() ? absl::StrCat("node ", node_id) : host_id;
}

int64_t ChooseSize(const std::vector<int64_t>& sizes, int64_t wanted, int64_t free) {
  int64_t best = 0;
  for (const int64_t size : sizes) {
    if (size <= free && size <= wanted) {
      best = std::max(best, size);
    }
  }
  return best;
}

int64_t ChooseSize(const plan::JobSpec& spec, int64_t free) {
  return ChooseSize(spec.elastic.sizes, spec.device_count, free);
}

std::vector<RankPlace> PlaceRanks(int64_t size, std::vector<NodeOffer> offers) {
  std::sort(offers.begin(), offers.end(), [](const NodeOffer& a, const NodeOffer& b) {
    return std::make_tuple(-static_cast<int64_t>(a.devices.size()), a.node_id) <
           std::make_tuple(-static_cast<int64_t>(b.devices.size()), b.node_id);
  });
  std::vector<RankPlace> places;
  for (const NodeOffer& offer : offers) {
    for (const int64_t device : offer.devices) {
      if (static_cast<int64_t>(places.size()) < size) {
        places.push_back({offer.node_id, offer.host_id, offer.address, device});
      }
    }
  }
  CHECK_EQ(static_cast<int64_t>(places.size()), size);
  std::sort(places.begin(), places.end(), [](const RankPlace& a, const RankPlace& b) {
    return std::tie(a.host_id, a.node_id, a.device) < std::tie(b.host_id, b.node_id, b.device);
  });
  return places;
}

absl::StatusOr<std::string> ChooseTransport(plan::Transport wanted,
                                            const std::vector<RankPlace>& places) {
  if (places.size() == 1) {
    return std::string("local");
  }
  std::set<std::string> hosts;
  std::set<std::string> nodes;
  for (const RankPlace& place : places) {
    hosts.insert(HostOf(place.host_id, place.node_id));
    nodes.insert(place.node_id);
  }
  const bool one_host = hosts.size() == 1;
  switch (wanted) {
    case plan::Transport::kShm:
      if (!one_host) {
        return absl::FailedPreconditionError(absl::StrCat(
            "spec.parallelism.transport: shm needs all ranks on one host, but they are on ",
            hosts.size()));
      }
      return std::string("shm");
    case plan::Transport::kGloo:
      return std::string("gloo");
    case plan::Transport::kAuto:
      break;
  }
  if (one_host) {
    return std::string("shm");
  }
  // Trainers of one daemon share memory.
  return std::string(nodes.size() < places.size() ? "mixed" : "gloo");
}

absl::StatusOr<std::string> TransportOf(bool cpu_devices,
                                        plan::Transport wanted,
                                        const std::vector<RankPlace>& places) {
  if (cpu_devices) {
    return ChooseTransport(wanted, places);
  }
  return std::string(places.size() == 1 ? "local" : "nccl");
}

absl::StatusOr<std::string> TransportOf(const plan::JobSpec& spec,
                                        const std::vector<RankPlace>& places) {
  return TransportOf(spec.cpu_devices, spec.transport, places);
}

bool SharesMemory(const std::string& transport) {
  return transport == "local" || transport == "shm";
}

}  // namespace ravel::coordinator
