#pragma once

#include "common/tensor_view.h"
#include "kernels/gemm.h"
#include "kernels/stream.h"

namespace ravel::kernels {

// Head of a language model, fused: logits = x * w^T, loss[t] = logsumexp(logits[t]) - logits[t,
// target[t]], in chunks of kLossChunkTokens tokens, so that no [tokens, vocabulary] matrix exists.
// A target of -1 is ignored (loss 0, no gradient). x [tokens, hidden]; w [vocabulary, hidden];
// targets [tokens] i32; loss [tokens] fp32.
inline constexpr int64_t kLossChunkTokens = 256;

struct LinearCrossEntropyForwardArgs {
  TensorView x;
  TensorView w;
  TensorView targets;
  TensorView loss;
  TensorView workspace;  // [min(tokens, kLossChunkTokens), vocabulary] fp32
};
void LinearCrossEntropyForward(Stream& stream, const LinearCrossEntropyForwardArgs& args);

// The same losses, and the gradient of their SUM: dx is overwritten, dw (=|+=); an absent dw is not
// computed. 6 * tokens *
// vocabulary * hidden FLOPs.
struct LinearCrossEntropyTrainArgs {
  TensorView x;
  TensorView w;
  TensorView targets;
  TensorView loss;
  TensorView dx;
  TensorView dw;  // optional
  Output dw_output = Output::kOverwrite;
  TensorView workspace;  // as above
};
void LinearCrossEntropyTrain(Stream& stream, const LinearCrossEntropyTrainArgs& args);

}  // namespace ravel::kernels
