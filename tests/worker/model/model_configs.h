#pragma once

// Small models of every architecture, with odd sizes and with such as bundles need.

#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "common/model/model_inventory.h"

namespace ravel::model {

inline plan::ModelConfig OddConfig(bool tied) {
  plan::ModelConfig config;
  config.vocab_size = 19;
  config.hidden_size = 10;
  config.intermediate_size = 13;
  config.num_hidden_layers = 2;
  config.num_attention_heads = 4;
  config.num_key_value_heads = 2;
  config.head_dim = 6;
  config.max_position_embeddings = 32;
  config.rms_norm_eps = 1e-5;
  config.tie_word_embeddings = tied;
  return config;
}

// All parts of q|k|v and gate|up are multiples of 256 elements: bundled.
inline plan::ModelConfig BundledConfig() {
  plan::ModelConfig config = OddConfig(false);
  config.hidden_size = 16;
  config.intermediate_size = 32;
  config.head_dim = 8;
  return config;
}

inline plan::ModelConfig QwenConfig(plan::ArchitectureKind kind, bool tied) {
  plan::ModelConfig config = OddConfig(tied);
  config.architecture = kind;
  return config;
}

inline plan::ModelConfig Gpt2Config(bool tied) {
  plan::ModelConfig config = OddConfig(tied);
  config.architecture = plan::ArchitectureKind::kGpt2;
  config.hidden_size = 15;
  config.num_attention_heads = 3;
  config.num_key_value_heads = 3;
  config.head_dim = 5;
  config.intermediate_size = 0;  // four times the hidden size
  return config;
}

struct NamedConfig {
  std::string name;
  plan::ModelConfig config;
  int64_t parts = 1;  // of sums (plan::TensorCut)
};

// Sizes that four parts divide, with so many key heads; the vocabulary has a short and an empty
// block.
inline plan::ModelConfig PartsConfig(plan::ArchitectureKind kind, int64_t key_heads, bool tied) {
  plan::ModelConfig config = QwenConfig(kind, tied);
  config.hidden_size = 12;
  config.intermediate_size = kind == plan::ArchitectureKind::kGpt2 ? 0 : 20;
  config.num_key_value_heads = key_heads;
  config.head_dim = kind == plan::ArchitectureKind::kGpt2 ? 3 : 6;
  return config;
}

inline std::vector<NamedConfig> AllConfigs() {
  plan::ModelConfig bundled_qwen2 = BundledConfig();
  bundled_qwen2.architecture = plan::ArchitectureKind::kQwen2;
  plan::ModelConfig bundled_qwen3 = BundledConfig();
  bundled_qwen3.architecture = plan::ArchitectureKind::kQwen3;
  plan::ModelConfig shared = OddConfig(true);
  shared.layer_sharing = true;
  plan::ModelConfig bundled_shared = BundledConfig();
  bundled_shared.layer_sharing = true;
  return {{"llama_shared", shared},
          {"llama_bundled_shared", bundled_shared},
          {"llama_tied", OddConfig(true)},
          {"llama_untied", OddConfig(false)},
          {"llama_bundled", BundledConfig()},
          {"qwen2_tied", QwenConfig(plan::ArchitectureKind::kQwen2, true)},
          {"qwen2_untied", QwenConfig(plan::ArchitectureKind::kQwen2, false)},
          {"qwen2_bundled", bundled_qwen2},
          {"qwen3_tied", QwenConfig(plan::ArchitectureKind::kQwen3, true)},
          {"qwen3_untied", QwenConfig(plan::ArchitectureKind::kQwen3, false)},
          {"qwen3_bundled", bundled_qwen3},
          {"gpt2_tied", Gpt2Config(true)},
          {"gpt2_untied", Gpt2Config(false)},
          {"llama_parts_1kv", PartsConfig(plan::ArchitectureKind::kLlama, 1, false), 4},
          {"llama_parts_4kv", PartsConfig(plan::ArchitectureKind::kLlama, 4, true), 4},
          {"llama_two_parts", PartsConfig(plan::ArchitectureKind::kLlama, 2, true), 2},
          {"llama_bundled_parts", BundledConfig(), 4},
          {"qwen2_parts_2kv", PartsConfig(plan::ArchitectureKind::kQwen2, 2, false), 4},
          {"qwen3_parts_2kv", PartsConfig(plan::ArchitectureKind::kQwen3, 2, true), 4},
          {"qwen3_bundled_parts", bundled_qwen3, 4},
          {"gpt2_parts", PartsConfig(plan::ArchitectureKind::kGpt2, 4, true), 4}};
}

inline std::string NameOf(const ::testing::TestParamInfo<NamedConfig>& info) {
  return info.param.name;
}

}  // namespace ravel::model
