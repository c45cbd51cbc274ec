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
};

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
          {"gpt2_untied", Gpt2Config(false)}};
}

inline std::string NameOf(const ::testing::TestParamInfo<NamedConfig>& info) {
  return info.param.name;
}

}  // namespace ravel::model
