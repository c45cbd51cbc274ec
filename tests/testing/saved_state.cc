#include "tests/testing/saved_state.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <random>
#include <span>

#include <absl/strings/str_format.h>

#include "common/check.h"
#include "common/plan/plan_pieces.h"
#include "worker/checkpoint/loader.h"

namespace ravel::testing {
namespace {

std::vector<std::vector<float>> RandomTensors(const plan::ModelInventory& inventory,
                                              std::mt19937_64& random) {
  std::vector<std::vector<float>> tensors;
  for (const plan::TensorSpec& tensor : inventory.tensors) {
    std::vector<float> values(static_cast<size_t>(ElementCount(tensor.shape)));
    for (float& value : values) {
      const auto bits = static_cast<uint32_t>(random());
      std::memcpy(&value, &bits, sizeof(value));
    }
    tensors.push_back(std::move(values));
  }
  return tensors;
}

// As the save plan has it.
std::vector<std::byte> BytesOf(const std::vector<float>& values, DType dtype) {
  std::vector<std::byte> bytes(values.size() * static_cast<size_t>(DTypeBytes(dtype)));
  for (size_t i = 0; i < values.size(); ++i) {
    const auto bits = std::bit_cast<uint32_t>(values[i]);
    const auto upper = static_cast<uint16_t>(bits >> 16);
    if (dtype == DType::kF32) {
      std::memcpy(bytes.data() + i * sizeof(bits), &bits, sizeof(bits));
    } else {
      std::memcpy(bytes.data() + i * sizeof(upper), &upper, sizeof(upper));
    }
  }
  return bytes;
}

}  // namespace

plan::ModelInventory InventoryOf(const std::vector<Shape>& shapes) {
  plan::ModelInventory inventory;
  for (size_t i = 0; i < shapes.size(); ++i) {
    const int unit = static_cast<int>(i / 2);
    if (i % 2 == 0) {
      plan::UnitSpec spec;
      spec.name = absl::StrFormat("unit.%d", unit);
      inventory.units.push_back(spec);
    }
    plan::TensorSpec tensor;
    tensor.name = absl::StrFormat("unit.%d.tensor.%d.weight", unit, i % 2);
    tensor.shape = shapes[i];
    tensor.unit = unit;
    tensor.site = static_cast<uint32_t>(i);
    inventory.tensors.push_back(tensor);
    inventory.units.back().tensors.push_back(static_cast<int>(i));
  }
  return inventory;
}

std::vector<Shape> RandomShapes(uint64_t seed) {
  constexpr int64_t kSizes[] = {1, 2, 3, 5, 7, 13, 16, 31, 64};
  std::mt19937_64 random(seed);
  std::vector<Shape> shapes(2 + random() % 6);
  for (Shape& shape : shapes) {
    shape.resize(1 + random() % 4);
    for (int64_t& size : shape) {
      size = kSizes[random() % std::size(kSizes)];
    }
  }
  return shapes;
}

namespace {

// Everything that a rank stores or measures is its slice of the shard axis.
plan::GroupRoles FlatRoles() {
  plan::GroupRoles roles;
  roles.stored = roles.measured = {{plan::kShardAxis, plan::Placement::Flat()}};
  return roles;
}

}  // namespace

plan::ShardingPlan WorldOf(const plan::ModelInventory& inventory, int64_t ranks) {
  plan::ShardingPlan world;
  world.ranks = ranks;
  world.lanes = {.lanes = static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(ranks))),
                 .ranks = ranks};
  world.inventory = inventory;
  for (size_t unit = 0; unit < inventory.units.size(); ++unit) {
    world.groups.push_back(
        plan::PlanGroups(inventory, static_cast<int>(unit), ranks, {.most_groups = 1}).front());
  }
  world.roles.assign(world.groups.size(), FlatRoles());
  world.mesh = *plan::Mesh::Create({{plan::kShardAxis, ranks}});
  return world;
}

plan::ShardingPlan CutWorld(plan::ModelInventory inventory, int64_t shards, int64_t tensor_ranks) {
  for (plan::TensorSpec& tensor : inventory.tensors) {
    tensor.cut.ranks = tensor_ranks;
  }
  plan::ShardingPlan world = WorldOf(inventory, shards);
  world.ranks = shards * tensor_ranks;
  world.mesh = *plan::Mesh::Create({{plan::kShardAxis, shards}, {plan::kTensorAxis, tensor_ranks}});
  return world;
}

bool TrainingState::SameAs(const TrainingState& other) const {
  if (optimizer_step != other.optimizer_step) {
    return false;
  }
  for (size_t role = 0; role < values.size(); ++role) {
    if (values[role].size() != other.values[role].size()) {
      return false;
    }
    for (size_t i = 0; i < values[role].size(); ++i) {
      const std::vector<float>& a = values[role][i];
      const std::vector<float>& b = other.values[role][i];
      if (a.size() != b.size() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) != 0) {
        return false;
      }
    }
  }
  return true;
}

TrainingState RandomState(const plan::ModelInventory& inventory, uint64_t seed) {
  std::mt19937_64 random(seed);
  TrainingState state;
  for (std::vector<std::vector<float>>& tensors : state.values) {
    tensors = RandomTensors(inventory, random);
  }
  state.optimizer_step = static_cast<int64_t>(random() % 100000);
  return state;
}

void NarrowMoments(TrainingState& state) {
  for (size_t role = 1; role < state.values.size(); ++role) {
    for (std::vector<float>& values : state.values[role]) {
      for (float& value : values) {
        value = std::bit_cast<float>(std::bit_cast<uint32_t>(value) & 0xffff0000u);
      }
    }
  }
}

TrainingState PlainState(const plan::ModelInventory& inventory, int64_t optimizer_step) {
  TrainingState state;
  state.optimizer_step = optimizer_step;
  for (size_t role = 0; role < state.values.size(); ++role) {
    for (size_t t = 0; t < inventory.tensors.size(); ++t) {
      std::vector<float> values(static_cast<size_t>(ElementCount(inventory.tensors[t].shape)));
      for (size_t i = 0; i < values.size(); ++i) {
        const auto remainder = static_cast<float>((7919 * i + 104729 * t + 31 * role) % 1009);
        const float value = (remainder - 504.0f) / 10080.0f;
        values[i] = role == 0 ? value : std::abs(value);
      }
      state.values[role].push_back(std::move(values));
    }
  }
  return state;
}

std::vector<float> ShardOf(const TrainingState& state,
                           const plan::ShardingPlan& world,
                           size_t group,
                           int64_t rank,
                           size_t role) {
  const auto id = static_cast<int>(group);
  std::vector<float> shard(static_cast<size_t>(plan::StoredRange(world, id, rank).size()), -1.0f);
  for (const plan::OwnedPiece& piece : plan::StoredPieces(world, id, rank)) {
    const std::vector<float>& values = state.values[role][static_cast<size_t>(piece.tensor)];
    piece.VisitRuns(world.inventory.tensors[piece.tensor].shape, [&](const plan::OwnedRun& run) {
      std::copy_n(values.begin() + run.first, run.elements, shard.begin() + run.offset);
    });
  }
  return shard;
}

SavedWorld MakeWorld(const plan::ModelInventory& inventory,
                     int64_t ranks,
                     uint64_t seed,
                     DType moments) {
  return SaveOf(WorldOf(inventory, ranks), seed, moments);
}

SavedWorld SaveOf(plan::ShardingPlan world, uint64_t seed, DType moments) {
  SavedWorld saved;
  saved.world = std::move(world);
  saved.world.options.state_types = {moments, moments};
  absl::StatusOr<plan::SavePlan> save_plan = plan::BuildSavePlan(saved.world);
  CHECK(save_plan.ok());
  saved.save_plan = *std::move(save_plan);
  saved.state = RandomState(saved.world.inventory, seed);
  if (moments != DType::kF32) {
    NarrowMoments(saved.state);
  }
  return saved;
}

SavedWorld SaveOf(plan::ShardingPlan world, TrainingState state) {
  SavedWorld saved;
  saved.world = std::move(world);
  absl::StatusOr<plan::SavePlan> save_plan = plan::BuildSavePlan(saved.world);
  CHECK(save_plan.ok());
  saved.save_plan = *std::move(save_plan);
  saved.state = std::move(state);
  return saved;
}

coordinator::SaveContext ContextOf(const SavedWorld& saved, const ckpt::AttemptKey& key) {
  coordinator::SaveContext context;
  context.job = "job-1";
  context.key = key;
  context.created_ns = 1'700'000'000'000'000'000;
  context.build = "test";
  context.numerics = "f32";
  context.virtual_ranks = 8;
  for (const plan::MeshAxis& axis : saved.world.mesh.axes()) {
    context.mesh.push_back({axis.name, axis.size});
  }
  context.ranks = saved.world.ranks;
  return context;
}

absl::StatusOr<ckpt::Seal> WriteRank(store::ObjectStore& store,
                                     const SavedWorld& saved,
                                     const ckpt::AttemptKey& key,
                                     int64_t rank) {
  checkpoint::WriterOptions options;
  options.rank = static_cast<int>(rank);
  options.job_tag = key.job_tag;
  checkpoint::SaveRequest request = {.step = key.step,
                                     .epoch = key.epoch,
                                     .attempt = key.attempt,
                                     .sequence = 0,
                                     .optimizer_step = saved.state.optimizer_step,
                                     .blobs = {}};
  if (rank == 0) {
    options.hugging_face_files = {{"config.json", saved.config_json}};
    request.blobs = {{"data", "cursor"}, {"rng", "seed 7"}};
  }
  checkpoint::CheckpointWriter writer(&store, &saved.save_plan, options);
  std::vector<std::byte> shard;
  const auto shard_bytes = [&](plan::GroupId group, plan::StateRole role) {
    const auto index = static_cast<size_t>(std::find(kShardRoles.begin(), kShardRoles.end(), role) -
                                           kShardRoles.begin());
    shard = BytesOf(ShardOf(saved.state, saved.world, static_cast<size_t>(group), rank, index),
                    plan::SavedType(saved.world, role));
    return std::span<const std::byte>(shard);
  };
  RETURN_IF_ERROR(writer.Snapshot(std::move(request), shard_bytes));
  return writer.Wait();
}

absl::StatusOr<std::vector<ckpt::Seal>> WriteAllRanks(store::ObjectStore& store,
                                                      const SavedWorld& saved,
                                                      const ckpt::AttemptKey& key) {
  std::vector<ckpt::Seal> seals;
  for (int64_t rank = 0; rank < saved.world.ranks; ++rank) {
    ASSIGN_OR_RETURN(ckpt::Seal seal, WriteRank(store, saved, key, rank));
    seals.push_back(std::move(seal));
  }
  return seals;
}

absl::StatusOr<coordinator::CommittedStepInfo> Save(store::ObjectStore& store,
                                                    const SavedWorld& saved,
                                                    const ckpt::AttemptKey& key) {
  ASSIGN_OR_RETURN(const std::vector<ckpt::Seal> seals, WriteAllRanks(store, saved, key));
  return coordinator::CommitSave(store, saved.save_plan, ContextOf(saved, key), seals);
}

absl::StatusOr<TrainingState> Load(const store::ObjectStore& store,
                                   const std::string& directory,
                                   const plan::ModelInventory& inventory,
                                   int64_t ranks) {
  return Load(store, directory, WorldOf(inventory, ranks));
}

absl::StatusOr<TrainingState> Load(const store::ObjectStore& store,
                                   const std::string& directory,
                                   const plan::ShardingPlan& world) {
  TrainingState state = RandomState(world.inventory, 1);
  std::vector<uint64_t> sums;
  for (int64_t rank = 0; rank < world.ranks; ++rank) {
    ASSIGN_OR_RETURN(checkpoint::StepLoader loader,
                     checkpoint::StepLoader::Open(
                         &store, directory, &world.inventory, plan::OptimizerKind::kAdamW));
    for (const plan::GroupId group : world.groups.ids()) {
      const std::vector<plan::OwnedPiece> stored = plan::StoredPieces(world, group, rank);
      const std::vector<plan::OwnedPiece> counted = plan::SavedPieces(world, group, rank);
      for (size_t role = 0; role < kShardRoles.size(); ++role) {
        std::vector<float> shard(static_cast<size_t>(plan::StoredRange(world, group, rank).size()));
        RETURN_IF_ERROR(
            loader.ReadPieces(kShardRoles[role], stored, shard, checkpoint::DigestShare::kReplica));
        RETURN_IF_ERROR(loader.ReadPieces(kShardRoles[role], counted, shard));
        for (const plan::OwnedPiece& piece : stored) {
          std::vector<float>& values = state.values[role][static_cast<size_t>(piece.tensor)];
          piece.VisitRuns(
              world.inventory.tensors[piece.tensor].shape, [&](const plan::OwnedRun& run) {
                std::copy_n(shard.begin() + run.offset, run.elements, values.begin() + run.first);
              });
        }
      }
    }
    ASSIGN_OR_RETURN(state.optimizer_step,
                     loader.ReadOptimizerStep(rank == 0 ? checkpoint::DigestShare::kOwner
                                                        : checkpoint::DigestShare::kReplica));
    sums.resize(loader.digest_sums().size());
    for (size_t i = 0; i < sums.size(); ++i) {
      sums[i] += loader.digest_sums()[i];
    }
    if (rank == world.ranks - 1) {
      RETURN_IF_ERROR(loader.CheckDigests(sums));
    }
  }
  return state;
}

}  // namespace ravel::testing
