// Readers for members of a Hugging Face config.json. A member that is absent or null leaves the
// default; one that asks for mathematics that Ravel does not compute is refused with its name
// (Require...), since ignoring it would train another model without a warning.

#include "common/model/architecture/config_fields.h"

#include <absl/strings/str_cat.h>

namespace ravel::plan {

absl::Status ConfigError(const std::string& field,
                         const std::string& expected,
                         const std::string& got) {
  return absl::InvalidArgumentError(
      absl::StrCat("config.json: ", field, ": expected ", expected, ", got ", got));
}

const json::Value* PresentMember(const json::Value& object, const std::string& field) {
  const json::Value* value = object.Find(field);
  return value != nullptr && !value->is_null() ? value : nullptr;
}

absl::Status ReadInt(const json::Value& object, const std::string& field, int64_t& out) {
  const json::Value* value = PresentMember(object, field);
  if (value == nullptr) {
    return absl::OkStatus();
  }
  if (!value->is_int() || value->AsInt() < 1) {
    return ConfigError(field, "a whole number above 0", json::Serialize(*value));
  }
  out = value->AsInt();
  return absl::OkStatus();
}

absl::Status ReadRequiredInt(const json::Value& object, const std::string& field, int64_t& out) {
  if (PresentMember(object, field) == nullptr) {
    return ConfigError(field, "a whole number", "nothing");
  }
  return ReadInt(object, field, out);
}

absl::Status ReadDouble(const json::Value& object, const std::string& field, double& out) {
  const json::Value* value = PresentMember(object, field);
  if (value == nullptr) {
    return absl::OkStatus();
  }
  if (!value->is_number()) {
    return ConfigError(field, "a number", json::Serialize(*value));
  }
  out = value->AsDouble();
  return absl::OkStatus();
}

absl::Status ReadBool(const json::Value& object, const std::string& field, bool& out) {
  const json::Value* value = PresentMember(object, field);
  if (value == nullptr) {
    return absl::OkStatus();
  }
  if (!value->is_bool()) {
    return ConfigError(field, "true or false", json::Serialize(*value));
  }
  out = value->AsBool();
  return absl::OkStatus();
}

absl::Status RequireAbsent(const json::Value& object, const std::string& field) {
  const json::Value* value = PresentMember(object, field);
  return value == nullptr
             ? absl::OkStatus()
             : ConfigError(field, "null: not supported", json::Serialize(*value).substr(0, 80));
}

absl::Status RequireBool(const json::Value& object, const std::string& field, bool value) {
  bool found = value;
  RETURN_IF_ERROR(ReadBool(object, field, found));
  return found == value
             ? absl::OkStatus()
             : ConfigError(field,
                           value ? "true: nothing else is supported" : "false: not supported",
                           found ? "true" : "false");
}

absl::Status RequireText(const json::Value& object,
                         const std::string& field,
                         const std::string& value) {
  const json::Value* found = PresentMember(object, field);
  if (found == nullptr || (found->is_string() && found->AsString() == value)) {
    return absl::OkStatus();
  }
  return ConfigError(field, absl::StrCat("\"", value, "\""), json::Serialize(*found));
}

absl::Status RequireZero(const json::Value& object, const std::string& field) {
  double value = 0;
  RETURN_IF_ERROR(ReadDouble(object, field, value));
  return value == 0 ? absl::OkStatus() : ConfigError(field, "0", absl::StrCat(value));
}

absl::Status RequireFullAttention(const json::Value& object) {
  const json::Value* types = PresentMember(object, "layer_types");
  if (types == nullptr) {
    return absl::OkStatus();
  }
  if (!types->is_array()) {
    return ConfigError("layer_types", "a list", types->KindName());
  }
  for (const json::Value& type : types->AsArray()) {
    if (!(type == json::Value("full_attention"))) {
      return ConfigError(
          "layer_types", "\"full_attention\" for every layer", json::Serialize(type));
    }
  }
  return absl::OkStatus();
}

absl::Status RefuseSlidingWindow(const json::Value& object, int64_t layers) {
  bool used = false;
  RETURN_IF_ERROR(ReadBool(object, "use_sliding_window", used));
  int64_t full_layers = 28;  // transformers' default
  const json::Value* given = PresentMember(object, "max_window_layers");
  if (given != nullptr) {
    if (!given->is_int()) {
      return ConfigError("max_window_layers", "a whole number", json::Serialize(*given));
    }
    full_layers = given->AsInt();
  }
  const json::Value* window = object.Find("sliding_window");
  if (used && !(window != nullptr && window->is_null()) && full_layers < layers) {
    return ConfigError(
        "use_sliding_window",
        "false, or max_window_layers of all layers: sliding windows are not supported",
        "true");
  }
  return absl::OkStatus();
}

namespace {

// `rope_scaling` of older files and `rope_parameters` of newer ones have the same members.
absl::Status ReadRope(const json::Value& object, const std::string& field, ModelConfig& config) {
  const json::Value* rope = PresentMember(object, field);
  if (rope == nullptr) {
    return absl::OkStatus();
  }
  if (!rope->is_object()) {
    return ConfigError(field, "an object", rope->KindName());
  }
  const auto member = [&](const char* name) { return field + "." + name; };
  const json::Value* type = PresentMember(*rope, "rope_type");
  if (type == nullptr) {
    type = PresentMember(*rope, "type");
  }
  const std::string kind = type == nullptr     ? "default"
                           : type->is_string() ? type->AsString()
                                               : json::Serialize(*type);
  if (kind != "default" && kind != "llama3") {
    return ConfigError(member("rope_type"), "\"default\" or \"llama3\"", kind);
  }
  double rotary_part = 1.0;
  RETURN_IF_ERROR(ReadDouble(*rope, "partial_rotary_factor", rotary_part));
  if (rotary_part != 1.0) {
    return ConfigError(member("partial_rotary_factor"), "1", absl::StrCat(rotary_part));
  }
  RETURN_IF_ERROR(ReadDouble(*rope, "rope_theta", config.rope_theta));
  if (kind == "default") {
    return absl::OkStatus();
  }
  for (const char* name : {"factor", "low_freq_factor", "high_freq_factor"}) {
    if (PresentMember(*rope, name) == nullptr) {
      return ConfigError(member(name), "a number", "nothing");
    }
  }
  RETURN_IF_ERROR(ReadDouble(*rope, "factor", config.rope_scaling_factor));
  RETURN_IF_ERROR(ReadDouble(*rope, "low_freq_factor", config.rope_low_freq_factor));
  RETURN_IF_ERROR(ReadDouble(*rope, "high_freq_factor", config.rope_high_freq_factor));
  if (config.rope_scaling_factor <= 0) {
    return ConfigError(
        member("factor"), "a positive number", absl::StrCat(config.rope_scaling_factor));
  }
  int64_t& original = config.rope_original_max_position_embeddings;
  RETURN_IF_ERROR(ReadInt(*rope, "original_max_position_embeddings", original));
  if (original == 0) {
    return ConfigError(member("original_max_position_embeddings"), "a number", "nothing");
  }
  return absl::OkStatus();
}

absl::Status RefuseUnsupported(const json::Value& object) {
  for (const char* field : {"attention_bias", "mlp_bias"}) {
    RETURN_IF_ERROR(RequireBool(object, field, false));
  }
  RETURN_IF_ERROR(RequireText(object, "hidden_act", "silu"));
  for (const char* field : {"quantization_config", "num_local_experts"}) {
    RETURN_IF_ERROR(RequireAbsent(object, field));
  }
  RETURN_IF_ERROR(RequireZero(object, "attention_dropout"));
  return RequireFullAttention(object);
}

}  // namespace

absl::Status ReadLlamaFields(const json::Value& object, ModelConfig& config) {
  RETURN_IF_ERROR(RefuseUnsupported(object));
  RETURN_IF_ERROR(ReadRequiredInt(object, "vocab_size", config.vocab_size));
  RETURN_IF_ERROR(ReadRequiredInt(object, "hidden_size", config.hidden_size));
  RETURN_IF_ERROR(ReadRequiredInt(object, "intermediate_size", config.intermediate_size));
  RETURN_IF_ERROR(ReadRequiredInt(object, "num_hidden_layers", config.num_hidden_layers));
  RETURN_IF_ERROR(ReadRequiredInt(object, "num_attention_heads", config.num_attention_heads));
  RETURN_IF_ERROR(ReadInt(object, "num_key_value_heads", config.num_key_value_heads));
  RETURN_IF_ERROR(ReadInt(object, "max_position_embeddings", config.max_position_embeddings));
  RETURN_IF_ERROR(ReadDouble(object, "rms_norm_eps", config.rms_norm_eps));
  RETURN_IF_ERROR(ReadDouble(object, "rope_theta", config.rope_theta));
  RETURN_IF_ERROR(ReadBool(object, "tie_word_embeddings", config.tie_word_embeddings));
  RETURN_IF_ERROR(ReadRope(object, "rope_scaling", config));
  return ReadRope(object, "rope_parameters", config);
}

void WriteLlamaFields(const ModelConfig& config, json::Value& object) {
  json::Value rope;
  rope.Set("rope_type", config.rope_scaling_factor > 0 ? "llama3" : "default");
  if (config.rope_scaling_factor > 0) {
    rope.Set("factor", config.rope_scaling_factor);
    rope.Set("low_freq_factor", config.rope_low_freq_factor);
    rope.Set("high_freq_factor", config.rope_high_freq_factor);
    rope.Set("original_max_position_embeddings", config.rope_original_max_position_embeddings);
  }
  object.Set("vocab_size", config.vocab_size);
  object.Set("hidden_size", config.hidden_size);
  object.Set("intermediate_size", config.intermediate_size);
  object.Set("num_hidden_layers", config.num_hidden_layers);
  object.Set("num_attention_heads", config.num_attention_heads);
  object.Set("num_key_value_heads", config.num_key_value_heads);
  object.Set("hidden_act", "silu");
  object.Set("max_position_embeddings", config.max_position_embeddings);
  object.Set("rms_norm_eps", config.rms_norm_eps);
  object.Set("attention_dropout", 0.0);
  object.Set("tie_word_embeddings", config.tie_word_embeddings);
  // Both forms: readers before transformers 5 know rope_theta and rope_scaling, later ones
  // rope_parameters.
  object.Set("rope_theta", config.rope_theta);
  object.Set("rope_scaling", config.rope_scaling_factor > 0 ? rope : json::Value());
  rope.Set("rope_theta", config.rope_theta);
  object.Set("rope_parameters", std::move(rope));
}

}  // namespace ravel::plan
