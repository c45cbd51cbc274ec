#pragma once

// Decides which rank writes which rectangle of which tensor into which file. Pure; both the
// coordinator and the trainers compute it.

#include <cstdint>
#include <string>
#include <vector>

#include "common/ckpt/manifest.h"
#include "common/dtype.h"
#include "common/model/optimizer_states.h"
#include "common/plan/sharding_plan.h"
#include "common/shape.h"
#include "common/status.h"

namespace ravel::plan {

// A tensor of the saved state: "model.norm.weight" or "state.model.norm.weight.exp_avg".
struct StateTensor {
  std::string key;
  std::string of_param;
  StateRole role = StateRole::kParam;
  DType dtype = DType::kF32;
  Shape shape;
};

// A rectangle of a state tensor in a file. Where its bytes are in the writer's memory: elements
// [shard_offset, ...) of what the writer stores of `group` in `role` (StoredRange in
// plan_pieces.h); kStep chunks carry the step as a value instead, and those of
// delayed scales are of no group: elements of what all ranks hold (worker/quant).
struct SaveChunk {
  StateId tensor = 0;
  Box box;
  GroupId group = {};
  int64_t shard_offset = 0;
  int64_t file_offset = 0;  // absolute, from the start of the file
  int64_t bytes = 0;
};

struct SaveFile {
  std::string
      path;  // relative to the step directory: "model/shard-00001-model-00001-of-00001.safetensors"
  int writer = 0;            // rank
  int64_t header_bytes = 0;  // 8 + N, a multiple of 4096
  int64_t size = 0;
  std::vector<SaveChunk> chunks;  // in file order
};

// Returns the type in which values of `role` are saved: states in the type that they have in
// memory, never widened; weights and steps as fp32, also weights that are kept as bf16 and a
// remainder.
DType SavedType(const ShardingPlan& plan, StateRole role);

struct SavePlan {
  IdVector<StateId, StateTensor> tensors;  // sorted by key
  std::vector<SaveFile> files;
  ckpt::QuantRecord quant;  // of the codes and scales that are not saved; digests are 0
};

// Proves that the chunks of each tensor cover it exactly once; errors name the tensor.
absl::Status ProveCover(const SavePlan& plan);

// Larger rectangles are cut, fuller files are followed by another.
struct SaveLimits {
  int64_t chunk_bytes = int64_t{3} << 29;  // 1.5 GiB
  int64_t file_bytes = int64_t{4} << 30;
};

// Each rank writes what it measures (SavedPieces): model/ has parameters, optim/ states and steps
// of those that are trained; where replicas hold the same the first writes, where ranks hold
// everything each its shard. The j-th rectangle of a tensor on a writer is in that writer's j-th
// file. Steps are held by all and go to whoever has least to write.
absl::StatusOr<SavePlan> BuildSavePlan(const ShardingPlan& plan, const SaveLimits& limits = {});

}  // namespace ravel::plan
