// GPT-2: LayerNorm, learned positions, GELU, biases everywhere, a tied head; matrices are stored
// [in, out] and q|k|v is one of them [Radford et al. 2019]. Dropout is not applied: its rates, 0.1
// in every published file, say how a model was trained, not what it computes.

#include "common/model/architecture/architecture.h"
#include "common/model/architecture/config_fields.h"

namespace ravel::plan {
namespace {

absl::Status ReadConfig(const json::Value& object, ModelConfig& config) {
  RETURN_IF_ERROR(RequireText(object, "activation_function", "gelu_new"));
  RETURN_IF_ERROR(RequireBool(object, "scale_attn_weights", true));
  for (const char* field : {"scale_attn_by_inverse_layer_idx",
                            "reorder_and_upcast_attn",
                            "add_cross_attention",
                            "layer_sharing"}) {
    RETURN_IF_ERROR(RequireBool(object, field, false));
  }
  RETURN_IF_ERROR(RequireAbsent(object, "quantization_config"));
  RETURN_IF_ERROR(ReadRequiredInt(object, "vocab_size", config.vocab_size));
  RETURN_IF_ERROR(ReadRequiredInt(object, "n_embd", config.hidden_size));
  RETURN_IF_ERROR(ReadRequiredInt(object, "n_layer", config.num_hidden_layers));
  RETURN_IF_ERROR(ReadRequiredInt(object, "n_head", config.num_attention_heads));
  RETURN_IF_ERROR(ReadInt(object, "n_positions", config.max_position_embeddings));
  RETURN_IF_ERROR(ReadInt(object, "n_inner", config.intermediate_size));
  RETURN_IF_ERROR(ReadDouble(object, "layer_norm_epsilon", config.layer_norm_eps));
  return ReadBool(object, "tie_word_embeddings", config.tie_word_embeddings);
}

void WriteConfig(const ModelConfig& config, json::Value& object) {
  object.Set("vocab_size", config.vocab_size);
  object.Set("n_embd", config.hidden_size);
  object.Set("n_layer", config.num_hidden_layers);
  object.Set("n_head", config.num_attention_heads);
  object.Set("n_positions", config.max_position_embeddings);
  object.Set("n_ctx", config.max_position_embeddings);
  object.Set("n_inner", config.intermediate_size);
  object.Set("activation_function", "gelu_new");
  object.Set("layer_norm_epsilon", config.layer_norm_eps);
  for (const char* field : {"resid_pdrop", "embd_pdrop", "attn_pdrop"}) {
    object.Set(field, 0.0);
  }
  object.Set("scale_attn_weights", true);
  object.Set("scale_attn_by_inverse_layer_idx", false);
  object.Set("tie_word_embeddings", config.tie_word_embeddings);
}

Architecture Describe() {
  Architecture gpt;
  gpt.kind = ArchitectureKind::kGpt2;
  gpt.model_type = "gpt2";
  gpt.model_class = "GPT2LMHeadModel";
  gpt.base_prefix = "transformer.";
  gpt.norm = NormKind::kLayer;
  gpt.mlp = MlpKind::kGelu;
  gpt.positions = PositionKind::kLearned;
  gpt.layout = MatrixLayout::kInputOutput;
  gpt.scaled_residual_init = true;
  gpt.token_table = "transformer.wte";
  gpt.position_table = "transformer.wpe";
  gpt.layers = "transformer.h";
  gpt.attention_norm = "ln_1";
  gpt.qkv = {{"attn.c_attn"}, true};
  gpt.attention_output = {{"attn.c_proj"}, true};
  gpt.mlp_norm = "ln_2";
  gpt.mlp_input = {{"mlp.c_fc"}, true};
  gpt.mlp_output = {{"mlp.c_proj"}, true};
  gpt.final_norm = "transformer.ln_f";
  gpt.defaults.architecture = ArchitectureKind::kGpt2;
  gpt.defaults.max_position_embeddings = 1024;
  gpt.defaults.tie_word_embeddings = true;
  gpt.read_config = ReadConfig;
  gpt.write_config = WriteConfig;
  return gpt;
}

}  // namespace

const Architecture& Gpt2Architecture() {
  static const Architecture architecture = Describe();
  return architecture;
}

}  // namespace ravel::plan
