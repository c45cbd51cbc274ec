// Lists the activations that each unit of a model keeps for its backward, those that it recomputes
// there, and the scratch memory that it needs while it runs. The names are those by which
// worker/model asks for them.

#include "common/model/model_activations.h"

#include <algorithm>
#include <utility>

#include "common/check.h"
#include "common/model/architecture/architecture.h"

namespace ravel::plan {
namespace {

bool IsRemade(const ActivationSpec& spec, RecomputePolicy recompute) {
  return spec.remade_from != RecomputePolicy::kNone && recompute >= spec.remade_from;
}

void Sort(std::vector<ActivationSpec> specs, RecomputePolicy recompute, UnitSpec& unit) {
  for (ActivationSpec& spec : specs) {
    (IsRemade(spec, recompute) ? unit.remade : unit.saved).push_back(std::move(spec));
  }
}

// Row statistics and result of a norm of [tokens, hidden].
std::vector<ActivationSpec> NormSpecs(const Architecture& architecture,
                                      const std::string& index,
                                      int64_t tokens,
                                      int64_t hidden) {
  std::vector<ActivationSpec> specs;
  if (architecture.norm == NormKind::kLayer) {
    specs.push_back({"mean" + index, {tokens}, DType::kF32, RecomputePolicy::kBlock});
  }
  specs.push_back({"rstd" + index, {tokens}, DType::kF32, RecomputePolicy::kBlock});
  specs.push_back({"n" + index, {tokens, hidden}, DType::kF32, RecomputePolicy::kNorm});
  return specs;
}

void Append(std::vector<ActivationSpec> from, std::vector<ActivationSpec>& to) {
  to.insert(to.end(), from.begin(), from.end());
}

struct LayerWidths {
  int64_t heads = 0;
  int64_t query = 0;
  int64_t key_value = 0;
  int64_t qkv = 0;
  int64_t d_qkv = 0;  // gradients of qkv
  int64_t inner = 0;
  int64_t mlp_in = 0;  // gate and up, or up alone
  int64_t stream = 0;  // tokens of the residual stream that a rank has between products
};

LayerWidths WidthsOf(const ModelConfig& config, const TensorCut& cut, int64_t tokens) {
  const Architecture& architecture = ArchitectureOf(config.architecture);
  const LocalSizes sizes = LocalSizesOf(config, cut);
  LayerWidths widths;
  widths.heads = sizes.query_heads;
  widths.query = sizes.query_heads * config.head_dim;
  widths.key_value = sizes.kv_heads * config.head_dim;
  widths.qkv = widths.query + 2 * widths.key_value;
  widths.d_qkv = widths.query + 2 * sizes.kv_slots * config.head_dim;
  widths.inner = sizes.inner;
  widths.mlp_in = (architecture.mlp == MlpKind::kSwiGlu ? 2 : 1) * sizes.inner;
  widths.stream = cut.stream_tokens(tokens);
  return widths;
}

// Attention statistics: a row per sequence and query head.
ActivationSpec StatisticsSpec(const LayerWidths& widths, const MicroBatchShape& shape) {
  return {"lse",
          {shape.sequences * widths.heads, shape.sequence_tokens},
          DType::kF32,
          RecomputePolicy::kBlock};
}

void AddLayerSaved(const ModelConfig& config,
                   const LayerWidths& widths,
                   const MicroBatchShape& shape,
                   RecomputePolicy recompute,
                   UnitSpec& unit) {
  const Architecture& architecture = ArchitectureOf(config.architecture);
  const int64_t tokens = shape.sequences * shape.sequence_tokens;
  const int64_t stream = widths.stream;
  const int64_t hidden = config.hidden_size;
  constexpr DType kType = DType::kF32;
  std::vector<ActivationSpec> specs = {{"x0", {stream, hidden}}};
  Append(NormSpecs(architecture, "0", stream, hidden), specs);
  specs.push_back({"qkv", {tokens, widths.qkv}, kType, RecomputePolicy::kBlock});
  if (!architecture.query_norm.empty()) {
    // Queries and keys after their norm and their rotation; qkv has them before.
    const int64_t columns = widths.query + widths.key_value;
    specs.push_back({"qk", {tokens, columns}, kType, RecomputePolicy::kNorm});
  }
  specs.push_back({"att", {tokens, widths.query}, kType, RecomputePolicy::kBlock});
  specs.push_back(StatisticsSpec(widths, shape));
  specs.push_back({"x1", {stream, hidden}, kType, RecomputePolicy::kBlock});
  Append(NormSpecs(architecture, "1", stream, hidden), specs);
  specs.push_back({"mlp_in", {tokens, widths.mlp_in}, kType, RecomputePolicy::kMlp});
  Sort(std::move(specs), recompute, unit);
}

// Products read these where ranks have their own tokens alone between them: the norm's result and
// the gradient of the residual stream, of all tokens.
std::vector<ActivationSpec> GatheredSpecs(int64_t tokens, int64_t hidden) {
  return {{"n_all", {tokens, hidden}}, {"dy_all", {tokens, hidden}}};
}

// Areas that parts of a layer use one after another. Forward: d_a qkv, or queries and keys after
// their norm, or the inner activation; d_b att or mlp_in; d_c n0 or n1; each only where it is not
// kept. Backward: d_a the inner activation, then d_qkv; d_b its gradient, then d_att; d_c that of
// n1, then n0.
void AddLayerWorkspace(const ModelConfig& config,
                       const LayerWidths& widths,
                       const MicroBatchShape& shape,
                       RecomputePolicy recompute,
                       UnitSpec& unit) {
  const int64_t tokens = shape.sequences * shape.sequence_tokens;
  const int64_t inner = widths.inner;
  const int64_t forward_mlp = recompute >= RecomputePolicy::kMlp ? widths.mlp_in : 0;
  unit.workspace = {
      {"d_a", {tokens, std::max(inner, widths.d_qkv)}},
      {"d_b", {tokens, std::max({inner, widths.query, forward_mlp})}},
      {"d_c", {widths.stream, config.hidden_size}},
      {"scratch", {AttentionScratchElements(shape.sequence_tokens, config.head_dim)}},
  };
  if (recompute >= RecomputePolicy::kBlock) {
    unit.workspace.push_back({"mean", {widths.stream}});
    unit.workspace.push_back({"rstd", {widths.stream}});
    unit.workspace.push_back({"lse", StatisticsSpec(widths, shape).shape});
  }
  if (widths.stream < tokens) {
    Append(GatheredSpecs(tokens, config.hidden_size), unit.workspace);
  }
}

// Nothing of the head is recomputed: its two passes follow each other. Its input is not copied:
// nothing writes the shared "hidden" between them.
void AddHeadActivations(const ModelConfig& config,
                        const TensorCut& cut,
                        int64_t tokens,
                        UnitSpec& unit) {
  const Architecture& architecture = ArchitectureOf(config.architecture);
  const int64_t stream = cut.stream_tokens(tokens);
  const int64_t hidden = config.hidden_size;
  // Rows of logits lie alike for all degrees: a device's kernels are chosen by alignment, too.
  constexpr int64_t kStep = 8;
  const int64_t rows = LocalSizesOf(config, cut).vocabulary_rows;
  const int64_t vocabulary_rows = cut.cuts() ? RoundUp(rows, kStep) : rows;
  Sort(NormSpecs(architecture, "", stream, hidden), RecomputePolicy::kNone, unit);
  unit.workspace = {
      {"logits", {std::min(tokens, kLogitsChunkTokens), vocabulary_rows}},
      {"dn", {stream, hidden}},
  };
  if (stream < tokens) {
    unit.workspace.push_back(GatheredSpecs(tokens, hidden)[0]);
  }
}

}  // namespace

void AddActivations(ModelInventory& inventory,
                    const MicroBatchShape& micro_batch,
                    RecomputePolicy recompute) {
  const ModelConfig& config = inventory.config;
  const int64_t tokens = micro_batch.sequences * micro_batch.sequence_tokens;
  const LayerWidths widths = WidthsOf(config, inventory.cut, tokens);
  for (UnitSpec& unit : inventory.units) {
    if (unit.kind == UnitKind::kLayer) {
      AddLayerSaved(config, widths, micro_batch, recompute, unit);
      AddLayerWorkspace(config, widths, micro_batch, recompute, unit);
    } else if (unit.kind == UnitKind::kHead) {
      AddHeadActivations(config, inventory.cut, tokens, unit);
    } else if (widths.stream < tokens) {
      unit.workspace = {GatheredSpecs(tokens, config.hidden_size)[1]};
    }
  }
  inventory.shared = {
      {"ids", {tokens}, DType::kI32},
      {"targets", {tokens}, DType::kI32},
      {"loss", {tokens}},
      {"hidden", {widths.stream, config.hidden_size}},
      {"dhidden", {widths.stream, config.hidden_size}},
  };
  if (ArchitectureOf(config.architecture).positions == PositionKind::kRotary) {
    inventory.shared.push_back({"rope_cos", {micro_batch.sequence_tokens, config.head_dim / 2}});
    inventory.shared.push_back({"rope_sin", {micro_batch.sequence_tokens, config.head_dim / 2}});
  }
}

}  // namespace ravel::plan
