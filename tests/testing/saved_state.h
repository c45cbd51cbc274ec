#pragma once

// Made-up models and their state, cut for any number of ranks and saved as trainers do it.

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "common/ckpt/manifest.h"
#include "common/ckpt/step_layout.h"
#include "common/plan/save/save_plan.h"
#include "common/plan/sharding_plan.h"
#include "common/status.h"
#include "common/store/object_store.h"
#include "coordinator/saves/saves.h"
#include "worker/checkpoint/writer.h"

namespace ravel::testing {

// Tensors of these shapes, two to a unit; not a model that anything could run.
plan::ModelInventory InventoryOf(const std::vector<Shape>& shapes);
// Random shapes of 1 to 4 dimensions: sizes 1, primes, powers of two.
std::vector<Shape> RandomShapes(uint64_t seed);

// The part of a plan that checkpoints look at.
plan::ShardingPlan WorldOf(const plan::ModelInventory& inventory, int64_t ranks);
// The same on a mesh of `shards` x `tensor_ranks`: the tensor axis cuts what has a
// DimensionCut::dim.
plan::ShardingPlan CutWorld(plan::ModelInventory inventory, int64_t shards, int64_t tensor_ranks);

inline constexpr std::array<plan::StateRole, 3> kShardRoles = {
    plan::StateRole::kParam, plan::StateRole::kExpAvg, plan::StateRole::kExpAvgSq};

// Values of whole tensors: values[role][tensor]; random bits, NaNs included.
struct TrainingState {
  std::array<std::vector<std::vector<float>>, 3> values;
  int64_t optimizer_step = 0;
  // Equal bits.
  bool SameAs(const TrainingState& other) const;
};
TrainingState RandomState(const plan::ModelInventory& inventory, uint64_t seed);
// Moments become values that bf16 has.
void NarrowMoments(TrainingState& state);

// The same for everyone who knows the formula, and finite: element i of tensor t (in inventory
// order) of role r is
// ((7919 * i + 104729 * t + 31 * r) mod 1009 - 504) / 10080; moments are its absolute value.
TrainingState PlainState(const plan::ModelInventory& inventory, int64_t optimizer_step);

// A rank's shard of a group, as it lies in a trainer's memory.
std::vector<float> ShardOf(const TrainingState& state,
                           const plan::ShardingPlan& world,
                           size_t group,
                           int64_t rank,
                           size_t role);

// What to save and how.
struct SavedWorld {
  plan::ShardingPlan world;
  plan::SavePlan save_plan;
  TrainingState state;
  std::string config_json = "{}";  // hf/config.json
};
// Moments that live as `moments` (F32, BF16) have values of that type.
SavedWorld MakeWorld(const plan::ModelInventory& inventory,
                     int64_t ranks,
                     uint64_t seed,
                     DType moments = DType::kF32);

coordinator::SaveContext ContextOf(const SavedWorld& saved, const ckpt::AttemptKey& key);
// Every rank's seal; the first error of any rank.
absl::StatusOr<std::vector<ckpt::Seal>> WriteAllRanks(store::ObjectStore& store,
                                                      const SavedWorld& saved,
                                                      const ckpt::AttemptKey& key);
// One rank's. `hugging_face_files` go with rank 0.
absl::StatusOr<ckpt::Seal> WriteRank(store::ObjectStore& store,
                                     const SavedWorld& saved,
                                     const ckpt::AttemptKey& key,
                                     int64_t rank);
// Saves with a world's own ranks.
SavedWorld SaveOf(plan::ShardingPlan world, uint64_t seed, DType moments = DType::kF32);
// Saves this state.
SavedWorld SaveOf(plan::ShardingPlan world, TrainingState state);
// Writes and commits.
absl::StatusOr<coordinator::CommittedStepInfo> Save(store::ObjectStore& store,
                                                    const SavedWorld& saved,
                                                    const ckpt::AttemptKey& key);
// Loads on `ranks` ranks, with the digest check over all of them.
absl::StatusOr<TrainingState> Load(const store::ObjectStore& store,
                                   const std::string& directory,
                                   const plan::ModelInventory& inventory,
                                   int64_t ranks);
absl::StatusOr<TrainingState> Load(const store::ObjectStore& store,
                                   const std::string& directory,
                                   const plan::ShardingPlan& world);

}  // namespace ravel::testing
