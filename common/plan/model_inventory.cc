#include "common/plan/model_inventory.h"

#include <algorithm>
#include <map>
#include <utility>

#include <absl/strings/str_cat.h>

#include "common/check.h"

namespace ravel::plan {
namespace {

constexpr int64_t kBufferAlignmentBytes = 256;
// Bundles need parts whose sizes keep the flat buffer's alignment; equals kLayoutAlignmentElements.
constexpr int64_t kBundleAlignmentElements = 256;

struct TensorArgs {
  std::string name;
  Shape shape;
  int unit = 0;
};

int AddTensor(ModelInventory& inventory, TensorArgs args) {
  const bool matrix = args.shape.size() > 1;
  const int index = static_cast<int>(inventory.tensors.size());
  inventory.tensors.push_back({.name = std::move(args.name),
                               .shape = std::move(args.shape),
                               .unit = args.unit,
                               .bundle = -1,
                               .block_rows = 1,
                               .decay = matrix,
                               .init = matrix ? InitKind::kNormal : InitKind::kOnes,
                               .site = 0});
  inventory.units[static_cast<size_t>(args.unit)].tensors.push_back(index);
  return index;
}

int AddUnit(ModelInventory& inventory, std::string name, UnitKind kind, int layer) {
  UnitSpec unit;
  unit.name = std::move(name);
  unit.kind = kind;
  unit.layer = layer;
  inventory.units.push_back(std::move(unit));
  return static_cast<int>(inventory.units.size()) - 1;
}

// Fuses tensors of equal row length whose sizes keep every part aligned.
void AddBundle(ModelInventory& inventory, std::string name, std::vector<int> tensors) {
  for (const int tensor : tensors) {
    const Shape& shape = inventory.tensors[static_cast<size_t>(tensor)].shape;
    if (ElementCount(shape) % kBundleAlignmentElements != 0) {
      return;
    }
  }
  const int bundle = static_cast<int>(inventory.bundles.size());
  for (const int tensor : tensors) {
    inventory.tensors[static_cast<size_t>(tensor)].bundle = bundle;
  }
  inventory.bundles.push_back({.name = std::move(name), .tensors = std::move(tensors)});
}

void AddLayerTensors(ModelInventory& inventory, int unit, int64_t layer) {
  const ModelConfig& config = inventory.config;
  const int64_t hidden = config.hidden_size;
  const int64_t query = config.num_attention_heads * config.head_dim;
  const int64_t key_value = config.num_key_value_heads * config.head_dim;
  const std::string prefix = absl::StrCat("model.layers.", layer, ".");
  const auto add = [&](const char* name, Shape shape) {
    return AddTensor(inventory, {absl::StrCat(prefix, name, ".weight"), std::move(shape), unit});
  };
  add("input_layernorm", {hidden});
  const int q = add("self_attn.q_proj", {query, hidden});
  const int k = add("self_attn.k_proj", {key_value, hidden});
  const int v = add("self_attn.v_proj", {key_value, hidden});
  add("self_attn.o_proj", {hidden, query});
  add("post_attention_layernorm", {hidden});
  const int gate = add("mlp.gate_proj", {config.intermediate_size, hidden});
  const int up = add("mlp.up_proj", {config.intermediate_size, hidden});
  add("mlp.down_proj", {hidden, config.intermediate_size});
  AddBundle(inventory, absl::StrCat(prefix, "self_attn.qkv"), {q, k, v});
  AddBundle(inventory, absl::StrCat(prefix, "mlp.gate_up"), {gate, up});
}

void AddLayerActivations(const ModelConfig& config, const MicroBatchShape& shape, UnitSpec& unit) {
  const int64_t tokens = shape.sequences * shape.sequence_tokens;
  const int64_t hidden = config.hidden_size;
  const int64_t inner = config.intermediate_size;
  const int64_t query = config.num_attention_heads * config.head_dim;
  const int64_t qkv = query + 2 * config.num_key_value_heads * config.head_dim;
  unit.saved = {
      {"x0", {tokens, hidden}},
      {"rstd0", {tokens}},
      {"n0", {tokens, hidden}},
      {"qkv", {tokens, qkv}},
      {"att", {tokens, query}},
      {"lse", {config.num_attention_heads, tokens}},
      {"x1", {tokens, hidden}},
      {"rstd1", {tokens}},
      {"n1", {tokens, hidden}},
      {"gate_up", {tokens, 2 * inner}},
  };
  unit.workspace = {
      {"d_a", {tokens, std::max(inner, qkv)}},  // the MLP's inner activation, then d_qkv
      {"d_b",
       {tokens, std::max(inner, query)}},  // its gradient, then that of the attention's output
      {"d_c", {tokens, hidden}},
      {"scratch", {AttentionScratchElements(shape.sequence_tokens, config.head_dim)}},
  };
}

void AddActivations(ModelInventory& inventory, const MicroBatchShape& shape) {
  const ModelConfig& config = inventory.config;
  const int64_t tokens = shape.sequences * shape.sequence_tokens;
  const int64_t hidden = config.hidden_size;
  for (UnitSpec& unit : inventory.units) {
    if (unit.kind == UnitKind::kLayer) {
      AddLayerActivations(config, shape, unit);
    } else if (unit.kind == UnitKind::kHead) {
      // Its input is not copied: nothing writes the shared "hidden" between its two passes.
      unit.saved = {{"rstd", {tokens}}, {"n", {tokens, hidden}}};
      unit.workspace = {
          {"logits", {std::min(tokens, kLogitsChunkTokens), config.vocab_size}},
          {"dn", {tokens, hidden}},
      };
    }
  }
  inventory.shared = {
      {"ids", {tokens}, DType::kI32},
      {"targets", {tokens}, DType::kI32},
      {"loss", {tokens}},
      {"hidden", {tokens, hidden}},
      {"dhidden", {tokens, hidden}},
      {"rope_cos", {shape.sequence_tokens, config.head_dim / 2}},
      {"rope_sin", {shape.sequence_tokens, config.head_dim / 2}},
  };
}

void NumberSites(ModelInventory& inventory) {
  std::map<std::string, TensorSpec*> by_name;
  for (TensorSpec& tensor : inventory.tensors) {
    by_name[tensor.name] = &tensor;
  }
  uint32_t site = 0;
  for (auto& [name, tensor] : by_name) {
    tensor->site = site++;
  }
}

}  // namespace

int64_t ModelInventory::parameter_count() const {
  int64_t count = 0;
  for (const TensorSpec& tensor : tensors) {
    count += ElementCount(tensor.shape);
  }
  return count;
}

int ModelInventory::FindTensor(std::string_view name) const {
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (tensors[i].name == name) {
      return static_cast<int>(i);
    }
  }
  return -1;
}

ModelInventory BuildInventory(const ModelConfig& config,
                              const MicroBatchShape& micro_batch,
                              RecomputePolicy recompute) {
  (void)recompute;
  ModelInventory inventory;
  inventory.config = config;
  const int embed = AddUnit(inventory, "embed", UnitKind::kEmbedding, -1);
  const int table = AddTensor(
      inventory, {"model.embed_tokens.weight", {config.vocab_size, config.hidden_size}, embed});
  for (int64_t layer = 0; layer < config.num_hidden_layers; ++layer) {
    const int unit = AddUnit(
        inventory, absl::StrCat("layers.", layer), UnitKind::kLayer, static_cast<int>(layer));
    AddLayerTensors(inventory, unit, layer);
  }
  const int head = AddUnit(inventory, "head", UnitKind::kHead, -1);
  AddTensor(inventory, {"model.norm.weight", {config.hidden_size}, head});
  if (config.tie_word_embeddings) {
    inventory.units[static_cast<size_t>(head)].borrowed = {table};
  } else {
    AddTensor(inventory, {"lm_head.weight", {config.vocab_size, config.hidden_size}, head});
  }
  AddActivations(inventory, micro_batch);
  NumberSites(inventory);
  return inventory;
}

std::vector<int64_t> ActivationOffsets(const std::vector<ActivationSpec>& specs) {
  std::vector<int64_t> offsets = {0};
  for (const ActivationSpec& spec : specs) {
    const int64_t bytes = ElementCount(spec.shape) * DTypeBytes(spec.dtype);
    offsets.push_back(RoundUp(offsets.back() + bytes, kBufferAlignmentBytes));
  }
  return offsets;
}

double TrainingFlopsPerToken(const ModelConfig& config, int64_t sequence_tokens) {
  const ModelInventory inventory = BuildInventory(config, {.sequences = 1, .sequence_tokens = 1});
  int64_t multiplied = inventory.parameter_count();
  if (!config.tie_word_embeddings) {
    multiplied -= config.vocab_size * config.hidden_size;
  }
  return 6.0 * static_cast<double>(multiplied) +
         6.0 * static_cast<double>(config.num_hidden_layers * config.num_attention_heads *
                                   config.head_dim * sequence_tokens);
}

}  // namespace ravel::plan
