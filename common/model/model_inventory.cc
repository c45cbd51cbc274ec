// Builds the list of parameters from an architecture's description: units in forward order, tensors
// with canonical names, shapes and initialisation, and bundles of adjacent tensors that one gemm
// reads (q|k|v, gate|up). A bundle is made only if all its parts are multiples of the layout's
// alignment, so that fusing never costs padding. Nothing here depends on ranks or types.

#include "common/model/model_inventory.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <utility>

#include <absl/strings/str_cat.h>

#include "common/check.h"
#include "common/model/architecture/architecture.h"
#include "common/model/bundles.h"
#include "common/model/model_activations.h"
#include "common/model/tensor_cuts.h"

namespace ravel::plan {
namespace {

constexpr int64_t kBufferAlignmentBytes = 256;

struct TensorArgs {
  std::string name;
  Shape shape;
  UnitId unit = 0;
  InitKind init = InitKind::kNormal;
  double init_scale = 1.0;
  DimensionCut cut = {};
};

TensorId AddTensor(ModelInventory& inventory, TensorArgs args) {
  TensorSpec tensor;
  tensor.name = std::move(args.name);
  tensor.shape = std::move(args.shape);
  tensor.unit = args.unit;
  tensor.decay = tensor.shape.size() > 1;
  tensor.init = args.init;
  tensor.init_scale = args.init_scale;
  tensor.cut = args.cut;
  tensor.cut.ranks = inventory.cut.degree;
  const TensorId id = inventory.tensors.Add(std::move(tensor));
  inventory.units[args.unit].tensors.push_back(id);
  return id;
}

UnitId AddUnit(ModelInventory& inventory, std::string name, UnitKind kind, int layer) {
  UnitSpec unit;
  unit.name = std::move(name);
  unit.kind = kind;
  unit.layer = layer;
  return inventory.units.Add(std::move(unit));
}

// Fuses tensors of equal row length whose sizes keep every part aligned, also of the finest cut:
// what is one bundle on one rank is one on T.
void AddBundle(ModelInventory& inventory, std::string name, std::vector<TensorId> tensors) {
  for (const TensorId tensor : tensors) {
    TensorSpec finest = inventory.tensors[tensor];
    finest.cut = CutInto(finest.cut, inventory.cut.parts);
    const bool shared = finest.cut.copies > 1;  // gradients are sums of ranks
    if (shared || ItemElements(finest) % kLayoutAlignmentElements != 0) {
      return;
    }
  }
  const BundleId bundle = inventory.bundles.end_id();
  for (const TensorId tensor : tensors) {
    inventory.tensors[tensor].bundle = bundle;
  }
  inventory.bundles.push_back({.name = std::move(name), .tensors = std::move(tensors)});
}

// Not cut. Its gradient is an addend of each rank that sees other tokens than the next.
DimensionCut SumOfTokens(const ModelInventory& inventory) {
  return {.partial_gradient = inventory.cut.degree > 1 && inventory.cut.sequence};
}

// Weight and, where the architecture has it, bias.
void AddNorm(ModelInventory& inventory, UnitId unit, const std::string& name, NormKind kind) {
  const Shape shape = {inventory.config.hidden_size};
  const DimensionCut cut = SumOfTokens(inventory);
  AddTensor(inventory, {name + ".weight", shape, unit, InitKind::kOnes, 1.0, cut});
  if (kind == NormKind::kLayer) {
    AddTensor(inventory, {name + ".bias", shape, unit, InitKind::kZeros, 1.0, cut});
  }
}

// kColumn: the tensor axis cuts the outputs of each part. kRow: the inputs; the bias is added once.
enum class LinearCut { kColumn, kRow };

struct LinearArgs {
  const LinearNames& names;
  std::string prefix = {};  // of each name
  UnitId unit = 0;
  int64_t inputs = 0;
  std::vector<int64_t> outputs = {};  // of each part: q, k, v
  double init_scale = 1.0;
  std::string bundle = {};  // name of the bundle that several make
  LinearCut cut = LinearCut::kColumn;
  std::vector<int64_t> heads = {};  // of each part, or none
};

// The cut of the outputs of name i, which lie along dimension `dim`.
DimensionCut ColumnCut(const ModelInventory& inventory, const LinearArgs& args, size_t i, int dim) {
  DimensionCut cut = {.dim = dim};
  const bool fused = args.names.names.size() != args.outputs.size();
  if (!args.heads.empty()) {
    cut.heads = args.heads[i];
  }
  if (fused) {
    CHECK(args.outputs.size() <= cut.parts.size());
    std::copy(args.outputs.begin(), args.outputs.end(), cut.parts.begin());
  }
  cut = CutInto(cut, inventory.cut.degree);
  cut.partial_gradient = cut.copies > 1;
  return cut;
}

// Columns of the parts of a map that reads one input: all in one matrix where it is fused.
std::vector<int64_t> PartSizes(const LinearNames& names, std::vector<int64_t> parts) {
  return names.names.size() == parts.size()
             ? std::move(parts)
             : std::vector<int64_t>{std::accumulate(parts.begin(), parts.end(), int64_t{0})};
}

void AddLinear(ModelInventory& inventory, const Architecture& architecture, LinearArgs args) {
  const std::vector<int64_t> outputs = PartSizes(args.names, args.outputs);
  CHECK_EQ(args.names.names.size(), outputs.size());
  const bool output_first = architecture.layout == MatrixLayout::kOutputInput;
  std::vector<TensorId> weights;
  for (size_t i = 0; i < outputs.size(); ++i) {
    const std::string name = absl::StrCat(args.prefix, std::string(args.names.names[i]));
    const Shape shape =
        output_first ? Shape{outputs[i], args.inputs} : Shape{args.inputs, outputs[i]};
    const bool column = args.cut == LinearCut::kColumn;
    const DimensionCut cut = column ? ColumnCut(inventory, args, i, output_first ? 0 : 1)
                                    : DimensionCut{.dim = output_first ? 1 : 0};
    weights.push_back(AddTensor(
        inventory, {name + ".weight", shape, args.unit, InitKind::kNormal, args.init_scale, cut}));
    if (args.names.bias) {
      const DimensionCut of_bias =
          column ? ColumnCut(inventory, args, i, 0) : SumOfTokens(inventory);
      AddTensor(inventory,
                {name + ".bias", {outputs[i]}, args.unit, InitKind::kZeros, 1.0, of_bias});
    }
  }
  if (weights.size() > 1) {
    AddBundle(inventory, absl::StrCat(args.prefix, args.bundle), std::move(weights));
  }
}

void AddLayerTensors(ModelInventory& inventory, const Architecture& architecture, UnitId unit) {
  const ModelConfig& config = inventory.config;
  const int64_t hidden = config.hidden_size;
  const int64_t inner = config.intermediate_size;
  const int64_t query = config.num_attention_heads * config.head_dim;
  const int64_t key_value = config.num_key_value_heads * config.head_dim;
  const std::string prefix =
      absl::StrCat(std::string(architecture.layers), ".", inventory.units[unit].layer, ".");
  const double residual_scale =
      architecture.scaled_residual_init
          ? 1.0 / std::sqrt(2.0 * static_cast<double>(config.num_hidden_layers))
          : 1.0;
  const auto linear = [&](LinearArgs args) {
    args.prefix = prefix;
    args.unit = unit;
    AddLinear(inventory, architecture, std::move(args));
  };
  AddNorm(inventory, unit, prefix + std::string(architecture.attention_norm), architecture.norm);
  linear({.names = architecture.qkv,
          .inputs = hidden,
          .outputs = {query, key_value, key_value},
          .bundle = "self_attn.qkv",
          .heads = {
              config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads}});
  linear({.names = architecture.attention_output,
          .inputs = query,
          .outputs = {hidden},
          .init_scale = residual_scale,
          .cut = LinearCut::kRow});
  for (const std::string_view norm : {architecture.query_norm, architecture.key_norm}) {
    if (!norm.empty()) {
      AddTensor(inventory,
                {absl::StrCat(prefix, std::string(norm), ".weight"),
                 {config.head_dim},
                 unit,
                 InitKind::kOnes,
                 1.0,
                 {.partial_gradient = inventory.cut.degree > 1}});
    }
  }
  AddNorm(inventory, unit, prefix + std::string(architecture.mlp_norm), architecture.norm);
  linear({.names = architecture.mlp_input,
          .inputs = hidden,
          .outputs = std::vector<int64_t>(architecture.mlp == MlpKind::kSwiGlu ? 2 : 1, inner),
          .bundle = "mlp.gate_up"});
  linear({.names = architecture.mlp_output,
          .inputs = inner,
          .outputs = {hidden},
          .init_scale = residual_scale,
          .cut = LinearCut::kRow});
}

// Every layer runs twice in a row.
void RepeatLayers(ModelInventory& inventory) {
  for (const UnitId unit : inventory.units.ids()) {
    const bool layer = inventory.units[unit].kind == UnitKind::kLayer;
    inventory.order.insert(inventory.order.end(), layer ? 2 : 1, unit);
  }
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

std::vector<UnitId> ModelInventory::calls() const {
  if (!order.empty()) {
    return order;
  }
  std::vector<UnitId> each;
  for (const UnitId unit : units.ids()) {
    each.push_back(unit);
  }
  return each;
}

TensorId ModelInventory::FindTensor(std::string_view name) const {
  for (const TensorId id : tensors.ids()) {
    if (tensors[id].name == name) {
      return id;
    }
  }
  return {};
}

ModelInventory BuildInventory(const ModelConfig& config,
                              const MicroBatchShape& micro_batch,
                              RecomputePolicy recompute,
                              const TensorCut& axis) {
  const Architecture& architecture = ArchitectureOf(config.architecture);
  ModelInventory inventory;
  inventory.config = config;
  inventory.cut = axis;
  const auto add_matrix =
      [&](std::string_view name, int64_t rows, UnitId unit, const DimensionCut& cut) {
        return AddTensor(inventory,
                         {std::string(name) + ".weight",
                          {rows, config.hidden_size},
                          unit,
                          InitKind::kNormal,
                          1.0,
                          cut});
      };
  const DimensionCut vocabulary = VocabularyCut(config.vocab_size, axis);
  const UnitId embed = AddUnit(inventory, "embed", UnitKind::kEmbedding, -1);
  const TensorId table = add_matrix(architecture.token_table, config.vocab_size, embed, vocabulary);
  if (architecture.positions == PositionKind::kLearned) {
    const UnitId positions = AddUnit(inventory, "positions", UnitKind::kPositions, -1);
    add_matrix(architecture.position_table, config.max_position_embeddings, positions, {});
  }
  for (int64_t layer = 0; layer < config.num_hidden_layers; ++layer) {
    const UnitId unit = AddUnit(
        inventory, absl::StrCat("layers.", layer), UnitKind::kLayer, static_cast<int>(layer));
    AddLayerTensors(inventory, architecture, unit);
  }
  const UnitId head = AddUnit(inventory, "head", UnitKind::kHead, -1);
  AddNorm(inventory, head, std::string(architecture.final_norm), architecture.norm);
  if (config.tie_word_embeddings) {
    inventory.units[head].borrowed = {table};
  } else {
    add_matrix(architecture.head, config.vocab_size, head, vocabulary);
  }
  if (config.layer_sharing) {
    RepeatLayers(inventory);
  }
  AddActivations(inventory, micro_batch, recompute);
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

double TrainingFlopsPerToken(const ModelConfig& config,
                             int64_t sequence_tokens,
                             double layer_drop) {
  const ModelInventory inventory = BuildInventory(config, {.sequences = 1, .sequence_tokens = 1});
  const double layer_calls = (config.layer_sharing ? 2.0 : 1.0) * (1.0 - layer_drop);
  int64_t multiplied = 0;  // elements outside layers that tokens are multiplied with
  int64_t in_layers = 0;
  for (const UnitSpec& unit : inventory.units) {
    const bool looked_up = unit.kind == UnitKind::kPositions ||
                           (unit.kind == UnitKind::kEmbedding && !config.tie_word_embeddings);
    for (const TensorId tensor : unit.tensors) {
      const int64_t elements = ElementCount(inventory.tensors[tensor].shape);
      (unit.kind == UnitKind::kLayer ? in_layers : multiplied) += looked_up ? 0 : elements;
    }
  }
  const auto attended = static_cast<double>(config.num_hidden_layers * config.num_attention_heads *
                                            config.head_dim * sequence_tokens);
  return 6.0 * static_cast<double>(multiplied) +
         6.0 * layer_calls * (static_cast<double>(in_layers) + attended);
}

void MakeLayersOptional(ModelInventory& inventory) {
  for (UnitSpec& unit : inventory.units) {
    unit.optional = unit.kind == UnitKind::kLayer;
  }
}

}  // namespace ravel::plan
