#pragma once

// Where the plan's buffers lie in this rank's arena.

#include <cstdint>
#include <vector>

#include "common/plan/sharding_plan.h"
#include "common/tensor_view.h"
#include "worker/comm/communicator.h"

namespace ravel::shard {

// Place of a rank on the data axes of a mesh: on the innermost one, and on all others.
struct MeshPlace {
  int64_t inner = 0;
  int64_t outer = 0;
};
MeshPlace PlaceOf(const plan::Mesh& mesh, int64_t rank);

// Addresses of ProgramBuffers by id. A buffer inside another is this rank's part of it: a shard of
// gathered weights by its inner coordinate, a replica's sub-piece of a shard by its outer one. The
// plan and the communicator's arena outlive it. Thread-compatible.
class ArenaBuffers {
 public:
  // `offload`: the memory of what is kOffload; outlives it, too.
  ArenaBuffers(const plan::ShardingPlan& plan,
               comm::Communicator& communicator,
               std::byte* offload = nullptr);

  // nullptr for id -1.
  std::byte* bytes(plan::BufferId buffer) const;
  float* floats(plan::BufferId buffer) const;
  // Elements of a buffer of weights or gradients; 0 for id -1.
  int64_t elements(plan::BufferId buffer) const;

 private:
  const plan::ShardingPlan& plan_;
  plan::IdVector<plan::BufferId, std::byte*> addresses_;
};

// Views of activations laid out one after another from `base`, in the order of the specs.
std::vector<TensorView> ActivationViews(const std::vector<plan::ActivationSpec>& specs,
                                        std::byte* base);

// A buffer that holds a whole group: gathered weights, or the gradients of one lane. Where two
// codes share a byte, the columns of views of it are bytes.
struct GroupBuffer {
  void* base = nullptr;  // none: views have no data
  DType dtype = DType::kF32;
  int64_t codes_per_byte = 1;
};
// The part of a tensor that the rank of a place on the tensor axis has (plan::RankShape): all of it
// where nothing is cut.
TensorView GroupView(const plan::ModelInventory& inventory,
                     const plan::GroupLayout& group,
                     plan::TensorId tensor,
                     int64_t coordinate,
                     const GroupBuffer& buffer);

}  // namespace ravel::shard
