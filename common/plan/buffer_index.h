#pragma once

#include <compare>
#include <utility>
#include <vector>

#include "common/plan/step_program.h"

namespace ravel::plan {

// Buffer ids by role, -1 where there is none.
class BufferIndex {
 public:
  explicit BufferIndex(const std::vector<ProgramBuffer>& buffers);
  // Weights and gradients belong to a group, activations to a unit, kShared to nobody (-1).
  struct Key {
    BufferKind kind = BufferKind::kShared;
    int owner = -1;
    int call = 0;
    int slot = 0;
    auto operator<=>(const Key&) const = default;
  };
  int Find(const Key& key) const;
  // All of one call: every slot.
  std::vector<int> OfCall(BufferKind kind, int owner, int call) const;

 private:
  std::vector<std::pair<Key, int>> by_key_;  // ascending
};

// The buffer of a key, or -1, of few or a single one: looks through all.
int FindBuffer(const std::vector<ProgramBuffer>& buffers, const BufferIndex::Key& key);

}  // namespace ravel::plan
