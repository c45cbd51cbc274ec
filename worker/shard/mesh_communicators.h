#pragma once

// The communicators of a rank on the mesh, by axes, ranks and stream.

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "common/plan/layout/mesh.h"
#include "common/plan/program/program_moves.h"
#include "common/status.h"
#include "worker/comm/communicator.h"

namespace ravel::shard {

// One for each (axes, number of ranks, stream) of a plan's moves, since collectives of one
// communicator are serial; statistics, control words and whatever is of no move go over the world,
// which outlives this.
class MeshCommunicators {
 public:
  MeshCommunicators() = default;  // of no moves and no world

  // Collective over the world.
  static absl::StatusOr<MeshCommunicators> Create(comm::Communicator& world,
                                                  const plan::Mesh& mesh,
                                                  const plan::MoveTable& table);

  comm::Communicator& world() const { return *world_; }
  // CHECKs that there is one.
  comm::Communicator& Of(const plan::ProgramMove& move) const;
  // The world first.
  std::vector<comm::Communicator*> all() const;

 private:
  struct Entry {
    std::vector<std::string> axes;
    int64_t ranks = 0;
    plan::StreamId stream;
    std::unique_ptr<comm::Communicator> group;
  };
  const Entry* Find(const plan::ProgramMove& move) const;

  comm::Communicator* world_ = nullptr;
  std::vector<Entry> entries_;
};

}  // namespace ravel::shard
