#include "common/model/tensor_parts.h"

#include <algorithm>
#include <bit>
#include <string>
#include <string_view>
#include <utility>

#include <absl/strings/str_cat.h>

#include "common/check.h"
#include "common/field_error.h"
#include "common/model/architecture/architecture.h"

namespace ravel::plan {
namespace {

constexpr char kField[] = "determinism.tensorParts";

// The first layer's tensor of a name without ".weight".
std::string InLayer(const Architecture& architecture, std::string_view name) {
  return absl::StrCat(std::string(architecture.layers), ".0.", std::string(name), ".weight");
}

absl::Status Refuse(std::string expected, int64_t parts) {
  return FieldRefusal(kField, std::move(expected), absl::StrCat(parts));
}

// Leaves of a tensor's gradient: their number, and the elements of each.
struct LeafShape {
  int64_t count = 1;
  int64_t elements = 0;
};

class LeafRules {
 public:
  explicit LeafRules(const ModelInventory& inventory)
      : inventory_(inventory),
        architecture_(ArchitectureOf(inventory.config.architecture)),
        sizes_(LocalSizesOf(inventory.config, inventory.cut)) {}

  LeafShape Of(const UnitSpec& unit, const TensorSpec& tensor) const {
    const auto named = [&](std::string_view name) { return Named(unit, tensor.name, name); };
    const auto any_of = [&](const LinearNames& names, size_t first) {
      return std::any_of(
          names.names.begin() + static_cast<std::ptrdiff_t>(std::min(first, names.names.size())),
          names.names.end(),
          named);
    };
    const int64_t all = ElementCount(tensor.shape);
    const bool bias = tensor.name.ends_with(".bias");
    const bool row_bias =
        bias && (any_of(architecture_.attention_output, 0) || any_of(architecture_.mlp_output, 0));
    if (row_bias || named(architecture_.attention_norm) || named(architecture_.mlp_norm) ||
        named(architecture_.final_norm)) {
      return {inventory_.cut.token_blocks(), all};
    }
    if (named(architecture_.query_norm) || named(architecture_.key_norm)) {
      return {inventory_.cut.local_parts(), all};
    }
    if (sizes_.kv_sharing > 1 && any_of(architecture_.qkv, 1)) {
      return {sizes_.kv_slots, all / inventory_.config.num_key_value_heads};
    }
    return {};
  }

 private:
  // "LAYERS.i.NAME.weight" of a layer, "NAME.weight" elsewhere.
  bool Named(const UnitSpec& unit, const std::string& tensor, std::string_view name) const {
    if (name.empty()) {
      return false;
    }
    const std::string prefix =
        unit.kind == UnitKind::kLayer
            ? absl::StrCat(std::string(architecture_.layers), ".", unit.layer, ".")
            : std::string();
    return tensor.starts_with(absl::StrCat(prefix, std::string(name), "."));
  }

  const ModelInventory& inventory_;
  const Architecture& architecture_;
  const LocalSizes sizes_;
};

int64_t NodesOf(const TensorCut& cut) {
  return static_cast<int64_t>(std::bit_width(static_cast<uint64_t>(cut.local_parts())));
}

int64_t RowsOfActivation(const std::vector<ActivationSpec>& specs, std::string_view name) {
  for (const ActivationSpec& spec : specs) {
    if (spec.name == name) {
      return spec.shape[0];
    }
  }
  CheckFailed(__FILE__, __LINE__, "activation", "the inventory lacks an activation");
}

void ReserveScratch(const ModelInventory& inventory, UnitSpec& unit) {
  const int64_t nodes = NodesOf(inventory.cut);
  const int64_t hidden = inventory.config.hidden_size;
  if (unit.kind == UnitKind::kLayer) {
    const int64_t tokens = RowsOfActivation(unit.workspace, "d_a");
    unit.workspace.push_back({"parts", {nodes * tokens, hidden}});
  } else if (unit.kind == UnitKind::kHead) {
    const int64_t chunk = RowsOfActivation(unit.workspace, "logits");
    unit.workspace.push_back({"parts", {nodes * chunk, hidden}});
    unit.workspace.push_back({"vocabulary", {3 * inventory.cut.parts, chunk}});
  }
}

}  // namespace

LocalSizes LocalSizesOf(const ModelConfig& config, const TensorCut& cut) {
  const int64_t kv_heads = config.num_key_value_heads;
  LocalSizes sizes;
  sizes.query_heads = config.num_attention_heads / cut.degree;
  sizes.kv_heads = std::max<int64_t>(1, kv_heads / cut.degree);
  const int64_t sharing = std::max<int64_t>(1, cut.parts / kv_heads);
  sizes.kv_sharing = std::min(sharing, cut.local_parts());
  sizes.kv_slots = sizes.kv_heads * sizes.kv_sharing;
  sizes.inner = config.intermediate_size / cut.degree;
  const int64_t first = cut.first_part();
  sizes.first_row = VocabularyBlockOf(cut, config.vocab_size, first).first;
  for (int64_t part = first; part < first + cut.local_parts(); ++part) {
    sizes.vocabulary_rows += VocabularyBlockOf(cut, config.vocab_size, part).rows;
  }
  return sizes;
}

VocabularyBlock VocabularyBlockOf(const TensorCut& cut, int64_t vocabulary, int64_t part) {
  if (!cut.cuts()) {
    return {.first = 0, .rows = vocabulary};
  }
  constexpr int64_t kRows = 8;
  const int64_t rows = RoundUp(DivCeil(vocabulary, cut.parts), kRows);
  const int64_t first = std::min(part * rows, vocabulary);
  return {.first = first, .rows = std::min(rows, vocabulary - first)};
}

absl::Status CheckTensorParts(int64_t parts,
                              const ModelConfig& config,
                              const MicroBatchShape& micro_batch) {
  if (parts < 1 || parts > kMostTensorParts || !std::has_single_bit(static_cast<uint64_t>(parts))) {
    return Refuse(absl::StrCat("a power of two up to ", kMostTensorParts), parts);
  }
  const Architecture& architecture = ArchitectureOf(config.architecture);
  const auto last = [&](const LinearNames& names) {
    return InLayer(architecture, names.names.back());
  };
  if (config.num_attention_heads % parts != 0) {
    return Refuse(absl::StrCat("a divisor of the ",
                               config.num_attention_heads,
                               " query heads, which ",
                               last(architecture.attention_output),
                               " reads"),
                  parts);
  }
  const int64_t kv_heads = config.num_key_value_heads;
  if (kv_heads % parts != 0 && parts % kv_heads != 0) {
    return Refuse(
        absl::StrCat(
            "a divisor or a multiple of the ", kv_heads, " key heads of ", last(architecture.qkv)),
        parts);
  }
  if (config.intermediate_size % parts != 0) {
    return Refuse(absl::StrCat("a divisor of the ",
                               config.intermediate_size,
                               " inputs of ",
                               last(architecture.mlp_output)),
                  parts);
  }
  const int64_t tokens = micro_batch.sequences * micro_batch.sequence_tokens;
  if (tokens % parts != 0) {
    return Refuse(absl::StrCat("a divisor of the ",
                               tokens,
                               " tokens of a micro-batch, which ",
                               InLayer(architecture, architecture.attention_norm),
                               " sums in equal blocks"),
                  parts);
  }
  return absl::OkStatus();
}

int64_t ColumnBlocksOf(const ModelInventory& inventory, TensorId tensor) {
  const TensorSpec& spec = inventory.tensors[tensor];
  const Architecture& architecture = ArchitectureOf(inventory.config.architecture);
  if (!inventory.cut.cuts() || spec.shape.size() < 2 ||
      inventory.units[spec.unit].kind != UnitKind::kLayer) {
    return 1;
  }
  const auto is = [&](const LinearNames& names) {
    return std::any_of(names.names.begin(), names.names.end(), [&](std::string_view name) {
      return spec.name.ends_with(absl::StrCat(".", std::string(name), ".weight"));
    });
  };
  if (architecture.layout == MatrixLayout::kOutputInput) {
    const bool row_layer = is(architecture.attention_output) || is(architecture.mlp_output);
    return row_layer ? inventory.cut.parts : 1;
  }
  constexpr int64_t kFused = 3;  // q, k and v, of one size where they are fused
  return is(architecture.qkv)         ? kFused * inventory.cut.parts
         : is(architecture.mlp_input) ? inventory.cut.parts
                                      : 1;
}

void ReserveTensorParts(ModelInventory& inventory) {
  if (!inventory.cut.cuts()) {
    return;
  }
  const LeafRules rules(inventory);
  for (UnitSpec& unit : inventory.units) {
    ReserveScratch(inventory, unit);
    for (const TensorId id : unit.tensors) {
      const TensorSpec& tensor = inventory.tensors[id];
      const LeafShape leaf = rules.Of(unit, tensor);
      if (tensor.trainable && leaf.count > 1) {
        unit.leaves.push_back({tensor.name, {leaf.count, leaf.elements}});
      }
    }
  }
}

}  // namespace ravel::plan
