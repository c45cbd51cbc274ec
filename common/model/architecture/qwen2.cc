// Qwen2 and Qwen2.5: a Llama with biases on q, k and v [Yang et al. 2024].

#include "common/model/architecture/architecture.h"
#include "common/model/architecture/config_fields.h"

namespace ravel::plan {
namespace {

absl::Status ReadConfig(const json::Value& object, ModelConfig& config) {
  RETURN_IF_ERROR(ReadLlamaFields(object, config));
  RETURN_IF_ERROR(RequireBool(object, "layer_sharing", false));
  RETURN_IF_ERROR(ReadRequiredInt(object, "num_key_value_heads", config.num_key_value_heads));
  // No file has it; transformers would take it.
  RETURN_IF_ERROR(ReadInt(object, "head_dim", config.head_dim));
  return RefuseSlidingWindow(object, config.num_hidden_layers);
}

void WriteConfig(const ModelConfig& config, json::Value& object) {
  WriteLlamaFields(config, object);
  object.Set("head_dim", config.head_dim);
  object.Set("use_sliding_window", false);
}

Architecture Describe() {
  Architecture qwen = LlamaArchitecture();
  qwen.kind = ArchitectureKind::kQwen2;
  qwen.model_type = "qwen2";
  qwen.model_class = "Qwen2ForCausalLM";
  qwen.shares_layers = false;
  qwen.qkv.bias = true;
  qwen.defaults.architecture = ArchitectureKind::kQwen2;
  qwen.defaults.max_position_embeddings = 32768;
  qwen.read_config = ReadConfig;
  qwen.write_config = WriteConfig;
  return qwen;
}

}  // namespace

const Architecture& Qwen2Architecture() {
  static const Architecture architecture = Describe();
  return architecture;
}

}  // namespace ravel::plan
