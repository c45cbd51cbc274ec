// Hugging Face config.json to ModelConfig: takes what Ravel trains and refuses the rest by field.

#include <optional>
#include <string>
#include <string_view>

#include <absl/strings/str_cat.h>

#include "common/json.h"
#include "common/plan/model_inventory.h"

namespace ravel::plan {
namespace {

absl::Status FieldError(const std::string& field,
                        const std::string& expected,
                        const std::string& got) {
  return absl::InvalidArgumentError(
      absl::StrCat("config.json: ", field, ": expected ", expected, ", got ", got));
}

// A member that is there and not null.
const json::Value* Present(const json::Value& object, const std::string& field) {
  const json::Value* value = object.Find(field);
  return value != nullptr && !value->is_null() ? value : nullptr;
}

absl::StatusOr<std::optional<int64_t>> OptionalInt(const json::Value& object,
                                                   const std::string& field) {
  const json::Value* value = Present(object, field);
  if (value == nullptr) {
    return std::optional<int64_t>();
  }
  if (!value->is_int()) {
    return FieldError(field, "a whole number", json::Serialize(*value));
  }
  return std::optional<int64_t>(value->AsInt());
}

absl::Status ReadRequiredInt(const json::Value& object, const std::string& field, int64_t& out) {
  ASSIGN_OR_RETURN(const std::optional<int64_t> value, OptionalInt(object, field));
  if (!value.has_value()) {
    return FieldError(field, "a whole number", "nothing");
  }
  out = *value;
  return absl::OkStatus();
}

absl::Status ReadInt(const json::Value& object, const std::string& field, int64_t& out) {
  ASSIGN_OR_RETURN(const std::optional<int64_t> value, OptionalInt(object, field));
  if (value.has_value()) {
    if (*value < 1) {
      return FieldError(field, "a positive number", absl::StrCat(*value));
    }
    out = *value;
  }
  return absl::OkStatus();
}

absl::Status ReadDouble(const json::Value& object, const std::string& field, double& out) {
  const json::Value* value = Present(object, field);
  if (value == nullptr) {
    return absl::OkStatus();
  }
  if (!value->is_number()) {
    return FieldError(field, "a number", json::Serialize(*value));
  }
  out = value->AsDouble();
  return absl::OkStatus();
}

// What would change the mathematics in a way that Ravel does not train.
absl::Status RefuseUnsupported(const json::Value& object) {
  for (const char* field : {"attention_bias", "mlp_bias"}) {
    const json::Value* value = Present(object, field);
    if (value != nullptr && !(value->is_bool() && !value->AsBool())) {
      return FieldError(field, "false: biases are not supported", json::Serialize(*value));
    }
  }
  const json::Value* activation = Present(object, "hidden_act");
  if (activation != nullptr && !(activation->is_string() && activation->AsString() == "silu")) {
    return FieldError("hidden_act", "\"silu\"", json::Serialize(*activation));
  }
  for (const char* field : {"sliding_window", "quantization_config", "num_local_experts"}) {
    const json::Value* value = Present(object, field);
    if (value != nullptr) {
      return FieldError(field, "null: not supported", json::Serialize(*value).substr(0, 80));
    }
  }
  double dropout = 0;
  RETURN_IF_ERROR(ReadDouble(object, "attention_dropout", dropout));
  if (dropout != 0) {
    return FieldError("attention_dropout", "0", absl::StrCat(dropout));
  }
  return absl::OkStatus();
}

absl::Status CheckArchitecture(const json::Value& object) {
  const json::Value* type = Present(object, "model_type");
  if (type != nullptr) {
    return type->is_string() && type->AsString() == "llama"
               ? absl::OkStatus()
               : FieldError("model_type", "\"llama\"", json::Serialize(*type));
  }
  const json::Value* architectures = Present(object, "architectures");
  if (architectures == nullptr) {
    return FieldError("model_type", "\"llama\"", "nothing");
  }
  if (!architectures->is_array() || architectures->AsArray().size() != 1 ||
      !(architectures->AsArray()[0] == json::Value("LlamaForCausalLM"))) {
    return FieldError("architectures", "[\"LlamaForCausalLM\"]", json::Serialize(*architectures));
  }
  return absl::OkStatus();
}

// `rope_scaling` of older files and `rope_parameters` of newer ones have the same members.
absl::Status ReadRope(const json::Value& object, const std::string& field, ModelConfig& config) {
  const json::Value* rope = Present(object, field);
  if (rope == nullptr) {
    return absl::OkStatus();
  }
  if (!rope->is_object()) {
    return FieldError(field, "an object", rope->KindName());
  }
  const auto member = [&](const char* name) { return field + "." + name; };
  const json::Value* type = Present(*rope, "rope_type");
  if (type == nullptr) {
    type = Present(*rope, "type");
  }
  const std::string kind = type == nullptr     ? "default"
                           : type->is_string() ? type->AsString()
                                               : json::Serialize(*type);
  if (kind != "default" && kind != "llama3") {
    return FieldError(member("rope_type"), "\"default\" or \"llama3\"", kind);
  }
  double rotary_part = 1.0;
  RETURN_IF_ERROR(ReadDouble(*rope, "partial_rotary_factor", rotary_part));
  if (rotary_part != 1.0) {
    return FieldError(member("partial_rotary_factor"), "1", absl::StrCat(rotary_part));
  }
  RETURN_IF_ERROR(ReadDouble(*rope, "rope_theta", config.rope_theta));
  if (kind == "default") {
    return absl::OkStatus();
  }
  for (const char* name : {"factor", "low_freq_factor", "high_freq_factor"}) {
    if (Present(*rope, name) == nullptr) {
      return FieldError(member(name), "a number", "nothing");
    }
  }
  RETURN_IF_ERROR(ReadDouble(*rope, "factor", config.rope_scaling_factor));
  RETURN_IF_ERROR(ReadDouble(*rope, "low_freq_factor", config.rope_low_freq_factor));
  RETURN_IF_ERROR(ReadDouble(*rope, "high_freq_factor", config.rope_high_freq_factor));
  if (config.rope_scaling_factor <= 0) {
    return FieldError(
        member("factor"), "a positive number", absl::StrCat(config.rope_scaling_factor));
  }
  int64_t& original = config.rope_original_max_position_embeddings;
  RETURN_IF_ERROR(ReadInt(*rope, "original_max_position_embeddings", original));
  if (original == 0) {
    return FieldError(member("original_max_position_embeddings"), "a number", "nothing");
  }
  return absl::OkStatus();
}

absl::Status ReadSizes(const json::Value& object, ModelConfig& config) {
  RETURN_IF_ERROR(ReadRequiredInt(object, "vocab_size", config.vocab_size));
  RETURN_IF_ERROR(ReadRequiredInt(object, "hidden_size", config.hidden_size));
  RETURN_IF_ERROR(ReadRequiredInt(object, "intermediate_size", config.intermediate_size));
  RETURN_IF_ERROR(ReadRequiredInt(object, "num_hidden_layers", config.num_hidden_layers));
  RETURN_IF_ERROR(ReadRequiredInt(object, "num_attention_heads", config.num_attention_heads));
  RETURN_IF_ERROR(ReadInt(object, "num_key_value_heads", config.num_key_value_heads));
  RETURN_IF_ERROR(ReadInt(object, "head_dim", config.head_dim));
  RETURN_IF_ERROR(ReadInt(object, "max_position_embeddings", config.max_position_embeddings));
  RETURN_IF_ERROR(ReadDouble(object, "rms_norm_eps", config.rms_norm_eps));
  RETURN_IF_ERROR(ReadDouble(object, "rope_theta", config.rope_theta));
  const json::Value* tied = Present(object, "tie_word_embeddings");
  if (tied != nullptr) {
    if (!tied->is_bool()) {
      return FieldError("tie_word_embeddings", "true or false", json::Serialize(*tied));
    }
    config.tie_word_embeddings = tied->AsBool();
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<ModelConfig> ParseHuggingFaceConfig(std::string_view json_text) {
  const absl::StatusOr<json::Value> parsed = json::Parse(json_text);
  if (!parsed.ok()) {
    return Annotate(parsed.status(), "config.json");
  }
  if (!parsed->is_object()) {
    return absl::InvalidArgumentError("config.json: expected an object");
  }
  RETURN_IF_ERROR(CheckArchitecture(*parsed));
  RETURN_IF_ERROR(RefuseUnsupported(*parsed));
  ModelConfig config;
  RETURN_IF_ERROR(ReadSizes(*parsed, config));
  RETURN_IF_ERROR(ReadRope(*parsed, "rope_scaling", config));
  RETURN_IF_ERROR(ReadRope(*parsed, "rope_parameters", config));
  config.source_json = std::string(json_text);
  absl::StatusOr<ModelConfig> valid = ValidateModelConfig(std::move(config));
  if (!valid.ok()) {
    const std::string message(valid.status().message());
    return absl::Status(
        valid.status().code(),
        absl::StrCat("config.json: ", message.substr(message.find("model.config.") == 0 ? 13 : 0)));
  }
  return valid;
}

}  // namespace ravel::plan
