// Checkpoints of meshes with a tensor axis, by the plans that jobs have.

#include <string>
#include <vector>

#include <absl/strings/str_cat.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/model/architecture/architecture.h"
#include "common/plan/sharding_plan.h"
#include "common/store/committed_step.h"
#include "common/store/memory_store.h"
#include "common/store/step_verifier.h"
#include "tests/testing/saved_state.h"
#include "worker/checkpoint/loader.h"

namespace ravel::checkpoint {
namespace {

constexpr uint64_t kMeshSeed = 20261125;

struct Model {
  plan::ArchitectureKind kind;
  int64_t key_heads;
  bool tied;
};

plan::ModelConfig ConfigOf(const Model& model) {
  plan::ModelConfig config = plan::ArchitectureOf(model.kind).defaults;
  config.vocab_size = 97;
  config.hidden_size = 64;
  config.intermediate_size = 96;
  config.num_hidden_layers = 2;
  config.num_attention_heads = 8;
  config.num_key_value_heads = model.key_heads;
  config.head_dim = 8;
  config.max_position_embeddings = 32;
  config.tie_word_embeddings = model.tied;
  return config;
}

struct MeshCase {
  int64_t replicas;
  int64_t shards;
  int64_t tensor;
  plan::Strategy strategy;
};

plan::ShardingPlan PlanOf(const Model& model, const MeshCase& mesh) {
  plan::JobSpec spec;
  spec.model = ConfigOf(model);
  spec.data.sequence_length = 16;
  spec.virtual_ranks = 8;
  spec.global_batch = 8;
  spec.replicas = mesh.replicas;
  spec.tensor = mesh.tensor;
  spec.strategy = mesh.strategy;
  spec.allow_padding = true;
  absl::StatusOr<plan::ShardingPlan> plan = plan::BuildShardingPlan(
      {.spec = spec, .ranks = mesh.replicas * mesh.shards * mesh.tensor, .shared_memory = false});
  EXPECT_TRUE(plan.ok()) << plan.status();
  return *std::move(plan);
}

class TensorMeshTest : public ::testing::TestWithParam<Model> {};

// (shard 2 x tensor 2) -> 4 x 1 -> 1 x 4 -> 3 x 1 -> 2 x 2 and replicas, each with another
// strategy: every hop reads what the one before wrote, and writes it again. Fails when a copy is
// saved twice, a part of a fused matrix or a block of a vocabulary lands elsewhere, or a digest
// depends on the mesh.
TEST_P(TensorMeshTest, StateIsTheSameAtEveryHop) {
  using enum plan::Strategy;
  const std::vector<MeshCase> hops = {{1, 2, 2, kOptimGradsParams},
                                      {1, 4, 1, kNoShard},
                                      {1, 1, 4, kOptim},
                                      {1, 3, 1, kOptimGrads},
                                      {1, 2, 2, kOptim},
                                      {2, 1, 2, kOptimGradsParams},
                                      {1, 1, 8, kNoShard}};
  store::MemoryStore store;
  testing::TrainingState first;
  testing::TrainingState state;
  Sha256Digest digest = {};
  std::string directory;
  for (size_t hop = 0; hop < hops.size(); ++hop) {
    plan::ShardingPlan world = PlanOf(GetParam(), hops[hop]);
    SCOPED_TRACE(absl::StrCat("hop ", hop, ": ", world.mesh.Text()));
    if (hop == 0) {
      first = state = testing::RandomState(world.inventory, kMeshSeed);
    } else {
      const auto loaded = testing::Load(store, directory, world);
      ASSERT_TRUE(loaded.ok()) << loaded.status();
      ASSERT_TRUE(loaded->SameAs(first));
      state = *loaded;
    }
    const testing::SavedWorld saved = testing::SaveOf(std::move(world), state);
    const auto step = static_cast<int64_t>(hop) + 1;
    const auto committed = testing::Save(store, saved, {.step = step, .epoch = 1, .attempt = 1});
    ASSERT_TRUE(committed.ok()) << committed.status();
    directory = committed->directory;
    EXPECT_TRUE(store::VerifyStep(store, directory, store::VerifyDepth::kDeep).ok());
    const auto opened = store::CommittedStep::Open(&store, directory);
    ASSERT_TRUE(opened.ok()) << opened.status();
    digest = hop == 0 ? opened->manifest().state_digest : digest;
    EXPECT_EQ(opened->manifest().state_digest, digest);
    EXPECT_EQ(opened->manifest().ranks(), saved.world.ranks);
  }
}

std::string ModelName(const ::testing::TestParamInfo<Model>& model) {
  return absl::StrCat(std::string(plan::ArchitectureOf(model.param.kind).model_type),
                      "_",
                      model.param.key_heads,
                      model.param.tied ? "_tied" : "");
}
INSTANTIATE_TEST_SUITE_P(Models,
                         TensorMeshTest,
                         ::testing::Values(Model{plan::ArchitectureKind::kLlama, 8, false},
                                           Model{plan::ArchitectureKind::kLlama, 4, true},
                                           Model{plan::ArchitectureKind::kQwen2, 2, false},
                                           Model{plan::ArchitectureKind::kQwen3, 1, true},
                                           Model{plan::ArchitectureKind::kGpt2, 8, true}),
                         ModelName);

}  // namespace
}  // namespace ravel::checkpoint
