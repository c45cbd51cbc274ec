#include "worker/model/layer.h"

#include <cmath>

#include "common/check.h"
#include "kernels/activation.h"
#include "kernels/attention.h"
#include "kernels/norm.h"
#include "kernels/rope.h"

namespace ravel::model {
namespace {

using kernels::Output;
using kernels::Stream;

// The first rows x columns elements of a workspace as a matrix.
TensorView Carve(const TensorView& workspace, int64_t rows, int64_t columns) {
  CHECK(workspace.contiguous() && workspace.elements() >= rows * columns);
  return MatrixView(workspace.As<float>(), rows, columns);
}

size_t WeightIndex(const plan::ModelInventory& inventory, int unit, std::string_view suffix) {
  const std::vector<int>& tensors = inventory.units[static_cast<size_t>(unit)].tensors;
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (inventory.tensors[static_cast<size_t>(tensors[i])].name.ends_with(suffix)) {
      return i;
    }
  }
  CheckFailed(__FILE__, __LINE__, "tensor of layer", "the inventory lacks a tensor of the module");
}

struct AttentionParts {
  TensorView q;
  TensorView k;
  TensorView v;
};

AttentionParts SplitHeads(const plan::ModelConfig& config, const TensorView& qkv) {
  const int64_t query = config.num_attention_heads * config.head_dim;
  const int64_t key_value = config.num_key_value_heads * config.head_dim;
  return {.q = ColumnsOf(qkv, 0, query),
          .k = ColumnsOf(qkv, query, key_value),
          .v = ColumnsOf(qkv, query + key_value, key_value)};
}

kernels::AttentionShape ShapeOf(const plan::ModelConfig& config,
                                const plan::MicroBatchShape& micro_batch) {
  return {.sequence_tokens = micro_batch.sequence_tokens,
          .query_heads = config.num_attention_heads,
          .kv_heads = config.num_key_value_heads,
          .head_size = config.head_dim,
          .scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(config.head_dim)))};
}

}  // namespace

struct LayerModule::Views {
  int64_t tokens = 0;
  TensorView norm0, norm1;
  TensorView x0, rstd0, n0, qkv, att, lse, x1, rstd1, n1, gate, up, gate_up;
  TensorView inner, d_inner;  // [tokens, intermediate]: silu(gate) * up and its gradient
  TensorView d_qkv, d_att;    // later in backward, in the memory of the two above
  TensorView d_normed;        // [tokens, hidden]: gradient of n0 or n1
  TensorView scratch;
  TensorView hidden, dhidden, rope_cos, rope_sin;
};

LayerModule::LayerModule(const plan::ModelInventory& inventory,
                         int unit,
                         const plan::MicroBatchShape& micro_batch)
    : config_(inventory.config), micro_batch_(micro_batch) {
  const plan::UnitSpec& spec = inventory.units[static_cast<size_t>(unit)];
  const auto saved = [&](std::string_view name) { return ActivationIndex(spec.saved, name); };
  const auto work = [&](std::string_view name) { return ActivationIndex(spec.workspace, name); };
  const auto shared = [&](std::string_view name) {
    return ActivationIndex(inventory.shared, name);
  };
  slots_ = {.norm0 = WeightIndex(inventory, unit, "input_layernorm.weight"),
            .norm1 = WeightIndex(inventory, unit, "post_attention_layernorm.weight"),
            .x0 = saved("x0"),
            .rstd0 = saved("rstd0"),
            .n0 = saved("n0"),
            .qkv = saved("qkv"),
            .att = saved("att"),
            .lse = saved("lse"),
            .x1 = saved("x1"),
            .rstd1 = saved("rstd1"),
            .n1 = saved("n1"),
            .gate_up = saved("mlp_in"),
            .inner = work("d_a"),
            .inner_gradient = work("d_b"),
            .hidden_gradient = work("d_c"),
            .scratch = work("scratch"),
            .hidden = shared("hidden"),
            .dhidden = shared("dhidden"),
            .rope_cos = shared("rope_cos"),
            .rope_sin = shared("rope_sin")};
  qkv_ = Projection(inventory, spec.tensors, {"q_proj.weight", "k_proj.weight", "v_proj.weight"});
  output_ = Projection(inventory, spec.tensors, {"o_proj.weight"});
  gate_up_ = Projection(inventory, spec.tensors, {"gate_proj.weight", "up_proj.weight"});
  down_ = Projection(inventory, spec.tensors, {"down_proj.weight"});
}

LayerModule::Views LayerModule::Bind(const UnitMemory& memory) const {
  Views v;
  v.hidden = memory.shared[slots_.hidden];
  v.dhidden = memory.shared[slots_.dhidden];
  v.tokens = v.hidden.size[0];
  v.norm0 = memory.weights[slots_.norm0];
  v.norm1 = memory.weights[slots_.norm1];
  v.x0 = memory.saved[slots_.x0];
  v.rstd0 = memory.saved[slots_.rstd0];
  v.n0 = memory.saved[slots_.n0];
  v.qkv = memory.saved[slots_.qkv];
  v.att = memory.saved[slots_.att];
  v.lse = memory.saved[slots_.lse];
  v.x1 = memory.saved[slots_.x1];
  v.rstd1 = memory.saved[slots_.rstd1];
  v.n1 = memory.saved[slots_.n1];
  v.gate_up = memory.saved[slots_.gate_up];
  v.gate = ColumnsOf(v.gate_up, 0, config_.intermediate_size);
  v.up = ColumnsOf(v.gate_up, config_.intermediate_size, config_.intermediate_size);
  const TensorView& work_a = memory.workspace[slots_.inner];
  const TensorView& work_b = memory.workspace[slots_.inner_gradient];
  v.inner = Carve(work_a, v.tokens, config_.intermediate_size);
  v.d_inner = Carve(work_b, v.tokens, config_.intermediate_size);
  v.d_qkv = Carve(work_a, v.tokens, v.qkv.size[1]);
  v.d_att = Carve(work_b, v.tokens, v.att.size[1]);
  v.d_normed = memory.workspace[slots_.hidden_gradient];
  v.scratch = memory.workspace[slots_.scratch];
  v.rope_cos = memory.shared[slots_.rope_cos];
  v.rope_sin = memory.shared[slots_.rope_sin];
  return v;
}

void LayerModule::RotateQueriesAndKeys(Stream& stream,
                                       const Views& v,
                                       const TensorView& qkv,
                                       bool forward) const {
  // Queries and keys lie side by side and rotate alike, head by head.
  const int64_t columns =
      (config_.num_attention_heads + config_.num_key_value_heads) * config_.head_dim;
  kernels::Rope(stream,
                {.x = ColumnsOf(qkv, 0, columns),
                 .head_size = config_.head_dim,
                 .sequence_tokens = micro_batch_.sequence_tokens,
                 .cosine = v.rope_cos,
                 .sine = v.rope_sin,
                 .direction = forward ? kernels::RopeDirection::kForward
                                      : kernels::RopeDirection::kBackward});
}

void LayerModule::ForwardAttention(Stream& stream, const UnitMemory& memory, const Views& v) const {
  kernels::RmsNormForward(stream,
                          {.x = v.hidden,
                           .residual = {},
                           .w = v.norm0,
                           .epsilon = static_cast<float>(config_.rms_norm_eps),
                           .sum = v.x0,
                           .y = v.n0,
                           .rstd = v.rstd0});
  qkv_.Forward(stream, {.memory = memory, .x = v.n0, .y = v.qkv});
  RotateQueriesAndKeys(stream, v, v.qkv, true);
  const AttentionParts parts = SplitHeads(config_, v.qkv);
  kernels::AttentionForward(stream,
                            {.shape = ShapeOf(config_, micro_batch_),
                             .q = parts.q,
                             .k = parts.k,
                             .v = parts.v,
                             .out = v.att,
                             .log_sum_exp = v.lse,
                             .workspace = v.scratch});
  output_.Forward(stream,
                  {.memory = memory, .x = v.att, .y = v.hidden, .output = Output::kAccumulate});
}

void LayerModule::ForwardMlp(Stream& stream, const UnitMemory& memory, const Views& v) const {
  kernels::RmsNormForward(stream,
                          {.x = v.hidden,
                           .residual = {},
                           .w = v.norm1,
                           .epsilon = static_cast<float>(config_.rms_norm_eps),
                           .sum = v.x1,
                           .y = v.n1,
                           .rstd = v.rstd1});
  gate_up_.Forward(stream, {.memory = memory, .x = v.n1, .y = v.gate_up});
  kernels::SwiGluForward(stream, {.gate = v.gate, .up = v.up, .y = v.inner});
  down_.Forward(stream,
                {.memory = memory, .x = v.inner, .y = v.hidden, .output = Output::kAccumulate});
}

void LayerModule::Forward(Stream& stream, const UnitMemory& memory) const {
  const Views v = Bind(memory);
  ForwardAttention(stream, memory, v);
  ForwardMlp(stream, memory, v);
}

void LayerModule::ForwardOnly(Stream& stream, const UnitMemory& memory) const {
  Forward(stream, memory);
}

template <typename Gradient>
void LayerModule::BackwardMlp(Stream& stream,
                              const UnitMemory& memory,
                              const Views& v,
                              const std::vector<Gradient>& gradients) const {
  down_.InputGradient(stream, {.memory = memory, .dy = v.dhidden, .dx = v.d_inner});
  kernels::SwiGluBackward(
      stream,
      {.gate = v.gate, .up = v.up, .dy = v.d_inner, .dgate = v.gate, .dup = v.up, .y = v.inner});
  down_.WeightGradient(stream, v.inner, v.dhidden, gradients);
  gate_up_.InputGradient(stream, {.memory = memory, .dy = v.gate_up, .dx = v.d_normed});
  gate_up_.WeightGradient(stream, v.n1, v.gate_up, gradients);
  kernels::RmsNormBackward(stream,
                           {.dy = v.d_normed,
                            .sum = v.x1,
                            .w = v.norm1,
                            .rstd = v.rstd1,
                            .dresidual = v.dhidden,
                            .dx = v.dhidden,
                            .dw = gradients[slots_.norm1].view,
                            .dw_output = Gradient::kOutput});
}

template <typename Gradient>
void LayerModule::BackwardAttention(Stream& stream,
                                    const UnitMemory& memory,
                                    const Views& v,
                                    const std::vector<Gradient>& gradients) const {
  output_.InputGradient(stream, {.memory = memory, .dy = v.dhidden, .dx = v.d_att});
  output_.WeightGradient(stream, v.att, v.dhidden, gradients);
  const AttentionParts parts = SplitHeads(config_, v.qkv);
  const AttentionParts d_parts = SplitHeads(config_, v.d_qkv);
  kernels::AttentionBackward(stream,
                             {.shape = ShapeOf(config_, micro_batch_),
                              .q = parts.q,
                              .k = parts.k,
                              .v = parts.v,
                              .out = v.att,
                              .log_sum_exp = v.lse,
                              .dout = v.d_att,
                              .dq = d_parts.q,
                              .dk = d_parts.k,
                              .dv = d_parts.v,
                              .workspace = v.scratch});
  RotateQueriesAndKeys(stream, v, v.d_qkv, false);
  qkv_.InputGradient(stream, {.memory = memory, .dy = v.d_qkv, .dx = v.d_normed});
  qkv_.WeightGradient(stream, v.n0, v.d_qkv, gradients);
  kernels::RmsNormBackward(stream,
                           {.dy = v.d_normed,
                            .sum = v.x0,
                            .w = v.norm0,
                            .rstd = v.rstd0,
                            .dresidual = v.dhidden,
                            .dx = v.dhidden,
                            .dw = gradients[slots_.norm0].view,
                            .dw_output = Gradient::kOutput});
}

void LayerModule::Backward(Stream& stream,
                           const UnitMemory& memory,
                           const std::vector<FreshGradient>& gradients) const {
  const Views v = Bind(memory);
  BackwardMlp(stream, memory, v, gradients);
  BackwardAttention(stream, memory, v, gradients);
}

void LayerModule::Backward(Stream& stream,
                           const UnitMemory& memory,
                           const std::vector<AccumulatingGradient>& gradients) const {
  const Views v = Bind(memory);
  BackwardMlp(stream, memory, v, gradients);
  BackwardAttention(stream, memory, v, gradients);
}

}  // namespace ravel::model
