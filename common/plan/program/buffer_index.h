#pragma once

#include <compare>
#include <utility>
#include <vector>

#include "common/plan/program/step_program.h"

namespace ravel::plan {

// Buffers by kind and owner, none where there is none.
class BufferIndex {
 public:
  // Weights and gradients belong to a group, activations to a unit, kShared to nobody.
  class Owner {
   public:
    constexpr Owner() = default;
    // NOLINTNEXTLINE(google-explicit-constructor): a key names its owner by either id
    constexpr Owner(GroupId group) : id_(group.value()) {}
    // NOLINTNEXTLINE(google-explicit-constructor): as above
    constexpr Owner(UnitId unit) : id_(unit.value()) {}
    auto operator<=>(const Owner&) const = default;

   private:
    int id_ = -1;
  };
  explicit BufferIndex(const ProgramBuffers& buffers);
  struct Key {
    BufferKind kind = BufferKind::kShared;
    Owner owner = {};
    int call = 0;
    int slot = 0;
    auto operator<=>(const Key&) const = default;
  };
  BufferId Find(const Key& key) const;
  // All of one call: every slot.
  std::vector<BufferId> OfCall(BufferKind kind, Owner owner, int call) const;

 private:
  std::vector<std::pair<Key, BufferId>> by_key_;  // ascending
};

// The buffer of a key, or none. Looks through all: for a single one.
BufferId FindBuffer(const ProgramBuffers& buffers, const BufferIndex::Key& key);

}  // namespace ravel::plan
