#pragma once

// The communicators of a rank on the data mesh.

#include <memory>

#include "common/plan/program/lane_map.h"
#include "common/status.h"
#include "worker/comm/communicator.h"

namespace ravel::shard {

// One for each stream that issues collectives, since those of one communicator are serial: gathers
// and reduces go over the ranks of a replica, outer over the ranks with the same shard; statistics
// go over the world. `world` outlives it.
struct MeshCommunicators {
  comm::Communicator* world = nullptr;
  std::unique_ptr<comm::Communicator> gather;
  std::unique_ptr<comm::Communicator> reduce;
  std::unique_ptr<comm::Communicator> outer;  // nullptr without replicas

  // Collective over the world.
  static absl::StatusOr<MeshCommunicators> Create(comm::Communicator& world,
                                                  const plan::LaneMap& lanes);
};

}  // namespace ravel::shard
