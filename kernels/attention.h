#pragma once

#include "common/tensor_view.h"
#include "kernels/stream.h"

namespace ravel::kernels {

// Causal grouped-query attention with online softmax [Dao et al. 2022]; nothing of size T x T is
// stored, and blocks above the diagonal are never computed. tokens = batch * sequence_tokens;
// sequences do not see each other. q, out [tokens, query_heads * head_size]; k, v [tokens, kv_heads
// * head_size]; views may be column ranges. log_sum_exp [sequences * query_heads,
// sequence_tokens] fp32, without gaps on a device. query_heads is a multiple of kv_heads; head h
// reads kv head h / group.
struct AttentionShape {
  int64_t sequence_tokens = 0;
  int64_t query_heads = 0;
  int64_t kv_heads = 0;
  int64_t head_size = 0;
  float scale = 0.0f;  // usually 1 / sqrt(head_size)

  // Rows of log_sum_exp of so many tokens, which are whole sequences.
  int64_t StatisticRows(int64_t tokens) const { return tokens / sequence_tokens * query_heads; }
};

// Scratch that either pass needs, in fp32 elements; independent of the number of tokens beyond one
// sequence.
int64_t AttentionWorkspaceElements(const AttentionShape& shape);

struct AttentionForwardArgs {
  AttentionShape shape;
  TensorView q;
  TensorView k;
  TensorView v;
  TensorView out;
  TensorView log_sum_exp;
  // At least AttentionWorkspaceElements(shape) fp32. On a device what is more lets engines run that
  // keep whole matrices.
  TensorView workspace;
};
void AttentionForward(Stream& stream, const AttentionForwardArgs& args);

// dq, dk, dv are overwritten; sums run in a fixed order, so the result is deterministic.
struct AttentionBackwardArgs {
  AttentionShape shape;
  TensorView q;
  TensorView k;
  TensorView v;
  TensorView out;
  TensorView log_sum_exp;
  TensorView dout;
  TensorView dq;
  TensorView dk;
  TensorView dv;
  TensorView workspace;  // at least AttentionWorkspaceElements(shape) fp32
};
void AttentionBackward(Stream& stream, const AttentionBackwardArgs& args);

// Before the first step: chooses how both passes over such operands will be computed, so that no
// step has to; within the workspace, if that has memory. May take seconds where cuDNN compiles.
// Other views may be without memory. Returns the
// bytes of workspace with which each pass would run at once (0 where none is needed).
int64_t PrepareAttention(Stream& stream, const AttentionBackwardArgs& args);

}  // namespace ravel::kernels
