#include "common/model/tensor_parts.h"

#include <functional>
#include <map>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace ravel::plan {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr MicroBatchShape kPartsShape = {.sequences = 2, .sequence_tokens = 8};

ModelConfig PartsTestConfig(ArchitectureKind kind = ArchitectureKind::kLlama) {
  ModelConfig config;
  config.architecture = kind;
  config.vocab_size = 37;
  config.hidden_size = 32;
  config.intermediate_size = 48;
  config.num_hidden_layers = 1;
  config.num_attention_heads = 8;
  config.num_key_value_heads = kind == ArchitectureKind::kGpt2 ? 8 : 2;
  config.head_dim = 4;
  config.max_position_embeddings = 32;
  return config;
}

struct Refused {
  std::string text;
  int64_t parts;
  std::function<void(ModelConfig&, MicroBatchShape&)> edit;
};

TEST(TensorParts, WhatTheyDoNotDivideIsRefusedByName) {
  EXPECT_TRUE(CheckTensorParts(4, PartsTestConfig(), kPartsShape).ok());
  const auto none = [](ModelConfig&, MicroBatchShape&) {};
  const Refused cases[] = {
      {"expected a power of two up to 16, got 6", 6, none},
      {"expected a power of two up to 16, got 0", 0, none},
      {"expected a power of two up to 16, got 32", 32, none},
      {"8 query heads, which model.layers.0.self_attn.o_proj.weight reads, got 16", 16, none},
      {"3 key heads of model.layers.0.self_attn.v_proj.weight, got 2",
       2,
       [](ModelConfig& c, MicroBatchShape&) {
         c.num_attention_heads = 12;
         c.num_key_value_heads = 3;
       }},
      {"50 inputs of model.layers.0.mlp.down_proj.weight, got 4",
       4,
       [](ModelConfig& c, MicroBatchShape&) { c.intermediate_size = 50; }},
      {"14 tokens of a micro-batch, which model.layers.0.input_layernorm.weight sums",
       4,
       [](ModelConfig&, MicroBatchShape& s) { s.sequence_tokens = 7; }}};
  for (const Refused& refused : cases) {
    ModelConfig config = PartsTestConfig();
    MicroBatchShape shape = kPartsShape;
    refused.edit(config, shape);
    const absl::Status status = CheckTensorParts(refused.parts, config, shape);
    EXPECT_THAT(std::string(status.message()), HasSubstr("determinism.tensorParts: "));
    EXPECT_THAT(std::string(status.message()), HasSubstr(refused.text));
  }
}

TEST(TensorParts, BlocksOfTheVocabularyAreWholeEightsUntilItEnds) {
  const auto rows_of = [](int64_t vocabulary, int64_t parts) {
    std::vector<int64_t> rows;
    int64_t next = 0;
    for (int64_t part = 0; part < parts; ++part) {
      const VocabularyBlock block = VocabularyBlockOf({.parts = parts}, vocabulary, part);
      EXPECT_EQ(block.first, next);
      next += block.rows;
      rows.push_back(block.rows);
    }
    EXPECT_EQ(next, vocabulary);
    return rows;
  };
  EXPECT_THAT(rows_of(50257, 1), ElementsAre(50257));
  EXPECT_THAT(rows_of(50257, 4), ElementsAre(12568, 12568, 12568, 12553));
  EXPECT_THAT(rows_of(9, 4), ElementsAre(8, 1, 0, 0));
  EXPECT_THAT(rows_of(64, 2), ElementsAre(32, 32));
}

TEST(TensorParts, RanksShareKeyHeadsThatAreFewerThanParts) {
  const auto sizes = [](int64_t degree) {
    const LocalSizes local = LocalSizesOf(PartsTestConfig(), {.parts = 8, .degree = degree});
    return std::vector<int64_t>{
        local.query_heads, local.kv_heads, local.kv_slots, local.kv_sharing, local.inner};
  };
  EXPECT_THAT(sizes(1), ElementsAre(8, 2, 8, 4, 48));
  EXPECT_THAT(sizes(2), ElementsAre(4, 1, 4, 4, 24));
  EXPECT_THAT(sizes(4), ElementsAre(2, 1, 2, 2, 12));
  EXPECT_THAT(sizes(8), ElementsAre(1, 1, 1, 1, 6));
}

std::map<std::string, Shape> LeavesOf(const ModelConfig& config, const TensorCut& cut) {
  ModelInventory inventory =
      BuildInventory(*ValidateModelConfig(config), kPartsShape, RecomputePolicy::kNone, cut);
  ReserveTensorParts(inventory);
  std::map<std::string, Shape> leaves;
  for (const UnitSpec& unit : inventory.units) {
    for (const ActivationSpec& leaf : unit.leaves) {
      leaves[leaf.name] = leaf.shape;
    }
  }
  return leaves;
}

TEST(TensorParts, LeavesAreThoseOfSumsThatRanksWouldShare) {
  const std::map<std::string, Shape> one = LeavesOf(PartsTestConfig(), {.parts = 4});
  EXPECT_EQ(one.size(), 5u);
  EXPECT_THAT(one.at("model.norm.weight"), ElementsAre(4, 32));
  EXPECT_THAT(one.at("model.layers.0.input_layernorm.weight"), ElementsAre(4, 32));
  EXPECT_THAT(one.at("model.layers.0.self_attn.k_proj.weight"), ElementsAre(4, 128));
  const TensorCut half = {.parts = 4, .degree = 2, .coordinate = 1, .sequence = true};
  EXPECT_THAT(LeavesOf(PartsTestConfig(), half).at("model.norm.weight"), ElementsAre(2, 32));
  EXPECT_TRUE(
      LeavesOf(PartsTestConfig(), {.parts = 4, .degree = 4, .coordinate = 0, .sequence = true})
          .empty());
  EXPECT_TRUE(LeavesOf(PartsTestConfig(), {}).empty());
  const auto qwen3 = LeavesOf(PartsTestConfig(ArchitectureKind::kQwen3), {.parts = 2});
  EXPECT_THAT(qwen3.at("model.layers.0.self_attn.q_norm.weight"), ElementsAre(2, 4));
  EXPECT_EQ(qwen3.count("model.layers.0.self_attn.k_proj.weight"), 0u);
  const auto gpt2 = LeavesOf(PartsTestConfig(ArchitectureKind::kGpt2), {.parts = 2});
  EXPECT_THAT(gpt2.at("transformer.h.0.mlp.c_proj.bias"), ElementsAre(2, 32));
  EXPECT_THAT(gpt2.at("transformer.ln_f.bias"), ElementsAre(2, 32));
  EXPECT_EQ(gpt2.count("transformer.h.0.attn.c_attn.bias"), 0u);
}

TEST(TensorParts, ColumnsThatRanksWouldCutAreMeasuredInBlocks) {
  const auto blocks_of = [](ArchitectureKind kind) {
    const ModelInventory inventory = BuildInventory(*ValidateModelConfig(PartsTestConfig(kind)),
                                                    kPartsShape,
                                                    RecomputePolicy::kNone,
                                                    {.parts = 4});
    std::map<std::string, int64_t> blocks;
    for (const TensorId id : inventory.tensors.ids()) {
      if (ColumnBlocksOf(inventory, id) > 1) {
        blocks[inventory.tensors[id].name] = ColumnBlocksOf(inventory, id);
      }
    }
    return blocks;
  };
  EXPECT_EQ(blocks_of(ArchitectureKind::kLlama),
            (std::map<std::string, int64_t>{{"model.layers.0.mlp.down_proj.weight", 4},
                                            {"model.layers.0.self_attn.o_proj.weight", 4}}));
  EXPECT_EQ(blocks_of(ArchitectureKind::kGpt2),
            (std::map<std::string, int64_t>{{"transformer.h.0.attn.c_attn.weight", 12},
                                            {"transformer.h.0.mlp.c_fc.weight", 4}}));
}

}  // namespace
}  // namespace ravel::plan
