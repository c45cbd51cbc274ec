// T tokens, h hidden, H query heads, G key heads (H / G query heads share one), d the size of a
// head.
//
//   n = norm(x)                         [T, h]
//   q | k | v = n Wqkv + b              [T, (H + 2 G) d]
//   q, k = rope(headnorm(q, k))         each head by itself; either may be absent
//   P = softmax(q k^T / sqrt(d))        [H, T, T], causal within a sequence; never stored
//   a = P v,  lse = log of the sums     [T, H d], [H, T]
//   y = x + a Wo                        [T, h]
//
// Backward, from dy = dhidden:
//   da = dy Wo^T,  dWo += a^T dy
//   P from q, k, lse again;  dv = P^T da,  dS = P * (da v^T - rowsum(da * a)),
//   dq = dS k / sqrt(d),  dk = dS^T q / sqrt(d);  rope and headnorm undone
//   dn = d(qkv) Wqkv^T,  dWqkv += n^T d(qkv)
//   dx = dy + the norm's input gradient of dn, in place in dhidden

#include "worker/model/attention_block.h"

#include <algorithm>
#include <cmath>

#include "common/check.h"
#include "kernels/norm.h"
#include "kernels/rope.h"

namespace ravel::model {

using kernels::Stream;

namespace {

// Columns that a rank has of q, k and v.
Projection::Members QkvMembersOf(const plan::ModelInventory& inventory) {
  const plan::LocalSizes sizes = plan::LocalSizesOf(inventory.config, inventory.cut);
  const int64_t head_dim = inventory.config.head_dim;
  const int64_t key_value = sizes.kv_heads * head_dim;
  return {.columns = {sizes.query_heads * head_dim, key_value, key_value},
          .sharing = sizes.kv_sharing,
          .shared = inventory.config.num_key_value_heads < inventory.cut.parts};
}

}  // namespace

AttentionBlock::AttentionBlock(const UnitTensors& tensors, const plan::MicroBatchShape& micro_batch)
    : ResidualBlock(tensors,
                    {.norm = tensors.architecture().attention_norm,
                     .index = "0",
                     .x = "x0",
                     .input = tensors.architecture().qkv,
                     .members = QkvMembersOf(tensors.inventory()),
                     .output = tensors.architecture().attention_output}),
      sizes_(plan::LocalSizesOf(tensors.inventory().config, cut_)) {
  const plan::Architecture& architecture = tensors.architecture();
  const plan::ModelConfig& config = tensors.inventory().config;
  const plan::UnitSpec& spec = tensors.spec();
  const std::vector<plan::ActivationSpec>& shared = tensors.inventory().shared;
  shape_ = {.sequence_tokens = micro_batch.sequence_tokens,
            .query_heads = sizes_.query_heads,
            .kv_heads = sizes_.kv_heads,
            .head_size = config.head_dim,
            .scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(config.head_dim)))};
  qkv_values_ = Activation(spec, "qkv", "d_a");
  attended_ = Activation(spec, "att", "d_b");
  log_sum_exp_ = Activation(spec, "lse", "lse");
  x1_ = Activation(spec, "x1");
  scratch_ = ActivationIndex(spec.workspace, "scratch");
  rotary_ = architecture.positions == plan::PositionKind::kRotary;
  if (rotary_) {
    rope_cos_ = ActivationIndex(shared, "rope_cos");
    rope_sin_ = ActivationIndex(shared, "rope_sin");
  }
  head_norm_ = !architecture.query_norm.empty();
  if (head_norm_) {
    qk_values_ = Activation(spec, "qk", "d_a");
    query_norm_ = tensors.Index(architecture.query_norm, "weight");
    key_norm_ = tensors.Index(architecture.key_norm, "weight");
    query_leaves_ = GradientLeaves(tensors, query_norm_);
    key_leaves_ = GradientLeaves(tensors, key_norm_);
    head_epsilon_ = static_cast<float>(config.rms_norm_eps);
  }
}

AttentionBlock::Heads AttentionBlock::SplitHeads(const TensorView& qkv) const {
  const int64_t query = shape_.query_heads * shape_.head_size;
  const int64_t key_value = shape_.kv_heads * shape_.head_size;
  return {.q = ColumnsOf(qkv, 0, query),
          .k = ColumnsOf(qkv, query, key_value),
          .v = ColumnsOf(qkv, query + key_value, key_value)};
}

AttentionBlock::Heads AttentionBlock::SplitGradients(const TensorView& d_qkv) const {
  const int64_t query = shape_.query_heads * shape_.head_size;
  const int64_t key_value = sizes_.kv_slots * shape_.head_size;
  return {.q = ColumnsOf(d_qkv, 0, query),
          .k = ColumnsOf(d_qkv, query, key_value),
          .v = ColumnsOf(d_qkv, query + key_value, key_value)};
}

TensorView AttentionBlock::QueryKeyColumns(const TensorView& qkv) const {
  return ColumnsOf(qkv, 0, (shape_.query_heads + shape_.kv_heads) * shape_.head_size);
}

TensorView AttentionBlock::QueriesAndKeys(const UnitMemory& memory) const {
  // In a forward that keeps neither, what the norm reads is not needed again.
  const bool in_place =
      !head_norm_ || (qkv_values_.remade() && !qk_values_.IfKept(memory).present());
  return in_place ? QueryKeyColumns(qkv_values_.In(memory)) : qk_values_.In(memory);
}

AttentionBlock::Heads AttentionBlock::HeadsIn(const UnitMemory& memory) const {
  Heads heads = SplitHeads(qkv_values_.In(memory));
  const TensorView rotated = QueriesAndKeys(memory);
  heads.q = ColumnsOf(rotated, 0, heads.q.size[1]);
  heads.k = ColumnsOf(rotated, heads.q.size[1], heads.k.size[1]);
  return heads;
}

void AttentionBlock::Rotate(Stream& stream,
                            const UnitMemory& memory,
                            const TensorView& heads,
                            bool forward) const {
  if (!rotary_) {
    return;
  }
  // Queries and keys lie side by side and rotate alike, head by head. Backward rotates by the
  // opposite angle: the matrix is orthogonal.
  kernels::Rope(stream,
                {.x = heads,
                 .head_size = shape_.head_size,
                 .sequence_tokens = shape_.sequence_tokens,
                 .cosine = memory.shared[rope_cos_],
                 .sine = memory.shared[rope_sin_],
                 .direction = forward ? kernels::RopeDirection::kForward
                                      : kernels::RopeDirection::kBackward});
}

void AttentionBlock::PrepareHeads(Stream& stream, const UnitMemory& memory) const {
  if (head_norm_) {
    const Heads raw = SplitHeads(qkv_values_.In(memory));
    const Heads heads = HeadsIn(memory);
    const auto apply = [&](const TensorView& x, size_t weight, const TensorView& y) {
      kernels::HeadNormForward(
          stream, {.x = x, .w = memory.weights[weight], .epsilon = head_epsilon_, .y = y});
    };
    apply(raw.q, query_norm_, heads.q);
    apply(raw.k, key_norm_, heads.k);
  }
  Rotate(stream, memory, QueriesAndKeys(memory), true);
}

void AttentionBlock::Attend(Stream& stream, const UnitMemory& memory) const {
  const Heads heads = HeadsIn(memory);
  for (int64_t part = 0; part < cut_.local_parts(); ++part) {
    kernels::AttentionForward(stream,
                              {.shape = PartShape(),
                               .q = QueriesOf(heads.q, part),
                               .k = KeysOf(heads.k, part),
                               .v = KeysOf(heads.v, part),
                               .out = QueriesOf(attended_.In(memory), part),
                               .log_sum_exp = StatisticsOf(memory, part),
                               .workspace = memory.workspace[scratch_]});
  }
}

void AttentionBlock::InnerForward(Stream& stream, const UnitMemory& memory) const {
  input_.Forward(stream, {.memory = memory, .x = Normed(memory), .y = qkv_values_.In(memory)});
  PrepareHeads(stream, memory);
  Attend(stream, memory);
}

TensorView AttentionBlock::InnerResult(const UnitMemory& memory) const {
  return attended_.In(memory);
}

TensorView AttentionBlock::InnerGradient(const UnitMemory& memory) const {
  return DQkv(memory);
}

void AttentionBlock::Remake(Stream& stream, const UnitMemory& memory) const {
  if (qkv_values_.remade()) {
    input_.Forward(stream, {.memory = memory, .x = Normed(memory), .y = qkv_values_.In(memory)});
  }
  if (qkv_values_.remade() || (head_norm_ && qk_values_.remade())) {
    PrepareHeads(stream, memory);
  }
  if (attended_.remade()) {
    // x1 = x0 + a Wo, added in the order of the first forward.
    Attend(stream, memory);
    if (!over_ranks()) {
      const TensorView x1 = x1_.In(memory);
      CopyView(stream, x_.In(memory), x1);
      AddOutput(stream, memory, attended_.In(memory), x1);
    }
  }
}

void AttentionBlock::RemakeSum(Stream& stream, const UnitMemory& memory) const {
  Sum(stream, memory, x_.In(memory));
}

void AttentionBlock::UndoHeads(Stream& stream,
                               const UnitMemory& memory,
                               const WeightGradients& gradients,
                               const TensorView& d_qkv) const {
  const Heads d_heads = SplitGradients(d_qkv);
  Rotate(stream, memory, ColumnsOf(d_qkv, 0, d_heads.q.size[1] + d_heads.k.size[1]), false);
  if (!head_norm_) {
    return;
  }
  const Heads raw = SplitHeads(qkv_values_.In(memory));
  const int64_t parts = cut_.local_parts();
  const auto undo =
      [&](const TensorView& x, size_t weight, const TensorView& dy, const TensorView& dw) {
        kernels::HeadNormBackward(stream,
                                  {.dy = dy,
                                   .x = x,
                                   .w = memory.weights[weight],
                                   .epsilon = head_epsilon_,
                                   .dx = dy,
                                   .dw = dw,
                                   .dw_output = gradients.output});
      };
  const auto leaf = [&](const GradientLeaves& leaves, int64_t part) {
    return leaves.Leaf(memory, gradients, leaves.count() > 1 ? part : 0);
  };
  const int64_t queries = d_heads.q.size[1] / parts;
  const int64_t keys = d_heads.k.size[1] / parts;
  for (int64_t part = 0; part < parts; ++part) {
    undo(ColumnsOf(raw.q, part * queries, queries),
         query_norm_,
         ColumnsOf(d_heads.q, part * queries, queries),
         leaf(query_leaves_, part));
    undo(ColumnsOf(raw.k, part / sizes_.kv_sharing * keys, keys),
         key_norm_,
         ColumnsOf(d_heads.k, part * keys, keys),
         leaf(key_leaves_, part));
  }
  query_leaves_.Fold(stream, memory, gradients);
  key_leaves_.Fold(stream, memory, gradients);
}

TensorView AttentionBlock::DAttended(const UnitMemory& memory) const {
  const TensorView attended = attended_.In(memory);
  return Carve(memory.workspace[d_b_], attended.size[0], attended.size[1]);
}

TensorView AttentionBlock::DQkv(const UnitMemory& memory) const {
  const int64_t heads = shape_.query_heads + 2 * sizes_.kv_slots;
  const int64_t tokens = qkv_values_.In(memory).size[0];
  return Carve(memory.workspace[d_a_], tokens, heads * shape_.head_size);
}

kernels::AttentionShape AttentionBlock::PartShape() const {
  kernels::AttentionShape shape = shape_;
  shape.query_heads = DivExact(shape_.query_heads, cut_.local_parts());
  shape.kv_heads = std::max<int64_t>(1, shape_.kv_heads / cut_.local_parts());
  return shape;
}

TensorView AttentionBlock::QueriesOf(const TensorView& queries, int64_t part) const {
  const int64_t columns = PartShape().query_heads * shape_.head_size;
  return ColumnsOf(queries, part * columns, columns);
}

TensorView AttentionBlock::KeysOf(const TensorView& keys, int64_t part) const {
  const int64_t first = part * shape_.kv_heads / cut_.local_parts();
  return ColumnsOf(keys, first * shape_.head_size, PartShape().kv_heads * shape_.head_size);
}

TensorView AttentionBlock::SlotsOf(const TensorView& gradients, int64_t part) const {
  const int64_t columns = PartShape().kv_heads * shape_.head_size;
  return ColumnsOf(gradients, part * columns, columns);
}

TensorView AttentionBlock::StatisticsOf(const UnitMemory& memory, int64_t part) const {
  const TensorView all = log_sum_exp_.In(memory);
  const int64_t rows = DivExact(all.size[0], cut_.local_parts());
  return RowsOf(all, part * rows, rows);
}

kernels::AttentionBackwardArgs AttentionBlock::BackwardArgs(const UnitMemory& memory,
                                                            int64_t part) const {
  const Heads heads = HeadsIn(memory);
  const Heads d_heads = SplitGradients(DQkv(memory));
  return {.shape = PartShape(),
          .q = QueriesOf(heads.q, part),
          .k = KeysOf(heads.k, part),
          .v = KeysOf(heads.v, part),
          .out = QueriesOf(attended_.In(memory), part),
          .log_sum_exp = StatisticsOf(memory, part),
          .dout = QueriesOf(DAttended(memory), part),
          .dq = QueriesOf(d_heads.q, part),
          .dk = SlotsOf(d_heads.k, part),
          .dv = SlotsOf(d_heads.v, part),
          .workspace = memory.workspace[scratch_]};
}

void AttentionBlock::AttendBackward(Stream& stream, const UnitMemory& memory) const {
  for (int64_t part = 0; part < cut_.local_parts(); ++part) {
    kernels::AttentionBackward(stream, BackwardArgs(memory, part));
  }
}

void AttentionBlock::Prepare(Stream& stream, const UnitMemory& memory) const {
  kernels::PrepareAttention(stream, BackwardArgs(memory, 0));
}

// Down to the gradient of qkv, with the gradients of the output projection and of the heads' norms.
void AttentionBlock::InnerBackward(Stream& stream,
                                   const UnitMemory& memory,
                                   const WeightGradients& gradients) const {
  output_.InputGradient(stream,
                        {.memory = memory, .dy = OutputGradient(memory), .dx = DAttended(memory)});
  OutputWeightGradient(stream, memory, gradients, attended_.In(memory));
  const TensorView d_qkv = DQkv(memory);
  AttendBackward(stream, memory);
  UndoHeads(stream, memory, gradients, d_qkv);
}

}  // namespace ravel::model
