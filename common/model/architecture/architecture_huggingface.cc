// config.json to ModelConfig and back, whatever the architecture.

#include <string>
#include <string_view>

#include <absl/strings/str_cat.h>

#include "common/json.h"
#include "common/model/architecture/architecture.h"
#include "common/model/architecture/config_fields.h"

namespace ravel::plan {
namespace {

// `"llama", "qwen2" or "gpt2"`: the names that a member may have.
std::string Choices(std::string_view Architecture::*name) {
  std::string text;
  const auto& all = AllArchitectures();
  for (size_t i = 0; i < all.size(); ++i) {
    const char* separator = i == 0 ? "" : (i + 1 == all.size() ? " or " : ", ");
    absl::StrAppend(&text, separator, "\"", std::string(all[i]->*name), "\"");
  }
  return text;
}

absl::StatusOr<const Architecture*> FindBy(const json::Value& object) {
  const json::Value* type = PresentMember(object, "model_type");
  if (type != nullptr) {
    const Architecture* found = type->is_string() ? FindArchitecture(type->AsString()) : nullptr;
    if (found == nullptr) {
      return ConfigError("model_type", Choices(&Architecture::model_type), json::Serialize(*type));
    }
    return found;
  }
  const json::Value* classes = PresentMember(object, "architectures");
  if (classes == nullptr) {
    return ConfigError("model_type", Choices(&Architecture::model_type), "nothing");
  }
  for (const Architecture* architecture : AllArchitectures()) {
    if (classes->is_array() && classes->AsArray().size() == 1 &&
        classes->AsArray()[0] == json::Value(architecture->model_class)) {
      return architecture;
    }
  }
  return ConfigError("architectures",
                     absl::StrCat("a list of one of ", Choices(&Architecture::model_class)),
                     json::Serialize(*classes));
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
  ASSIGN_OR_RETURN(const Architecture* architecture, FindBy(*parsed));
  ModelConfig config = architecture->defaults;
  RETURN_IF_ERROR(architecture->read_config(*parsed, config));
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

std::string WriteHuggingFaceConfig(const ModelConfig& config) {
  if (!config.source_json.empty()) {
    return config.source_json;
  }
  const Architecture& architecture = ArchitectureOf(config.architecture);
  json::Value out;
  json::Value classes;
  classes.Append(architecture.model_class);
  out.Set("architectures", std::move(classes));
  out.Set("model_type", architecture.model_type);
  architecture.write_config(config, out);
  out.Set("use_cache", true);
  out.Set("torch_dtype", "float32");
  out.Set("dtype", "float32");
  return json::SerializePretty(out) + "\n";
}

}  // namespace ravel::plan
