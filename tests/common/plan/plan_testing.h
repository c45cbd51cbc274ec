#pragma once

// Models and plans that several tests use.

#include <cstdint>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "common/plan/plan_pieces.h"
#include "common/plan/sharding_plan.h"

namespace ravel::plan::testing {

// The pieces of a rank, of a group that one axis cuts into equal shards.
inline std::vector<OwnedPiece> OwnedPieces(const ModelInventory& inventory,
                                           const GroupLayout& group,
                                           int64_t rank) {
  const Mesh mesh = *Mesh::Create({{kShardAxis, group.layout.width}});
  return PiecesOf(
      {.inventory = inventory, .group = group, .mesh = mesh, .placements = SlicePlacements()},
      {rank});
}

// The first seed of the random tests; each case prints its own.
inline constexpr uint64_t kSeed = 20240607;

struct ModelCase {
  std::string name;
  ModelConfig config;
};
inline std::string CaseName(const ::testing::TestParamInfo<ModelCase>& info) {
  return info.param.name;
}

inline ModelConfig Llama(int64_t hidden, int64_t layers, int64_t inner, int64_t vocab) {
  ModelConfig config;
  config.hidden_size = hidden;
  config.num_hidden_layers = layers;
  config.intermediate_size = inner;
  config.vocab_size = vocab;
  config.num_attention_heads = hidden >= 256 ? hidden / 64 : 4;
  config.num_key_value_heads = config.num_attention_heads / 2;
  config.head_dim = hidden / config.num_attention_heads;
  return config;
}

inline ModelConfig Llama70b() {
  ModelConfig config = Llama(8192, 80, 28672, 128256);
  config.num_attention_heads = 64;
  config.num_key_value_heads = 8;
  config.head_dim = 128;
  config.max_position_embeddings = 8192;
  return config;
}

inline std::vector<ModelCase> ModelCases() {
  ModelConfig odd;  // nothing is a multiple of anything
  odd.hidden_size = 72;
  odd.num_hidden_layers = 3;
  odd.intermediate_size = 100;
  odd.vocab_size = 259;
  odd.num_attention_heads = 6;
  odd.num_key_value_heads = 3;
  odd.head_dim = 10;
  std::vector<ModelCase> cases = {{"tiny", Llama(64, 2, 96, 257)},
                                  {"odd", odd},
                                  {"llama9m", Llama(256, 6, 704, 8192)},
                                  {"llama34m", Llama(512, 8, 1408, 8192)}};
  const size_t untied = cases.size();
  for (size_t i = 0; i < untied; ++i) {
    cases.push_back(cases[i]);
    cases.back().name += "_tied";
    cases.back().config.tie_word_embeddings = true;
  }
  return cases;
}

inline JobSpec SpecOf(const ModelConfig& config, int64_t lanes) {
  JobSpec spec;
  spec.name = "plan";
  spec.model = config;
  spec.data.sequence_length = 64;
  spec.virtual_ranks = lanes;
  spec.global_batch = 2 * lanes;
  spec.device_count = 1;
  spec.allow_padding = true;  // small models on many ranks
  return spec;
}

struct RecipeCase {
  const char* name;
  Recipe recipe;
};
inline std::vector<RecipeCase> RecipeCases() {
  return {{"delayed", Recipe::kDelayed},
          {"current", Recipe::kCurrent},
          {"fp8_block", Recipe::kFloat8Block},
          {"mxfp8", Recipe::kMxFp8},
          {"nvfp4", Recipe::kNvFp4}};
}
// A job of a model that every recipe takes.
inline JobSpec RecipeSpecOf(Recipe recipe, int64_t lanes = 8) {
  ModelConfig model = Llama(256, 2, 384, 257);
  model.num_key_value_heads = 2;
  JobSpec spec = SpecOf(model, lanes);
  spec.compute = ComputeType::kBF16;
  spec.recipe.recipe = recipe;
  spec.recipe.history = 16;
  return spec;
}

// Takes an instruction out of a program; the next one of its stream waits for what it waited for.
inline void Erase(IdVector<InstructionId, Instruction>& list, InstructionId erased) {
  const Instruction gone = list[erased];
  list.erase(list.begin() + erased.value());
  for (Instruction& other : list) {
    std::erase(other.waits, erased);
    for (InstructionId& wait : other.waits) {
      wait = wait > erased ? wait.value() - 1 : wait.value();
    }
  }
  for (InstructionId next = erased; list.Has(next); ++next) {
    if (list[next].stream == gone.stream) {
      list[next].waits.insert(list[next].waits.end(), gone.waits.begin(), gone.waits.end());
      return;
    }
  }
}

inline ShardingPlan PlanOf(const ModelConfig& config,
                           int64_t ranks,
                           int64_t lanes,
                           bool shared_memory) {
  absl::StatusOr<ShardingPlan> plan = BuildShardingPlan(
      {.spec = SpecOf(config, lanes), .ranks = ranks, .shared_memory = shared_memory});
  EXPECT_TRUE(plan.ok()) << plan.status();
  return plan.ok() ? *std::move(plan) : ShardingPlan{};
}

}  // namespace ravel::plan::testing
