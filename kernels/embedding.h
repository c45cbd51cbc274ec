#pragma once

#include "common/tensor_view.h"
#include "kernels/gemm.h"
#include "kernels/stream.h"

namespace ravel::kernels {

// out[t] = table[ids[t]]. ids [tokens] i32 in [0, vocabulary); table [vocabulary, hidden]; out
// [tokens, hidden].
struct EmbeddingForwardArgs {
  TensorView ids;
  TensorView table;
  TensorView out;
};
void EmbeddingForward(Stream& stream, const EmbeddingForwardArgs& args);

// dtable[ids[t]] += dout[t], in token order; kOverwrite zero-fills dtable first.
struct EmbeddingBackwardArgs {
  TensorView ids;
  TensorView dout;
  TensorView dtable;
  Output output = Output::kOverwrite;
};
void EmbeddingBackward(Stream& stream, const EmbeddingBackwardArgs& args);

// x[t] += table[t % sequence_tokens]. x [tokens, hidden]; table [positions, hidden], positions at
// least sequence_tokens.
struct AddPositionsArgs {
  TensorView x;
  TensorView table;
  int64_t sequence_tokens = 0;
};
void AddPositions(Stream& stream, const AddPositionsArgs& args);

// dtable[t % sequence_tokens] += dx[t], in token order; kOverwrite zero-fills dtable first.
struct PositionGradientArgs {
  TensorView dx;
  TensorView dtable;
  int64_t sequence_tokens = 0;
  Output output = Output::kOverwrite;
};
void PositionGradient(Stream& stream, const PositionGradientArgs& args);

}  // namespace ravel::kernels
