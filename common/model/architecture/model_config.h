#pragma once

// The sizes of a decoder: from a Hugging Face config.json, or written inline in a job file.

#include <cstdint>
#include <string>
#include <string_view>

#include "common/status.h"

namespace ravel::plan {

// On disk: do not renumber.
enum class ArchitectureKind { kLlama = 0, kQwen2 = 1, kQwen3 = 2, kGpt2 = 3 };
inline constexpr ArchitectureKind kLastArchitecture = ArchitectureKind::kGpt2;

struct ModelConfig {
  ArchitectureKind architecture = ArchitectureKind::kLlama;
  int64_t vocab_size = 0;
  int64_t hidden_size = 0;
  int64_t intermediate_size = 0;
  int64_t num_hidden_layers = 0;
  int64_t num_attention_heads = 0;
  int64_t num_key_value_heads = 0;  // 0: equal to num_attention_heads
  int64_t head_dim = 0;             // 0: hidden_size / num_attention_heads
  int64_t max_position_embeddings = 2048;
  double rms_norm_eps = 1e-6;    // of architectures with RMSNorm
  double layer_norm_eps = 1e-5;  // of those with LayerNorm
  double rope_theta = 10000.0;   // of those with rotary positions
  bool tie_word_embeddings = false;
  bool layer_sharing = false;  // every layer runs twice in a row [Liu et al. 2024, MobileLLM]
  // Llama 3 frequency scaling; factor 0 means none.
  double rope_scaling_factor = 0;
  double rope_low_freq_factor = 1;
  double rope_high_freq_factor = 4;
  int64_t rope_original_max_position_embeddings = 0;
  // The config.json this came from, kept verbatim for exports; empty for an inline config.
  std::string source_json;

  bool operator==(const ModelConfig&) const = default;
};

// Reads and checks a Hugging Face config.json text. Errors name the field: "config.json:
// num_key_value_heads: 3 does not divide num_attention_heads 8". Only architectures Ravel can train
// are accepted; a variant of one that would change its mathematics is refused by name.
absl::StatusOr<ModelConfig> ParseHuggingFaceConfig(std::string_view json_text);

// Fills defaults (head_dim, kv heads) and checks every field; errors name it as model.config.FIELD.
absl::StatusOr<ModelConfig> ValidateModelConfig(ModelConfig config);

// The config.json of a model: verbatim where it came from a file, else written from the fields.
std::string WriteHuggingFaceConfig(const ModelConfig& config);

}  // namespace ravel::plan
