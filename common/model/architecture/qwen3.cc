// Qwen3, dense: a Llama whose queries and keys pass an RMSNorm per head before they are rotated
// [Yang et al. 2025].

#include "common/model/architecture/architecture.h"
#include "common/model/architecture/config_fields.h"

namespace ravel::plan {
namespace {

absl::Status ReadConfig(const json::Value& object, ModelConfig& config) {
  RETURN_IF_ERROR(ReadLlamaFields(object, config));
  RETURN_IF_ERROR(RequireBool(object, "layer_sharing", false));
  RETURN_IF_ERROR(ReadRequiredInt(object, "num_key_value_heads", config.num_key_value_heads));
  config.head_dim = 128;  // where the file leaves it out, whatever hidden_size is
  RETURN_IF_ERROR(ReadInt(object, "head_dim", config.head_dim));
  return RefuseSlidingWindow(object, config.num_hidden_layers);
}

void WriteConfig(const ModelConfig& config, json::Value& object) {
  WriteLlamaFields(config, object);
  object.Set("head_dim", config.head_dim);
  object.Set("attention_bias", false);
  object.Set("use_sliding_window", false);
}

Architecture Describe() {
  Architecture qwen = LlamaArchitecture();
  qwen.kind = ArchitectureKind::kQwen3;
  qwen.model_type = "qwen3";
  qwen.model_class = "Qwen3ForCausalLM";
  qwen.shares_layers = false;
  qwen.query_norm = "self_attn.q_norm";
  qwen.key_norm = "self_attn.k_norm";
  qwen.defaults.architecture = ArchitectureKind::kQwen3;
  qwen.defaults.max_position_embeddings = 32768;
  qwen.read_config = ReadConfig;
  qwen.write_config = WriteConfig;
  return qwen;
}

}  // namespace

const Architecture& Qwen3Architecture() {
  static const Architecture architecture = Describe();
  return architecture;
}

}  // namespace ravel::plan
