#pragma once

// An architecture: the names of its tensors, the parts of its layers, and the reading and writing
// of its config.json. One row per architecture; the inventory, the modules and the codecs read the
// row and never ask which architecture it is. worker/model/README.md has the steps to add one.

#include <string>
#include <string_view>
#include <vector>

#include "common/json.h"
#include "common/model/architecture/model_config.h"
#include "common/status.h"

namespace ravel::plan {

enum class NormKind { kRms, kLayer };  // LayerNorm has a bias
enum class MlpKind {
  kSwiGlu,  // down(silu(gate(x)) * up(x))
  kGelu,    // down(gelu(up(x))), the tanh form
};
enum class PositionKind { kRotary, kLearned };
// A matrix of y = x * w: as torch's Linear stores it, or as Hugging Face's Conv1D does.
enum class MatrixLayout { kOutputInput, kInputOutput };

// Linear maps that read one input and lie side by side in the output: q|k|v, gate|up, or one that
// is already fused. Tensors are "NAME.weight" and, with a bias, "NAME.bias".
struct LinearNames {
  std::vector<std::string_view> names;
  bool bias = false;
};

struct Architecture {
  ArchitectureKind kind = ArchitectureKind::kLlama;
  std::string_view model_type;   // of config.json
  std::string_view model_class;  // of config.json's `architectures`
  // Prefix of every canonical name but the head's; files of the bare model lack it.
  std::string_view base_prefix;

  NormKind norm = NormKind::kRms;
  MlpKind mlp = MlpKind::kSwiGlu;
  PositionKind positions = PositionKind::kRotary;
  MatrixLayout layout = MatrixLayout::kOutputInput;
  // Initial weights of the two projections onto the residual stream are divided by
  // sqrt(2 * layers).
  bool scaled_residual_init = false;
  bool shares_layers = false;  // its layers may run twice in a row: ModelConfig::layer_sharing

  // Canonical names without ".weight"; inside a layer they follow "LAYERS.index.".
  std::string_view token_table;
  std::string_view position_table;  // learned positions
  std::string_view layers;
  std::string_view attention_norm;
  LinearNames qkv;
  std::string_view query_norm;  // RMSNorm of every head before rotation, or empty
  std::string_view key_norm;
  LinearNames attention_output;
  std::string_view mlp_norm;
  LinearNames mlp_input;
  LinearNames mlp_output;
  std::string_view final_norm;
  std::string_view head = "lm_head";

  // Fields that a config.json or a job file may leave out.
  ModelConfig defaults;
  // Adds to `config`, which holds the defaults, what the members say; errors begin "config.json: ".
  absl::Status (*read_config)(const json::Value& object, ModelConfig& config) = nullptr;
  // All members but `architectures`, `model_type` and the dtype.
  void (*write_config)(const ModelConfig& config, json::Value& object) = nullptr;
};

const Architecture& ArchitectureOf(ArchitectureKind kind);
// By config.json's model_type; nullptr where there is none.
const Architecture* FindArchitecture(std::string_view model_type);
// All that there are, in the order of ArchitectureKind.
const std::vector<const Architecture*>& AllArchitectures();

// One per file of this folder.
const Architecture& LlamaArchitecture();
const Architecture& Qwen2Architecture();
const Architecture& Qwen3Architecture();
const Architecture& Gpt2Architecture();

}  // namespace ravel::plan
