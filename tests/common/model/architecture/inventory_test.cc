// What the inventory makes of each architecture: names, shapes, counts of published models, initial
// values, activations by recompute policy.

#include <map>
#include <set>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "common/model/architecture/architecture.h"
#include "common/model/model_inventory.h"

namespace ravel::plan {
namespace {

constexpr MicroBatchShape kShape = {.sequences = 2, .sequence_tokens = 16};

ModelConfig Small(ArchitectureKind kind, bool tied) {
  ModelConfig config = ArchitectureOf(kind).defaults;
  config.vocab_size = 97;
  config.hidden_size = 24;
  config.intermediate_size = 40;
  config.num_hidden_layers = 2;
  config.num_attention_heads = 4;
  config.num_key_value_heads = ArchitectureOf(kind).qkv.names.size() == 1 ? 4 : 2;
  config.head_dim = 6;
  config.max_position_embeddings = 32;
  config.tie_word_embeddings = tied;
  return *ValidateModelConfig(config);
}

std::map<std::string, Shape> ShapesOf(const ModelInventory& inventory) {
  std::map<std::string, Shape> shapes;
  for (const TensorSpec& tensor : inventory.tensors) {
    shapes[tensor.name] = tensor.shape;
  }
  return shapes;
}

TEST(Inventory, OfQwen2HasBiasesOnQueriesKeysAndValues) {
  const auto shapes = ShapesOf(BuildInventory(Small(ArchitectureKind::kQwen2, false), kShape));
  EXPECT_EQ(shapes.at("model.layers.1.self_attn.q_proj.bias"), (Shape{24}));
  EXPECT_EQ(shapes.at("model.layers.1.self_attn.k_proj.bias"), (Shape{12}));
  EXPECT_EQ(shapes.at("model.layers.1.self_attn.v_proj.bias"), (Shape{12}));
  EXPECT_EQ(shapes.count("model.layers.1.self_attn.o_proj.bias"), 0u);
  EXPECT_EQ(shapes.count("model.layers.1.mlp.down_proj.bias"), 0u);
  EXPECT_EQ(shapes.size(), 2 * 12 + 3u);
}

TEST(Inventory, OfQwen3HasANormPerHead) {
  const auto shapes = ShapesOf(BuildInventory(Small(ArchitectureKind::kQwen3, true), kShape));
  EXPECT_EQ(shapes.at("model.layers.0.self_attn.q_norm.weight"), (Shape{6}));
  EXPECT_EQ(shapes.at("model.layers.0.self_attn.k_norm.weight"), (Shape{6}));
  EXPECT_EQ(shapes.count("lm_head.weight"), 0u);
  EXPECT_EQ(shapes.size(), 2 * 11 + 2u);
}

TEST(Inventory, OfGpt2HasTheShapesOfConv1D) {
  const ModelInventory inventory = BuildInventory(Small(ArchitectureKind::kGpt2, true), kShape);
  const std::map<std::string, Shape> expected = {{"transformer.wte.weight", {97, 24}},
                                                 {"transformer.wpe.weight", {32, 24}},
                                                 {"transformer.ln_f.weight", {24}},
                                                 {"transformer.ln_f.bias", {24}},
                                                 {"transformer.h.0.ln_1.weight", {24}},
                                                 {"transformer.h.0.ln_1.bias", {24}},
                                                 {"transformer.h.0.attn.c_attn.weight", {24, 72}},
                                                 {"transformer.h.0.attn.c_attn.bias", {72}},
                                                 {"transformer.h.0.attn.c_proj.weight", {24, 24}},
                                                 {"transformer.h.0.attn.c_proj.bias", {24}},
                                                 {"transformer.h.0.ln_2.weight", {24}},
                                                 {"transformer.h.0.ln_2.bias", {24}},
                                                 {"transformer.h.0.mlp.c_fc.weight", {24, 40}},
                                                 {"transformer.h.0.mlp.c_fc.bias", {40}},
                                                 {"transformer.h.0.mlp.c_proj.weight", {40, 24}},
                                                 {"transformer.h.0.mlp.c_proj.bias", {24}}};
  const auto shapes = ShapesOf(inventory);
  for (const auto& [name, shape] : expected) {
    ASSERT_EQ(shapes.count(name), 1u) << name;
    EXPECT_EQ(shapes.at(name), shape) << name;
  }
  EXPECT_EQ(shapes.size(), 2 * 12 + 4u);
  EXPECT_TRUE(inventory.bundles.empty());
  // The head borrows the token table, which is alone in its unit.
  EXPECT_EQ(inventory.units[0].tensors.size(), 1u);
  EXPECT_EQ(inventory.units[1].kind, UnitKind::kPositions);
  EXPECT_EQ(inventory.units.back().borrowed, inventory.units[0].tensors);
}

TEST(Inventory, CountsOfPublishedModels) {
  const auto count = [](const char* text) {
    return BuildInventory(*ParseHuggingFaceConfig(text), kShape).parameter_count();
  };
  EXPECT_EQ(count(R"({"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12,
                      "vocab_size": 50257})"),
            124439808);
  EXPECT_EQ(count(R"({"model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864,
                      "num_hidden_layers": 24, "num_attention_heads": 14,
                      "num_key_value_heads": 2, "vocab_size": 151936,
                      "tie_word_embeddings": true})"),
            494032768);
  EXPECT_EQ(count(R"({"model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072,
                      "num_hidden_layers": 28, "num_attention_heads": 16,
                      "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
                      "tie_word_embeddings": true})"),
            596049920);
}

TEST(Inventory, MatricesDecayAndBiasesStartAtZero) {
  for (const Architecture* architecture : AllArchitectures()) {
    const ModelInventory inventory = BuildInventory(Small(architecture->kind, false), kShape);
    for (const TensorSpec& tensor : inventory.tensors) {
      const bool matrix = tensor.shape.size() == 2;
      const bool bias = tensor.name.ends_with(".bias");
      EXPECT_EQ(tensor.decay, matrix) << tensor.name;
      EXPECT_EQ(tensor.init,
                matrix ? InitKind::kNormal : (bias ? InitKind::kZeros : InitKind::kOnes))
          << tensor.name;
      const bool residual =
          architecture->scaled_residual_init && tensor.name.ends_with("c_proj.weight");
      EXPECT_EQ(tensor.init_scale, residual ? 0.5 : 1.0) << tensor.name;  // two layers
    }
  }
}

std::set<std::string> NamesOf(const std::vector<ActivationSpec>& specs) {
  std::set<std::string> names;
  for (const ActivationSpec& spec : specs) {
    EXPECT_TRUE(names.insert(spec.name).second) << spec.name;
  }
  return names;
}

using Names = std::set<std::string>;

TEST(Recompute, EachPolicyKeepsLessAndTheLastOnlyTheInput) {
  const std::map<ArchitectureKind, std::vector<Names>> remade = {
      {ArchitectureKind::kLlama,
       {{},
        {"n0", "n1"},
        {"n0", "n1", "mlp_in"},
        {"rstd0", "n0", "qkv", "att", "lse", "x1", "rstd1", "n1", "mlp_in"}}},
      {ArchitectureKind::kQwen3,
       {{},
        {"n0", "qk", "n1"},
        {"n0", "qk", "n1", "mlp_in"},
        {"rstd0", "n0", "qkv", "qk", "att", "lse", "x1", "rstd1", "n1", "mlp_in"}}},
      {ArchitectureKind::kGpt2,
       {{},
        {"n0", "n1"},
        {"n0", "n1", "mlp_in"},
        {"mean0", "rstd0", "n0", "qkv", "att", "lse", "x1", "mean1", "rstd1", "n1", "mlp_in"}}}};
  for (const auto& [kind, policies] : remade) {
    const ModelConfig config = Small(kind, false);
    const auto layer_of = [&](RecomputePolicy policy) {
      const ModelInventory inventory = BuildInventory(config, kShape, policy);
      for (const UnitSpec& unit : inventory.units) {
        EXPECT_TRUE(unit.kind == UnitKind::kLayer || unit.remade.empty()) << unit.name;
      }
      return inventory.units[inventory.units.size() - 2];
    };
    const Names all = NamesOf(layer_of(RecomputePolicy::kNone).saved);
    for (size_t i = 0; i < policies.size(); ++i) {
      const UnitSpec layer = layer_of(static_cast<RecomputePolicy>(i));
      EXPECT_EQ(NamesOf(layer.remade), policies[i]);
      Names together = NamesOf(layer.saved);
      together.merge(NamesOf(layer.remade));
      EXPECT_EQ(together, all);
      EXPECT_EQ(layer.saved.front().name, "x0");
    }
  }
}

int64_t KeptBytesPerToken(const UnitSpec& layer, int64_t tokens) {
  int64_t bytes = 0;
  for (const ActivationSpec& spec : layer.saved) {
    bytes += ElementCount(spec.shape) * DTypeBytes(spec.dtype);
  }
  return bytes / tokens;
}

// The table of worker/model/README.md.
TEST(Recompute, KeptBytesPerTokenAndLayer) {
  const auto kept = [](const char* text, RecomputePolicy policy) {
    const ModelInventory inventory = BuildInventory(
        *ParseHuggingFaceConfig(text), {.sequences = 1, .sequence_tokens = 64}, policy);
    return KeptBytesPerToken(inventory.units[inventory.units.size() - 2], 64);
  };
  const char* llama = R"({"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
      "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
      "vocab_size": 128256})";
  const char* qwen2 = R"({"model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864,
      "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
      "vocab_size": 151936})";
  const char* qwen3 = R"({"model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072,
      "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
      "head_dim": 128, "vocab_size": 151936})";
  const char* gpt2 = R"({"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12,
      "vocab_size": 50257})";
  using Policy = RecomputePolicy;
  const std::vector<int64_t> expected[] = {{221320, 188552, 73864, 16384},
                                           {61504, 54336, 15424, 3584},
                                           {77896, 57416, 32840, 4096},
                                           {36928, 30784, 18496, 3072}};
  const char* models[] = {llama, qwen2, qwen3, gpt2};
  for (size_t i = 0; i < 4; ++i) {
    std::vector<int64_t> bytes;
    for (const Policy policy : {Policy::kNone, Policy::kNorm, Policy::kMlp, Policy::kBlock}) {
      bytes.push_back(kept(models[i], policy));
    }
    EXPECT_EQ(bytes, expected[i]) << models[i];
  }
}

}  // namespace
}  // namespace ravel::plan
