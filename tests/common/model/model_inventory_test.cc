#include "common/model/model_inventory.h"

#include <algorithm>
#include <set>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/common/plan/plan_testing.h"

namespace ravel::plan {
namespace {

using ::testing::HasSubstr;

constexpr MicroBatchShape kShape = {.sequences = 2, .sequence_tokens = 16};

std::vector<std::string> Names(const ModelInventory& inventory) {
  std::vector<std::string> names;
  for (const TensorSpec& tensor : inventory.tensors) {
    names.push_back(tensor.name);
  }
  return names;
}

TEST(ModelInventory, CanonicalNamesAndShapesOfALlama) {
  const ModelInventory inventory = BuildInventory(testing::Llama(64, 2, 96, 257), kShape);
  EXPECT_EQ(Names(inventory),
            (std::vector<std::string>{"model.embed_tokens.weight",
                                      "model.layers.0.input_layernorm.weight",
                                      "model.layers.0.self_attn.q_proj.weight",
                                      "model.layers.0.self_attn.k_proj.weight",
                                      "model.layers.0.self_attn.v_proj.weight",
                                      "model.layers.0.self_attn.o_proj.weight",
                                      "model.layers.0.post_attention_layernorm.weight",
                                      "model.layers.0.mlp.gate_proj.weight",
                                      "model.layers.0.mlp.up_proj.weight",
                                      "model.layers.0.mlp.down_proj.weight",
                                      "model.layers.1.input_layernorm.weight",
                                      "model.layers.1.self_attn.q_proj.weight",
                                      "model.layers.1.self_attn.k_proj.weight",
                                      "model.layers.1.self_attn.v_proj.weight",
                                      "model.layers.1.self_attn.o_proj.weight",
                                      "model.layers.1.post_attention_layernorm.weight",
                                      "model.layers.1.mlp.gate_proj.weight",
                                      "model.layers.1.mlp.up_proj.weight",
                                      "model.layers.1.mlp.down_proj.weight",
                                      "model.norm.weight",
                                      "lm_head.weight"}));
  const auto shape = [&](const char* name) {
    return inventory.tensors[static_cast<size_t>(inventory.FindTensor(name))].shape;
  };
  EXPECT_EQ(shape("model.embed_tokens.weight"), (Shape{257, 64}));
  EXPECT_EQ(shape("model.layers.1.self_attn.k_proj.weight"), (Shape{32, 64}));
  EXPECT_EQ(shape("model.layers.1.mlp.down_proj.weight"), (Shape{64, 96}));
  EXPECT_EQ(shape("model.norm.weight"), (Shape{64}));
  EXPECT_EQ(inventory.FindTensor("model.norm"), -1);
}

TEST(ModelInventory, ParameterCounts) {
  // 2 V H + H + layers (2 H + (2 q + 2 kv + 3 I) H)
  EXPECT_EQ(BuildInventory(testing::Llama(256, 6, 704, 8192), kShape).parameter_count(), 8621312);
  EXPECT_EQ(BuildInventory(testing::Llama(512, 8, 1408, 8192), kShape).parameter_count(), 31990272);
}

TEST(ModelInventory, TiedHeadBorrowsTheTable) {
  ModelConfig config = testing::Llama(64, 1, 96, 257);
  config.tie_word_embeddings = true;
  const ModelInventory inventory = BuildInventory(config, kShape);
  EXPECT_EQ(inventory.FindTensor("lm_head.weight"), -1);
  const UnitSpec& head = inventory.units.back();
  EXPECT_EQ(head.kind, UnitKind::kHead);
  EXPECT_EQ(head.borrowed,
            std::vector<TensorId>{inventory.FindTensor("model.embed_tokens.weight")});
  EXPECT_EQ(head.tensors, std::vector<TensorId>{inventory.FindTensor("model.norm.weight")});
}

TEST(ModelInventory, SitesAreOrdinalsOfTheSortedNames) {
  const ModelInventory inventory = BuildInventory(testing::Llama(64, 11, 96, 257), kShape);
  std::vector<std::string> names = Names(inventory);
  std::sort(names.begin(), names.end());
  for (const TensorSpec& tensor : inventory.tensors) {
    EXPECT_EQ(names.at(tensor.site), tensor.name);
  }
}

TEST(ModelInventory, NormsStartAtOneAndDoNotDecay) {
  const ModelInventory inventory = BuildInventory(testing::Llama(64, 1, 96, 257), kShape);
  for (const TensorSpec& tensor : inventory.tensors) {
    const bool norm = tensor.name.find("norm") != std::string::npos;
    EXPECT_EQ(tensor.decay, !norm) << tensor.name;
    EXPECT_EQ(tensor.init, norm ? InitKind::kOnes : InitKind::kNormal) << tensor.name;
  }
}

TEST(ModelInventory, BundlesOnlyWherePartsKeepTheAlignment) {
  const ModelInventory even = BuildInventory(testing::Llama(64, 1, 96, 257), kShape);
  ASSERT_EQ(even.bundles.size(), 2u);
  EXPECT_EQ(even.bundles[0].name, "model.layers.0.self_attn.qkv");
  EXPECT_EQ(even.bundles[1].name, "model.layers.0.mlp.gate_up");
  for (const testing::ModelCase& model : testing::ModelCases()) {
    const ModelInventory inventory = BuildInventory(model.config, kShape);
    for (const BundleSpec& bundle : inventory.bundles) {
      for (const TensorId tensor : bundle.tensors) {
        EXPECT_EQ(ElementCount(inventory.tensors[static_cast<size_t>(tensor)].shape) % 256, 0);
      }
    }
  }
  ModelConfig odd = testing::Llama(64, 1, 97, 257);
  odd.intermediate_size = 97;  // 97 * 64 is no multiple of 256
  const ModelInventory partly = BuildInventory(odd, kShape);
  ASSERT_EQ(partly.bundles.size(), 1u);
  EXPECT_EQ(partly.bundles[0].name, "model.layers.0.self_attn.qkv");
}

TEST(ModelInventory, ActivationsAreLaidOutWithAlignment) {
  const std::vector<ActivationSpec> specs = {{"a", {3}}, {"b", {64}}, {"c", {65}, DType::kU8}};
  EXPECT_EQ(ActivationOffsets(specs), (std::vector<int64_t>{0, 256, 512, 768}));
  EXPECT_EQ(ActivationOffsets({}), std::vector<int64_t>{0});
}

TEST(ModelInventory, ActivationNamesAreUniqueWithinAUnit) {
  for (const testing::ModelCase& model : testing::ModelCases()) {
    const ModelInventory inventory = BuildInventory(model.config, kShape);
    for (const UnitSpec& unit : inventory.units) {
      for (const std::vector<ActivationSpec>* specs : {&unit.saved, &unit.workspace}) {
        std::set<std::string> names;
        for (const ActivationSpec& spec : *specs) {
          EXPECT_TRUE(names.insert(spec.name).second) << spec.name;
          EXPECT_GT(ElementCount(spec.shape), 0) << spec.name;
        }
      }
    }
  }
}

TEST(ModelInventory, FlopsOfLlama3) {
  ModelConfig config = testing::Llama(4096, 32, 14336, 128256);
  config.num_attention_heads = 32;
  config.num_key_value_heads = 8;
  config.head_dim = 128;
  // performance rules: causal half, GFLOP per token.
  EXPECT_NEAR(TrainingFlopsPerToken(config, 1024) / 1e9, 45.83, 0.005);
  EXPECT_NEAR(TrainingFlopsPerToken(config, 8192) / 1e9, 51.47, 0.005);
}

// Repeated layers count twice, layers that are left out with p count 1 - p, heads and tables once.
TEST(ModelInventory, FlopsCountCallsOfLayers) {
  ModelConfig config = testing::Llama(64, 3, 96, 257);
  const double once = TrainingFlopsPerToken(config, 16);
  ModelConfig without = config;
  without.num_hidden_layers = 1;
  const double layer = (once - TrainingFlopsPerToken(without, 16)) / 2;
  EXPECT_DOUBLE_EQ(TrainingFlopsPerToken(config, 16, 0.25), once - 0.25 * 3 * layer);
  config.layer_sharing = true;
  EXPECT_DOUBLE_EQ(TrainingFlopsPerToken(config, 16), once + 3 * layer);
  EXPECT_EQ(BuildInventory(config, kShape).calls(), (std::vector<UnitId>{0, 1, 1, 2, 2, 3, 3, 4}));
  config.layer_sharing = false;
  EXPECT_EQ(BuildInventory(config, kShape).calls(), (std::vector<UnitId>{0, 1, 2, 3, 4}));
}

constexpr const char* kLlama32 = R"({
  "architectures": ["LlamaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
  "bos_token_id": 128000, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2048,
  "initializer_range": 0.02, "intermediate_size": 8192, "max_position_embeddings": 131072,
  "mlp_bias": false, "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 16,
  "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
  "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                   "original_max_position_embeddings": 8192, "rope_type": "llama3"},
  "rope_theta": 500000.0, "tie_word_embeddings": true, "torch_dtype": "bfloat16",
  "use_cache": true, "vocab_size": 128256})";

TEST(HuggingFaceConfig, ReadsAModernLlama) {
  const absl::StatusOr<ModelConfig> config = ParseHuggingFaceConfig(kLlama32);
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->vocab_size, 128256);
  EXPECT_EQ(config->hidden_size, 2048);
  EXPECT_EQ(config->intermediate_size, 8192);
  EXPECT_EQ(config->num_hidden_layers, 16);
  EXPECT_EQ(config->num_attention_heads, 32);
  EXPECT_EQ(config->num_key_value_heads, 8);
  EXPECT_EQ(config->head_dim, 64);
  EXPECT_EQ(config->max_position_embeddings, 131072);
  EXPECT_EQ(config->rms_norm_eps, 1e-5);
  EXPECT_EQ(config->rope_theta, 500000.0);
  EXPECT_TRUE(config->tie_word_embeddings);
  EXPECT_EQ(config->rope_scaling_factor, 32.0);
  EXPECT_EQ(config->rope_high_freq_factor, 4.0);
  EXPECT_EQ(config->rope_original_max_position_embeddings, 8192);
  EXPECT_EQ(config->source_json, kLlama32);
}

TEST(HuggingFaceConfig, ReadsRopeParametersAndFillsDefaults) {
  const absl::StatusOr<ModelConfig> config = ParseHuggingFaceConfig(
      R"({"architectures": ["LlamaForCausalLM"], "vocab_size": 100, "hidden_size": 32,
          "intermediate_size": 50, "num_hidden_layers": 1, "num_attention_heads": 4,
          "num_key_value_heads": null, "sliding_window": null, "rope_scaling": null,
          "rope_parameters": {"rope_type": "default", "rope_theta": 5000}})");
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->num_key_value_heads, 4);
  EXPECT_EQ(config->head_dim, 8);
  EXPECT_EQ(config->rope_theta, 5000.0);
  EXPECT_EQ(config->rope_scaling_factor, 0.0);
  EXPECT_EQ(config->rms_norm_eps, 1e-6);
  EXPECT_FALSE(config->tie_word_embeddings);
}

struct BadConfig {
  const char* from;  // part of kLlama32 ...
  const char* to;    // ... and what stands there instead
  const char* message;
};

TEST(HuggingFaceConfig, RefusesByField) {
  const BadConfig cases[] = {
      {"\"llama\"", "\"mistral\"", "config.json: model_type: expected \"llama\""},
      {"\"attention_bias\": false", "\"attention_bias\": true", "config.json: attention_bias"},
      {"\"mlp_bias\": false", "\"mlp_bias\": true", "config.json: mlp_bias"},
      {"\"silu\"", "\"gelu\"", "config.json: hidden_act: expected \"silu\""},
      {"\"use_cache\": true", "\"sliding_window\": 4096", "config.json: sliding_window"},
      {"\"use_cache\": true", "\"quantization_config\": {}", "config.json: quantization_config"},
      {"\"attention_dropout\": 0.0",
       "\"attention_dropout\": 0.1",
       "config.json: attention_dropout"},
      {"\"rope_type\": \"llama3\"",
       "\"rope_type\": \"yarn\"",
       "config.json: rope_scaling.rope_type"},
      {"\"factor\": 32.0, ", "", "config.json: rope_scaling.factor"},
      {"\"factor\": 32.0", "\"factor\": -1", "config.json: rope_scaling.factor"},
      {"\"rms_norm_eps\": 1e-05", "\"rms_norm_eps\": \"x\"", "config.json: rms_norm_eps"},
      {"\"rms_norm_eps\": 1e-05", "\"rms_norm_eps\": 0", "config.json: rms_norm_eps"},
      {"\"num_key_value_heads\": 8",
       "\"num_key_value_heads\": 5",
       "config.json: num_key_value_heads"},
      {"\"num_key_value_heads\": 8",
       "\"num_key_value_heads\": 64",
       "config.json: num_key_value_heads"},
      {"\"head_dim\": 64", "\"head_dim\": 63", "config.json: head_dim"},
      {"\"head_dim\": 64", "\"head_dim\": 64.5", "config.json: head_dim"},
      {"\"vocab_size\": 128256", "\"vocab_size\": 0", "config.json: vocab_size"},
      {", \"vocab_size\": 128256", "", "config.json: vocab_size"},
      {"\"hidden_size\": 2048", "\"hidden_size\": 99999999999", "config.json: hidden_size"},
      {"\"tie_word_embeddings\": true",
       "\"tie_word_embeddings\": 1",
       "config.json: tie_word_embeddings"},
      {"\"vocab_size\": 128256})", "\"vocab_size\": ", "config.json: "},
      {"\"use_cache\": true", "\"layer_sharing\": 2", "config.json: layer_sharing: expected true"},
  };
  for (const BadConfig& bad : cases) {
    std::string text = kLlama32;
    const size_t at = text.find(bad.from);
    if (at == std::string::npos) {
      text = "{";
    } else {
      text.replace(at, std::string(bad.from).size(), bad.to);
    }
    const absl::StatusOr<ModelConfig> config = ParseHuggingFaceConfig(text);
    ASSERT_FALSE(config.ok()) << bad.to;
    EXPECT_THAT(std::string(config.status().message()), HasSubstr(bad.message));
  }
  EXPECT_FALSE(ParseHuggingFaceConfig("[]").ok());
  EXPECT_FALSE(ParseHuggingFaceConfig("{}").ok());
}

// As MobileLLM's files say it. Exports carry it.
TEST(HuggingFaceConfig, LayerSharingIsReadAndWritten) {
  std::string text = kLlama32;
  text.replace(text.find("\"use_cache\""), 0, "\"layer_sharing\": true, ");
  absl::StatusOr<ModelConfig> config = ParseHuggingFaceConfig(text);
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_TRUE(config->layer_sharing);
  config->source_json.clear();
  EXPECT_THAT(WriteHuggingFaceConfig(*config), HasSubstr("\"layer_sharing\": true"));
  EXPECT_TRUE(ParseHuggingFaceConfig(WriteHuggingFaceConfig(*config))->layer_sharing);
  config->layer_sharing = false;
  EXPECT_THAT(WriteHuggingFaceConfig(*config), ::testing::Not(HasSubstr("layer_sharing")));
}

TEST(ModelConfig, OnlyLlamaSharesLayers) {
  for (const auto kind :
       {ArchitectureKind::kQwen2, ArchitectureKind::kQwen3, ArchitectureKind::kGpt2}) {
    ModelConfig config = testing::Llama(64, 1, 96, 257);
    config.architecture = kind;
    config.num_key_value_heads = config.num_attention_heads;
    EXPECT_TRUE(ValidateModelConfig(config).ok());
    config.layer_sharing = true;
    EXPECT_THAT(std::string(ValidateModelConfig(config).status().message()),
                HasSubstr("model.config.layer_sharing: expected false"));
  }
}

TEST(ModelConfig, InlineErrorsNameTheField) {
  ModelConfig config = testing::Llama(64, 1, 96, 257);
  config.hidden_size = 66;
  config.head_dim = 0;
  const absl::StatusOr<ModelConfig> uneven = ValidateModelConfig(config);
  ASSERT_FALSE(uneven.ok());
  EXPECT_THAT(std::string(uneven.status().message()), HasSubstr("model.config.hidden_size"));
}

}  // namespace
}  // namespace ravel::plan
