#pragma once

// Members of a config.json, read with errors that name them; members that several architectures
// share.

#include <cstdint>
#include <string>
#include <string_view>

#include "common/json.h"
#include "common/model/architecture/model_config.h"
#include "common/status.h"

namespace ravel::plan {

// "config.json: FIELD: expected ..., got ...".
absl::Status ConfigError(const std::string& field,
                         const std::string& expected,
                         const std::string& got);

// A member that is there and not null, or nullptr.
const json::Value* PresentMember(const json::Value& object, const std::string& field);

// Each leaves `out` alone where the member is absent or null.
absl::Status ReadInt(const json::Value& object, const std::string& field, int64_t& out);
absl::Status ReadDouble(const json::Value& object, const std::string& field, double& out);
absl::Status ReadBool(const json::Value& object, const std::string& field, bool& out);
// An absent or null member is an error.
absl::Status ReadRequiredInt(const json::Value& object, const std::string& field, int64_t& out);

// Refuse what would change the mathematics: a member that is there, not null and not the value.
absl::Status RequireAbsent(const json::Value& object, const std::string& field);
absl::Status RequireBool(const json::Value& object, const std::string& field, bool value);
absl::Status RequireText(const json::Value& object,
                         const std::string& field,
                         const std::string& value);
absl::Status RequireZero(const json::Value& object, const std::string& field);
// `layer_types` of newer files: full attention in every layer.
absl::Status RequireFullAttention(const json::Value& object);
// Qwen's: in use where use_sliding_window is true, a window is given, and there are layers beyond
// max_window_layers.
absl::Status RefuseSlidingWindow(const json::Value& object, int64_t layers);

// Reads the members that Llama and its relatives share: sizes, rotary embedding, tied head. Refuses
// those that none of them may have.
absl::Status ReadLlamaFields(const json::Value& object, ModelConfig& config);
void WriteLlamaFields(const ModelConfig& config, json::Value& object);

}  // namespace ravel::plan
