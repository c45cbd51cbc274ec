#include "worker/checkpoint/hf_config.h"

#include <utility>

#include "common/json.h"

namespace ravel::checkpoint {

std::string HuggingFaceConfigJson(const plan::ModelConfig& config) {
  if (!config.source_json.empty()) {
    return config.source_json;
  }
  json::Value rope;
  rope.Set("rope_type", config.rope_scaling_factor > 0 ? "llama3" : "default");
  if (config.rope_scaling_factor > 0) {
    rope.Set("factor", config.rope_scaling_factor);
    rope.Set("low_freq_factor", config.rope_low_freq_factor);
    rope.Set("high_freq_factor", config.rope_high_freq_factor);
    rope.Set("original_max_position_embeddings", config.rope_original_max_position_embeddings);
  }
  json::Value out;
  json::Value architectures;
  architectures.Append("LlamaForCausalLM");
  out.Set("architectures", std::move(architectures));
  out.Set("model_type", "llama");
  out.Set("vocab_size", config.vocab_size);
  out.Set("hidden_size", config.hidden_size);
  out.Set("intermediate_size", config.intermediate_size);
  out.Set("num_hidden_layers", config.num_hidden_layers);
  out.Set("num_attention_heads", config.num_attention_heads);
  out.Set("num_key_value_heads", config.num_key_value_heads);
  out.Set("head_dim", config.head_dim);
  out.Set("hidden_act", "silu");
  out.Set("max_position_embeddings", config.max_position_embeddings);
  out.Set("rms_norm_eps", config.rms_norm_eps);
  out.Set("attention_bias", false);
  out.Set("attention_dropout", 0.0);
  out.Set("mlp_bias", false);
  out.Set("tie_word_embeddings", config.tie_word_embeddings);
  // Both forms: readers before transformers 5 know rope_theta and rope_scaling, later ones
  // rope_parameters.
  out.Set("rope_theta", config.rope_theta);
  out.Set("rope_scaling", config.rope_scaling_factor > 0 ? rope : json::Value());
  rope.Set("rope_theta", config.rope_theta);
  out.Set("rope_parameters", std::move(rope));
  out.Set("use_cache", true);
  out.Set("torch_dtype", "float32");
  out.Set("dtype", "float32");
  return json::SerializePretty(out) + "\n";
}

}  // namespace ravel::checkpoint
