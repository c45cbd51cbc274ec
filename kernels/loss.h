#pragma once

#include "common/tensor_view.h"
#include "kernels/gemm.h"
#include "kernels/stream.h"

namespace ravel::kernels {

// Head of a language model, fused: logits = x * w^T, loss[t] = logsumexp(logits[t]) - logits[t,
// target[t]], for as many tokens at a time as the workspace has rows, so that no [tokens,
// vocabulary] matrix need exist. A target of -1 is ignored (loss 0, no gradient). x [tokens,
// hidden]; w [vocabulary, hidden]; targets [tokens] i32; loss [tokens] fp32.

struct LinearCrossEntropyForwardArgs {
  TensorView x;
  TensorView w;
  TensorView targets;
  TensorView loss;
  TensorView workspace;  // [at least 1, vocabulary], of the type of x; contiguous on CPUs
};
void LinearCrossEntropyForward(Stream& stream, const LinearCrossEntropyForwardArgs& args);

// The same losses, and the gradient of their SUM times loss_scale: dx is overwritten, dw (=|+=) by
// one gemm for each workspace full of tokens, in their order; an absent dw is not computed. 6 *
// tokens * vocabulary * hidden FLOPs.
struct LinearCrossEntropyTrainArgs {
  TensorView x;
  TensorView w;
  TensorView targets;
  TensorView loss;
  TensorView dx;
  TensorView dw;  // optional
  Output dw_output = Output::kOverwrite;
  TensorView workspace;  // as above
  // A power of two that keeps small gradients in the range of fp16; 1 for other types.
  float loss_scale = 1.0f;
  const float* device_loss_scale = nullptr;  // of a device's memory, read in its place
};
void LinearCrossEntropyTrain(Stream& stream, const LinearCrossEntropyTrainArgs& args);

}  // namespace ravel::kernels
