#include <algorithm>
#include <cmath>
#include <utility>

#include <absl/strings/str_cat.h>

#include "common/field_error.h"
#include "common/model/architecture/architecture.h"

namespace ravel::plan {
namespace {

constexpr int64_t kMostWidth = int64_t{1} << 20;

struct FieldLimit {
  const char* name;
  int64_t value;
  int64_t most;
};

absl::Status CheckHeads(const ModelConfig& config) {
  if (config.num_attention_heads % config.num_key_value_heads != 0) {
    return FieldRefusal(
        "model.config.num_key_value_heads",
        absl::StrCat("a divisor of num_attention_heads ", config.num_attention_heads),
        absl::StrCat(config.num_key_value_heads));
  }
  const Architecture& architecture = ArchitectureOf(config.architecture);
  if (architecture.positions == PositionKind::kRotary && config.head_dim % 2 != 0) {
    return FieldRefusal("model.config.head_dim",
                        "an even number (rotary embedding pairs halves)",
                        absl::StrCat(config.head_dim));
  }
  // One matrix for q, k and v knows one number of heads, which fill the residual stream.
  if (architecture.qkv.names.size() > 1) {
    return absl::OkStatus();
  }
  if (config.num_key_value_heads != config.num_attention_heads) {
    return FieldRefusal("model.config.num_key_value_heads",
                        absl::StrCat("num_attention_heads ", config.num_attention_heads),
                        absl::StrCat(config.num_key_value_heads));
  }
  if (config.head_dim * config.num_attention_heads != config.hidden_size) {
    return FieldRefusal("model.config.head_dim",
                        "hidden_size / num_attention_heads",
                        absl::StrCat(config.head_dim));
  }
  return absl::OkStatus();
}

absl::Status CheckNumbers(const ModelConfig& config) {
  const auto positive = [](const char* name, double value) {
    return std::isfinite(value) && value > 0
               ? absl::OkStatus()
               : FieldRefusal(
                     absl::StrCat("model.config.", name), "a positive number", absl::StrCat(value));
  };
  const Architecture& architecture = ArchitectureOf(config.architecture);
  RETURN_IF_ERROR(architecture.norm == NormKind::kRms
                      ? positive("rms_norm_eps", config.rms_norm_eps)
                      : positive("layer_norm_eps", config.layer_norm_eps));
  RETURN_IF_ERROR(positive("rope_theta", config.rope_theta));
  if (config.rope_scaling_factor == 0) {
    return absl::OkStatus();
  }
  RETURN_IF_ERROR(positive("rope_scaling.factor", config.rope_scaling_factor));
  RETURN_IF_ERROR(positive("rope_scaling.low_freq_factor", config.rope_low_freq_factor));
  RETURN_IF_ERROR(positive("rope_scaling.high_freq_factor", config.rope_high_freq_factor));
  RETURN_IF_ERROR(positive("rope_scaling.original_max_position_embeddings",
                           static_cast<double>(config.rope_original_max_position_embeddings)));
  if (config.rope_high_freq_factor <= config.rope_low_freq_factor) {
    return FieldRefusal("model.config.rope_scaling.high_freq_factor", "more than low_freq_factor");
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<ModelConfig> ValidateModelConfig(ModelConfig config) {
  if (config.intermediate_size == 0 && ArchitectureOf(config.architecture).mlp == MlpKind::kGelu) {
    config.intermediate_size = 4 * std::clamp(config.hidden_size, int64_t{0}, kMostWidth);
  }
  const FieldLimit required[] = {
      {"vocab_size", config.vocab_size, int64_t{1} << 24},
      {"hidden_size", config.hidden_size, kMostWidth},
      {"intermediate_size", config.intermediate_size, kMostWidth},
      {"num_hidden_layers", config.num_hidden_layers, 1024},
      {"num_attention_heads", config.num_attention_heads, 65536},
      {"max_position_embeddings", config.max_position_embeddings, int64_t{1} << 30},
  };
  for (const FieldLimit& field : required) {
    if (field.value < 1 || field.value > field.most) {
      return FieldRefusal(absl::StrCat("model.config.", field.name),
                          absl::StrCat("1 to ", field.most),
                          absl::StrCat(field.value));
    }
  }
  if (config.num_key_value_heads == 0) {
    config.num_key_value_heads = config.num_attention_heads;
  }
  if (config.head_dim == 0) {
    if (config.hidden_size % config.num_attention_heads != 0) {
      return FieldRefusal("model.config.hidden_size",
                          absl::StrCat("a multiple of num_attention_heads ",
                                       config.num_attention_heads,
                                       " where head_dim is not given"),
                          absl::StrCat(config.hidden_size));
    }
    config.head_dim = config.hidden_size / config.num_attention_heads;
  }
  const FieldLimit derived[] = {
      {"num_key_value_heads", config.num_key_value_heads, config.num_attention_heads},
      {"head_dim", config.head_dim, 4096},
  };
  for (const FieldLimit& field : derived) {
    if (field.value < 1 || field.value > field.most) {
      return FieldRefusal(absl::StrCat("model.config.", field.name),
                          absl::StrCat("1 to ", field.most),
                          absl::StrCat(field.value));
    }
  }
  const Architecture& architecture = ArchitectureOf(config.architecture);
  if (config.layer_sharing && !architecture.shares_layers) {
    return FieldRefusal(
        "model.config.layer_sharing",
        absl::StrCat("false: layers of ", std::string(architecture.model_type), " run once"),
        "true");
  }
  RETURN_IF_ERROR(CheckHeads(config));
  RETURN_IF_ERROR(CheckNumbers(config));
  return config;
}

}  // namespace ravel::plan
