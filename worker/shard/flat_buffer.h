#pragma once

// Where the plan's buffers lie in this rank's arena.

#include <cstdint>
#include <vector>

#include "common/plan/sharding_plan.h"
#include "common/tensor_view.h"
#include "worker/comm/communicator.h"

namespace ravel::shard {

// Addresses of ProgramBuffers by id. The plan and the communicator's arena outlive it.
// Thread-compatible.
class ArenaBuffers {
 public:
  ArenaBuffers(const plan::ShardingPlan& plan, comm::Communicator& communicator);

  // nullptr for id -1.
  std::byte* bytes(int buffer) const;
  float* floats(int buffer) const;
  // The only buffer that fits, or -1.
  struct Key {
    plan::BufferKind kind;
    int unit = -1;
    int call = 0;
    int slot = 0;
  };
  int Find(const Key& key) const;

 private:
  const plan::ShardingPlan& plan_;
  std::vector<std::byte*> addresses_;
};

// Views of activations laid out one after another from `base`, in the order of the specs.
std::vector<TensorView> ActivationViews(const std::vector<plan::ActivationSpec>& specs,
                                        std::byte* base);

// Full tensors in a buffer that holds a whole group: gathered weights, or the gradients of one
// lane.
std::vector<TensorView> GroupViews(const plan::ModelInventory& inventory,
                                   const plan::GroupLayout& group,
                                   const std::vector<int>& tensors,
                                   float* base);

}  // namespace ravel::shard
