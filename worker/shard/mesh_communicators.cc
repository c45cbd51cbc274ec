#include "worker/shard/mesh_communicators.h"

#include <string>
#include <utility>

#include "common/check.h"

namespace ravel::shard {
namespace {

bool IsOfAll(const plan::ProgramMove& move) {
  return move.of == plan::MoveOf::kStatistics || move.of == plan::MoveOf::kAmax;
}

// As logs call it: the axis where its moves are of activations, else the stream.
std::string NameOf(const plan::ProgramMove& move) {
  return move.of == plan::MoveOf::kActivation ? move.axes.front() : plan::StreamName(move.stream);
}

}  // namespace

absl::StatusOr<MeshCommunicators> MeshCommunicators::Create(comm::Communicator& world,
                                                            const plan::Mesh& mesh,
                                                            const plan::MoveTable& table) {
  CHECK_EQ(mesh.rank_count(), world.size());
  MeshCommunicators made;
  made.world_ = &world;
  for (const plan::ProgramMove& move : table.moves) {
    if (IsOfAll(move) || made.Find(move) != nullptr) {
      continue;
    }
    std::vector<int> members;
    for (const int64_t rank : mesh.GroupOf(world.rank(), move.axes)) {
      members.push_back(static_cast<int>(rank));
    }
    ASSIGN_OR_RETURN(std::unique_ptr<comm::Communicator> group,
                     world.Split({.name = NameOf(move), .members = std::move(members)}));
    made.entries_.push_back({.axes = move.axes, .stream = move.stream, .group = std::move(group)});
  }
  return made;
}

const MeshCommunicators::Entry* MeshCommunicators::Find(const plan::ProgramMove& move) const {
  for (const Entry& entry : entries_) {
    if (entry.axes == move.axes && entry.stream == move.stream) {
      return &entry;
    }
  }
  return nullptr;
}

comm::Communicator& MeshCommunicators::Of(const plan::ProgramMove& move) const {
  if (IsOfAll(move)) {
    return *world_;
  }
  const Entry* entry = Find(move);
  CHECK_MSG(entry != nullptr, "a move of the table that the communicators were made of");
  return *entry->group;
}

std::vector<comm::Communicator*> MeshCommunicators::all() const {
  std::vector<comm::Communicator*> groups = {world_};
  for (const Entry& entry : entries_) {
    groups.push_back(entry.group.get());
  }
  return groups;
}

}  // namespace ravel::shard
