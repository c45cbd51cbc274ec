// Llama: RMSNorm, grouped-query attention with rotary positions, SwiGLU; no biases [Touvron et al.
// 2023; Grattafiori et al. 2024].

#include "common/model/architecture/architecture.h"
#include "common/model/architecture/config_fields.h"

namespace ravel::plan {
namespace {

absl::Status ReadConfig(const json::Value& object, ModelConfig& config) {
  RETURN_IF_ERROR(ReadLlamaFields(object, config));
  RETURN_IF_ERROR(RequireAbsent(object, "sliding_window"));
  RETURN_IF_ERROR(ReadBool(object, "layer_sharing", config.layer_sharing));
  return ReadInt(object, "head_dim", config.head_dim);
}

void WriteConfig(const ModelConfig& config, json::Value& object) {
  WriteLlamaFields(config, object);
  object.Set("head_dim", config.head_dim);
  object.Set("attention_bias", false);
  object.Set("mlp_bias", false);
  if (config.layer_sharing) {
    object.Set("layer_sharing", true);
  }
}

Architecture Describe() {
  Architecture llama;
  llama.kind = ArchitectureKind::kLlama;
  llama.model_type = "llama";
  llama.model_class = "LlamaForCausalLM";
  llama.base_prefix = "model.";
  llama.shares_layers = true;
  llama.token_table = "model.embed_tokens";
  llama.layers = "model.layers";
  llama.attention_norm = "input_layernorm";
  llama.qkv = {{"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"}};
  llama.attention_output = {{"self_attn.o_proj"}};
  llama.mlp_norm = "post_attention_layernorm";
  llama.mlp_input = {{"mlp.gate_proj", "mlp.up_proj"}};
  llama.mlp_output = {{"mlp.down_proj"}};
  llama.final_norm = "model.norm";
  llama.read_config = ReadConfig;
  llama.write_config = WriteConfig;
  return llama;
}

}  // namespace

const Architecture& LlamaArchitecture() {
  static const Architecture architecture = Describe();
  return architecture;
}

}  // namespace ravel::plan
