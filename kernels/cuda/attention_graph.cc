// Builds the operation graphs of causal attention, with S = scale * q k^T masked to keys up to the
// query:
//   forward:   P = softmax(S),  out = P v,  lse = log(sum(exp(S)))
//   backward:  delta = rowsum(dout * out),  P = exp(S - lse),  dv = P^T dout,
//              dS = scale * P * (dout v^T - delta),  dq = dS k,  dk = dS^T q
// cuDNN fuses a graph only if it matches a known pattern, so each step above is one node and
// virtual tensors (P, S and their gradients) never reach memory. Without determinism, dq is summed
// in an fp32 scratch tensor, into which thread blocks add in any order; with it, dq is the output
// of the last matrix product.

#include "kernels/cuda/attention_graph.h"

#include <limits>

namespace ravel::kernels::cuda {
namespace {

constexpr int64_t kScratchAlignment = 256;
constexpr int64_t kVectorElements = 8;  // bf16 or fp16 elements of 16 bytes
constexpr int32_t kFp16 = 2;            // common/dtype.h

GraphSize PackedStride(const GraphSize& size) {
  return {size[1] * size[2] * size[3], size[2] * size[3], size[3], 1};
}

// Adds tensors and operations; results are virtual fp32 unless said otherwise.
class Builder {
 public:
  explicit Builder(const RavelCudaAttention& attention) : a_(attention) {}

  // The type of operands, and of what a matrix product reads of scores.
  GraphType Narrow() const { return a_.type == kFp16 ? GraphType::kFp16 : GraphType::kBf16; }

  size_t Add(const GraphTensor& tensor) {
    graph_.tensors.push_back(tensor);
    return graph_.tensors.size() - 1;
  }
  size_t Virtual(const GraphSize& size, GraphType type = GraphType::kF32) {
    return Add({.size = size, .stride = PackedStride(size), .type = type});
  }
  size_t Scalar(float value) {
    return Add(
        {.size = {1, 1, 1, 1}, .stride = {1, 1, 1, 1}, .role = GraphRole::kScalar, .value = value});
  }
  // fp32 of the workspace.
  size_t Scratch(const GraphSize& size) {
    const int64_t bytes = size[0] * PackedStride(size)[0] * 4;
    const size_t tensor = Add({.size = size,
                               .stride = PackedStride(size),
                               .role = GraphRole::kScratch,
                               .offset_bytes = graph_.scratch_bytes});
    graph_.scratch_bytes += (bytes + kScratchAlignment - 1) / kScratchAlignment * kScratchAlignment;
    return tensor;
  }
  // Rows of heads as they lie in our matrices: [sequences, heads, tokens, head_size].
  size_t Heads(GraphRole role, int64_t heads, int64_t token_stride) {
    return Add({.size = {a_.sequences, heads, a_.sequence_tokens, a_.head_size},
                .stride = {a_.sequence_tokens * token_stride, a_.head_size, token_stride, 1},
                .type = Narrow(),
                .role = role});
  }
  // The same memory as [sequences, heads, head_size, tokens].
  size_t FlippedHeads(GraphRole role, int64_t heads, int64_t token_stride) {
    return Add({.size = {a_.sequences, heads, a_.head_size, a_.sequence_tokens},
                .stride = {a_.sequence_tokens * token_stride, a_.head_size, 1, token_stride},
                .type = Narrow(),
                .role = role});
  }
  size_t LogSumExp() {
    return Add(
        {.size = RowSize(), .stride = PackedStride(RowSize()), .role = GraphRole::kLogSumExp});
  }

  GraphSize ScoreSize() const {
    return {a_.sequences, a_.query_heads, a_.sequence_tokens, a_.sequence_tokens};
  }
  GraphSize RowSize() const { return {a_.sequences, a_.query_heads, a_.sequence_tokens, 1}; }
  GraphSize QuerySize() const {
    return {a_.sequences, a_.query_heads, a_.sequence_tokens, a_.head_size};
  }

  void Into(GraphOperator op, std::vector<size_t> inputs, size_t output) {
    graph_.operations.push_back({.op = op, .inputs = std::move(inputs), .output = output});
  }
  size_t To(GraphOperator op, std::vector<size_t> inputs, const GraphSize& size) {
    const size_t output = Virtual(size);
    Into(op, std::move(inputs), output);
    return output;
  }
  size_t Scores(GraphOperator op, std::vector<size_t> inputs) {
    return To(op, std::move(inputs), ScoreSize());
  }
  size_t Rows(GraphOperator op, std::vector<size_t> inputs) {
    return To(op, std::move(inputs), RowSize());
  }
  size_t Index(size_t like, int64_t axis) {
    const size_t output = Virtual(ScoreSize(), GraphType::kInt32);
    graph_.operations.push_back(
        {.op = GraphOperator::kIndex, .inputs = {like}, .output = output, .axis = axis});
    return output;
  }
  // Scores of keys after the query become minus infinity.
  size_t Mask(size_t scores) {
    const size_t row = Index(scores, 2);
    const size_t column = Index(scores, 3);
    const size_t kept = Virtual(ScoreSize(), GraphType::kBoolean);
    graph_.operations.push_back({.op = GraphOperator::kGreaterEqual,
                                 .inputs = {row, column},
                                 .output = kept,
                                 .compute = GraphType::kBoolean});
    const size_t lowest = Scalar(-std::numeric_limits<float>::infinity());
    return Scores(GraphOperator::kSelect, {scores, lowest, kept});
  }
  // Rows and columns of scores exchanged, narrow: what a gemm over queries reads.
  size_t FlippedScores(size_t scores) {
    const int64_t tokens = a_.sequence_tokens;
    const GraphSize stride = PackedStride(ScoreSize());
    const size_t output = Add({.size = {a_.sequences, a_.query_heads, tokens, tokens},
                               .stride = {stride[0], stride[1], 1, tokens},
                               .type = Narrow()});
    Into(GraphOperator::kReshape, {scores}, output);
    return output;
  }
  // A gradient of keys or values: per query head, then summed over the heads of a group.
  void KeyGradient(size_t weights, size_t rows, size_t output) {
    if (a_.query_heads == a_.kv_heads) {
      Into(GraphOperator::kMatmul, {weights, rows}, output);
      return;
    }
    const size_t per_head = Virtual(QuerySize(), Narrow());
    Into(GraphOperator::kMatmul, {weights, rows}, per_head);
    Into(GraphOperator::kSum, {per_head}, output);
  }

  AttentionGraph Take() { return std::move(graph_); }

 private:
  const RavelCudaAttention& a_;
  AttentionGraph graph_;
};

// dq = ds k; `keys` is the flipped operand.
void QueryGradient(const RavelCudaAttention& a, size_t ds, size_t keys, Builder& graph) {
  const size_t upright =
      graph.Add({.size = {a.sequences, a.kv_heads, a.sequence_tokens, a.head_size},
                 .stride = {a.sequence_tokens * a.k_stride, a.head_size, a.k_stride, 1},
                 .type = graph.Narrow()});
  graph.Into(GraphOperator::kReshape, {keys}, upright);
  const size_t dq = graph.Heads(GraphRole::kDQ, a.query_heads, a.dq_stride);
  if (a.deterministic != 0) {
    graph.Into(GraphOperator::kMatmul, {ds, upright}, dq);
    return;
  }
  const size_t sum = graph.Scratch(graph.QuerySize());
  graph.Into(GraphOperator::kMatmul, {ds, upright}, sum);
  graph.Into(GraphOperator::kIdentity, {sum}, dq);
}

}  // namespace

AttentionGraph ForwardAttentionGraph(const RavelCudaAttention& a) {
  Builder graph(a);
  const size_t q = graph.Heads(GraphRole::kQ, a.query_heads, a.q_stride);
  const size_t k = graph.FlippedHeads(GraphRole::kK, a.kv_heads, a.k_stride);
  const size_t raw_scores = graph.Scores(GraphOperator::kMatmul, {q, k});
  const size_t scale = graph.Scalar(a.scale);
  const size_t masked = graph.Mask(graph.Scores(GraphOperator::kMultiply, {raw_scores, scale}));
  const size_t max = graph.Rows(GraphOperator::kMax, {masked});
  const size_t below = graph.Scores(GraphOperator::kSubtract, {masked, max});
  const size_t weights = graph.Scores(GraphOperator::kExp, {below});
  const size_t sum = graph.Rows(GraphOperator::kSum, {weights});
  const size_t log = graph.Rows(GraphOperator::kLog, {sum});
  graph.Into(GraphOperator::kAdd, {max, log}, graph.LogSumExp());
  const size_t shares = graph.Virtual(graph.ScoreSize(), graph.Narrow());
  graph.Into(GraphOperator::kDivide, {weights, sum}, shares);
  const size_t v = graph.Heads(GraphRole::kV, a.kv_heads, a.v_stride);
  graph.Into(GraphOperator::kMatmul,
             {shares, v},
             graph.Heads(GraphRole::kOut, a.query_heads, a.out_stride));
  return graph.Take();
}

AttentionGraph BackwardAttentionGraph(const RavelCudaAttention& a) {
  Builder graph(a);
  const size_t dout = graph.Heads(GraphRole::kDOut, a.query_heads, a.dout_stride);
  const size_t out = graph.Heads(GraphRole::kOut, a.query_heads, a.out_stride);
  const size_t along = graph.To(GraphOperator::kMultiply, {dout, out}, graph.QuerySize());
  const size_t delta_sum = graph.Rows(GraphOperator::kSum, {along});
  const size_t delta = graph.Scratch(graph.RowSize());
  graph.Into(GraphOperator::kMultiply, {delta_sum, graph.Scalar(1.0f)}, delta);

  const size_t q = graph.Heads(GraphRole::kQ, a.query_heads, a.q_stride);
  const size_t k = graph.FlippedHeads(GraphRole::kK, a.kv_heads, a.k_stride);
  const size_t raw_scores = graph.Scores(GraphOperator::kMatmul, {q, k});
  const size_t scale = graph.Scalar(a.scale);
  const size_t scores = graph.Scores(GraphOperator::kMultiply, {raw_scores, scale});
  const size_t below = graph.Scores(GraphOperator::kSubtract, {scores, graph.LogSumExp()});
  const size_t shares = graph.Scores(GraphOperator::kExp, {graph.Mask(below)});
  graph.KeyGradient(
      graph.FlippedScores(shares), dout, graph.Heads(GraphRole::kDV, a.kv_heads, a.dv_stride));

  const size_t v = graph.FlippedHeads(GraphRole::kV, a.kv_heads, a.v_stride);
  const size_t dshares = graph.Scores(GraphOperator::kMatmul, {dout, v});
  const size_t centred = graph.Scores(GraphOperator::kSubtract, {dshares, delta});
  const size_t weighted = graph.Scores(GraphOperator::kMultiply, {centred, shares});
  const size_t ds = graph.Scores(GraphOperator::kMultiply, {weighted, scale});
  graph.KeyGradient(
      graph.FlippedScores(ds), q, graph.Heads(GraphRole::kDK, a.kv_heads, a.dk_stride));
  QueryGradient(a, ds, k, graph);
  return graph.Take();
}

UnifiedAttention ForwardUnifiedAttention(const RavelCudaAttention& a) {
  Builder operands(a);
  operands.Heads(GraphRole::kQ, a.query_heads, a.q_stride);
  operands.Heads(GraphRole::kK, a.kv_heads, a.k_stride);
  operands.Heads(GraphRole::kV, a.kv_heads, a.v_stride);
  operands.Heads(GraphRole::kOut, a.query_heads, a.out_stride);
  operands.LogSumExp();
  operands.Scalar(a.scale);
  operands.Virtual(operands.ScoreSize());
  operands.Virtual(operands.ScoreSize());
  Builder mask(a);
  mask.Mask(mask.Virtual(mask.ScoreSize()));
  return {operands.Take(), mask.Take()};
}

std::string WhyNoAttentionEngine(const RavelCudaAttention& a, uint64_t version) {
  if (version < kOldestCudnn) {
    return "cuDNN is older than 9.10.2";
  }
  if (a.head_size % kVectorElements != 0) {
    return "heads of " + std::to_string(a.head_size) + " elements are not whole 16-byte vectors";
  }
  if (a.sequence_tokens < 2) {
    return "sequences of one token";
  }
  for (const int64_t stride : {a.q_stride,
                               a.k_stride,
                               a.v_stride,
                               a.out_stride,
                               a.dout_stride,
                               a.dq_stride,
                               a.dk_stride,
                               a.dv_stride}) {
    if (stride % kVectorElements != 0) {
      return "rows " + std::to_string(stride) + " elements apart do not all lie on 16 bytes";
    }
  }
  constexpr uint64_t kLastWithoutTails = 91500;
  constexpr int64_t kTile = 128;
  if (a.backward != 0 && version <= kLastWithoutTails && a.sequence_tokens % kTile != 0) {
    return "backward of sequences that are no multiple of 128 tokens needs cuDNN 9.15.1";
  }
  return "";
}

}  // namespace ravel::kernels::cuda
