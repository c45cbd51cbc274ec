#include "worker/shard/mesh_communicators.h"

#include <utility>
#include <vector>

#include "worker/shard/flat_buffer.h"

namespace ravel::shard {

absl::StatusOr<MeshCommunicators> MeshCommunicators::Create(comm::Communicator& world,
                                                            const plan::LaneMap& lanes) {
  const auto width = static_cast<int>(lanes.width());
  const MeshPlace place = PlaceOf(lanes, world.rank());
  std::vector<int> replica;
  std::vector<int> same_shard;
  for (int i = 0; i < width; ++i) {
    replica.push_back(static_cast<int>(place.outer) * width + i);
  }
  for (int o = 0; o < static_cast<int>(lanes.replicas); ++o) {
    same_shard.push_back(o * width + static_cast<int>(place.inner));
  }
  MeshCommunicators made;
  made.world = &world;
  ASSIGN_OR_RETURN(made.gather, world.Split({.name = "gather", .members = replica}));
  ASSIGN_OR_RETURN(made.reduce, world.Split({.name = "reduce", .members = replica}));
  if (lanes.replicas > 1) {
    ASSIGN_OR_RETURN(made.outer, world.Split({.name = "outer", .members = same_shard}));
  }
  return made;
}

}  // namespace ravel::shard
