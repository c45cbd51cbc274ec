#include "worker/shard/mesh_communicators.h"

#include <iterator>
#include <string>
#include <utility>

#include <absl/strings/str_cat.h>

#include "common/check.h"
#include "common/signed_size.h"

namespace ravel::shard {
namespace {

bool IsOfAll(const plan::ProgramMove& move) {
  return move.of == plan::MoveOf::kStatistics || move.of == plan::MoveOf::kAmax;
}

// As logs call it: the tensor axis, or the stream. Unique among groups with one first member.
std::string NameOf(const plan::Mesh& mesh, const plan::ProgramMove& move) {
  if (move.of == plan::MoveOf::kActivation) {
    const bool beside = move.stream == plan::StreamId::kTensor;
    return absl::StrCat(move.axes.front(), beside ? "" : ".gather");
  }
  if (plan::SumsAddends(move)) {
    const bool all = move.move.axis_size == mesh.AxisSize(move.axes.front());
    return absl::StrCat(move.axes.front(), all ? ".gradient" : ".copies");
  }
  return plan::StreamName(move.stream);
}

// The ranks of the group, or the aligned block of them that makes the move together.
std::vector<int> MembersOf(const plan::Mesh& mesh, const plan::ProgramMove& move, int64_t rank) {
  const std::vector<int64_t> all = mesh.GroupOf(rank, move.axes);
  const int64_t ranks = move.move.axis_size;
  CHECK(ranks > 0 && std::ssize(all) % ranks == 0);
  const int64_t first = mesh.GroupIndex(rank, move.axes) / ranks * ranks;
  std::vector<int> members;
  for (int64_t i = first; i < first + ranks; ++i) {
    members.push_back(static_cast<int>(At(all, i)));
  }
  return members;
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
    ASSIGN_OR_RETURN(
        std::unique_ptr<comm::Communicator> group,
        world.Split({.name = NameOf(mesh, move), .members = MembersOf(mesh, move, world.rank())}));
    made.entries_.push_back({.axes = move.axes,
                             .ranks = move.move.axis_size,
                             .stream = move.stream,
                             .group = std::move(group)});
  }
  return made;
}

const MeshCommunicators::Entry* MeshCommunicators::Find(const plan::ProgramMove& move) const {
  for (const Entry& entry : entries_) {
    if (entry.axes == move.axes && entry.ranks == move.move.axis_size &&
        entry.stream == move.stream) {
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
