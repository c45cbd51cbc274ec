// config.json of Qwen2, Qwen3 and GPT-2, read, refused by field, and written. Llama's is in
// tests/common/model/model_inventory_test.cc.

#include <limits>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/model/architecture/architecture.h"

namespace ravel::plan {
namespace {

using ::testing::HasSubstr;

// As published with Qwen2.5-0.5B.
constexpr const char* kQwen2 = R"({
  "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
  "eos_token_id": 151643, "hidden_act": "silu", "hidden_size": 896, "initializer_range": 0.02,
  "intermediate_size": 4864, "max_position_embeddings": 32768, "max_window_layers": 24,
  "model_type": "qwen2", "num_attention_heads": 14, "num_hidden_layers": 24,
  "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
  "sliding_window": 32768, "tie_word_embeddings": true, "torch_dtype": "bfloat16",
  "use_cache": true, "use_mrope": false, "use_sliding_window": false, "vocab_size": 151936})";

// As published with Qwen3-0.6B.
constexpr const char* kQwen3 = R"({
  "architectures": ["Qwen3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
  "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu",
  "hidden_size": 1024, "initializer_range": 0.02, "intermediate_size": 3072,
  "max_position_embeddings": 40960, "max_window_layers": 28, "model_type": "qwen3",
  "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8,
  "rms_norm_eps": 1e-06, "rope_scaling": null, "rope_theta": 1000000, "sliding_window": null,
  "tie_word_embeddings": true, "torch_dtype": "bfloat16", "use_cache": true,
  "use_sliding_window": false, "vocab_size": 151936})";

// As published with gpt2 (124M).
constexpr const char* kGpt2 = R"({
  "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1,
  "bos_token_id": 50256, "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02,
  "layer_norm_epsilon": 1e-05, "model_type": "gpt2", "n_ctx": 1024, "n_embd": 768, "n_head": 12,
  "n_layer": 12, "n_positions": 1024, "resid_pdrop": 0.1, "summary_activation": null,
  "summary_first_dropout": 0.1, "summary_proj_to_labels": true, "summary_type": "cls_index",
  "summary_use_proj": true, "vocab_size": 50257})";

ModelConfig Parsed(const char* text) {
  const absl::StatusOr<ModelConfig> config = ParseHuggingFaceConfig(text);
  EXPECT_TRUE(config.ok()) << config.status();
  return config.ok() ? *config : ModelConfig{};
}

TEST(HuggingFaceConfig, ReadsQwen2) {
  const ModelConfig config = Parsed(kQwen2);
  EXPECT_EQ(config.architecture, ArchitectureKind::kQwen2);
  EXPECT_EQ(config.hidden_size, 896);
  EXPECT_EQ(config.num_key_value_heads, 2);
  EXPECT_EQ(config.head_dim, 64);
  EXPECT_EQ(config.rope_theta, 1e6);
  EXPECT_TRUE(config.tie_word_embeddings);
}

TEST(HuggingFaceConfig, ReadsQwen3WithItsOwnHeadSize) {
  const ModelConfig config = Parsed(kQwen3);
  EXPECT_EQ(config.architecture, ArchitectureKind::kQwen3);
  EXPECT_EQ(config.head_dim, 128);  // 16 heads of 128 on a width of 1024
  EXPECT_EQ(config.max_position_embeddings, 40960);
}

TEST(HuggingFaceConfig, ReadsGpt2) {
  const ModelConfig config = Parsed(kGpt2);
  EXPECT_EQ(config.architecture, ArchitectureKind::kGpt2);
  EXPECT_EQ(config.hidden_size, 768);
  EXPECT_EQ(config.intermediate_size, 3072);
  EXPECT_EQ(config.num_key_value_heads, 12);
  EXPECT_EQ(config.head_dim, 64);
  EXPECT_EQ(config.max_position_embeddings, 1024);
  EXPECT_EQ(config.layer_norm_eps, 1e-5);
  EXPECT_TRUE(config.tie_word_embeddings);  // what an absent member means
}

struct BadConfig {
  const char* text;
  const char* from;  // part of the text ...
  const char* to;    // ... and what stands there instead
  const char* message;
};

TEST(HuggingFaceConfig, RefusesVariantsByField) {
  const BadConfig cases[] = {
      {kQwen2,
       "\"qwen2\"",
       "\"qwen2_moe\"",
       "config.json: model_type: expected \"llama\", \"qwen2\""},
      {kQwen2, "\"silu\"", "\"gelu\"", "config.json: hidden_act: expected \"silu\""},
      {kQwen2, "\"num_key_value_heads\": 2,", "", "config.json: num_key_value_heads"},
      {kQwen2,
       "\"use_mrope\": false",
       "\"layer_types\": [\"full_attention\", \"sliding_attention\"]",
       "config.json: layer_types: expected \"full_attention\""},
      {kQwen3,
       "\"attention_bias\": false",
       "\"attention_bias\": true",
       "config.json: attention_bias"},
      {kQwen3,
       "\"rope_scaling\": null",
       "\"rope_scaling\": {\"rope_type\": \"yarn\", \"factor\": 4.0}",
       "config.json: rope_scaling.rope_type"},
      {kQwen3,
       "\"use_sliding_window\": false",
       "\"use_sliding_window\": 1",
       "config.json: use_sliding_window"},
      {kGpt2,
       "\"gelu_new\"",
       "\"gelu\"",
       "config.json: activation_function: expected \"gelu_new\""},
      {kGpt2,
       "\"gelu_new\"",
       "\"relu\"",
       "config.json: activation_function: expected \"gelu_new\""},
      {kGpt2,
       "\"summary_use_proj\": true",
       "\"scale_attn_by_inverse_layer_idx\": true",
       "config.json: scale_attn_by_inverse_layer_idx"},
      {kGpt2,
       "\"summary_use_proj\": true",
       "\"scale_attn_weights\": false",
       "config.json: scale_attn_weights: expected true"},
      {kGpt2,
       "\"summary_use_proj\": true",
       "\"reorder_and_upcast_attn\": true",
       "config.json: reorder_and_upcast_attn"},
      {kQwen2, "\"use_mrope\": false", "\"layer_sharing\": true", "config.json: layer_sharing"},
      {kQwen3,
       "\"attention_bias\": false",
       "\"layer_sharing\": true",
       "config.json: layer_sharing"},
      {kGpt2, "\"n_ctx\": 1024", "\"layer_sharing\": true", "config.json: layer_sharing"},
      {kGpt2, "\"n_head\": 12", "\"n_head\": 11", "config.json: hidden_size"},
      {kGpt2, "\"n_embd\": 768, ", "", "config.json: n_embd"},
      {kGpt2,
       "\"layer_norm_epsilon\": 1e-05",
       "\"layer_norm_epsilon\": -1",
       "config.json: layer_norm_eps"},
      {kGpt2, "\"n_positions\": 1024", "\"n_positions\": 0", "config.json: n_positions"},
  };
  for (const BadConfig& bad : cases) {
    std::string text = bad.text;
    const size_t at = text.find(bad.from);
    ASSERT_NE(at, std::string::npos) << bad.from;
    text.replace(at, std::string(bad.from).size(), bad.to);
    const absl::StatusOr<ModelConfig> config = ParseHuggingFaceConfig(text);
    ASSERT_FALSE(config.ok()) << bad.to;
    EXPECT_THAT(std::string(config.status().message()), HasSubstr(bad.message));
  }
}

TEST(HuggingFaceConfig, AWindowBeyondTheLastLayerIsNone) {
  std::string text = kQwen2;
  const std::string off = "\"use_sliding_window\": false";
  text.replace(text.find(off), off.size(), "\"use_sliding_window\": true");
  EXPECT_TRUE(ParseHuggingFaceConfig(text).ok());  // max_window_layers 24 of 24 layers
  const std::string layers = "\"max_window_layers\": 24";
  text.replace(text.find(layers), layers.size(), "\"max_window_layers\": 21");
  const absl::StatusOr<ModelConfig> config = ParseHuggingFaceConfig(text);
  ASSERT_FALSE(config.ok());
  EXPECT_THAT(std::string(config.status().message()),
              HasSubstr("use_sliding_window: expected false"));
}

TEST(HuggingFaceConfig, AFilesTextIsKept) {
  ModelConfig config;
  config.source_json = "{ \"unknown\": 1 }";
  EXPECT_EQ(WriteHuggingFaceConfig(config), config.source_json);
}

TEST(HuggingFaceConfig, EveryArchitectureReadsWhatItWrites) {
  for (const Architecture* architecture : AllArchitectures()) {
    for (const bool tied : {false, true}) {
      ModelConfig config = architecture->defaults;
      config.vocab_size = 257;
      config.hidden_size = 72;
      config.intermediate_size = 100;
      config.num_hidden_layers = 2;
      config.num_attention_heads = 6;
      config.num_key_value_heads = architecture->qkv.names.size() == 1 ? 6 : 3;
      config.head_dim = 12;
      config.max_position_embeddings = 96;
      config.tie_word_embeddings = tied;
      if (architecture->positions == PositionKind::kRotary) {
        config.rope_theta = 5e5;
        config.rope_scaling_factor = tied ? 8.0 : 0.0;
        config.rope_original_max_position_embeddings = tied ? 48 : 0;
      }
      (architecture->norm == NormKind::kRms ? config.rms_norm_eps : config.layer_norm_eps) = 3e-5;
      const absl::StatusOr<ModelConfig> valid = ValidateModelConfig(config);
      ASSERT_TRUE(valid.ok()) << valid.status();
      absl::StatusOr<ModelConfig> again = ParseHuggingFaceConfig(WriteHuggingFaceConfig(*valid));
      ASSERT_TRUE(again.ok()) << again.status();
      again->source_json.clear();
      EXPECT_EQ(*again, *valid) << architecture->model_type;
    }
  }
}

TEST(ModelConfig, SizesThatAnArchitectureCannotHaveAreNamed) {
  ModelConfig config = Gpt2Architecture().defaults;
  config.vocab_size = 64;
  config.hidden_size = 48;
  config.num_hidden_layers = 1;
  config.num_attention_heads = 4;
  const absl::StatusOr<ModelConfig> valid = ValidateModelConfig(config);
  ASSERT_TRUE(valid.ok()) << valid.status();
  EXPECT_EQ(valid->intermediate_size, 192);
  const auto message = [](const ModelConfig& bad) {
    return std::string(ValidateModelConfig(bad).status().message());
  };
  config.num_key_value_heads = 2;
  EXPECT_THAT(message(config), HasSubstr("model.config.num_key_value_heads: expected"));
  config.num_key_value_heads = 4;
  config.head_dim = 16;
  EXPECT_THAT(message(config), HasSubstr("model.config.head_dim: expected"));
  config.head_dim = 0;
  config.layer_norm_eps = 0;
  EXPECT_THAT(message(config), HasSubstr("model.config.layer_norm_eps: expected"));
  config = Gpt2Architecture().defaults;
  config.vocab_size = 64;
  config.hidden_size = std::numeric_limits<int64_t>::min();  // from which others are derived
  EXPECT_THAT(message(config), HasSubstr("model.config.hidden_size: expected 1 to"));
  config = Qwen3Architecture().defaults;
  config.vocab_size = 64;
  config.hidden_size = 48;
  config.intermediate_size = 64;
  config.num_hidden_layers = 1025;
  EXPECT_THAT(message(config), HasSubstr("model.config.num_hidden_layers: expected 1 to 1024"));
  config.intermediate_size = 0;
  config.num_hidden_layers = 1;
  config.num_attention_heads = 4;
  EXPECT_THAT(message(config), HasSubstr("model.config.intermediate_size"));
  config.intermediate_size = 64;
  config.head_dim = 15;
  EXPECT_THAT(message(config), HasSubstr("model.config.head_dim: expected an even number"));
}

}  // namespace
}  // namespace ravel::plan
