#pragma once

#include "common/tensor_view.h"
#include "kernels/gemm.h"
#include "kernels/stream.h"

namespace ravel::kernels {

// The rows of a table that a rank has: all, or those of ids from `first` on.
struct TableRows {
  int64_t first = 0;
  int64_t vocabulary = 0;  // ids are below it; 0: the table is whole
};

// out[t] = table[ids[t] - first]; where the table lacks that row, -0: such rows of tables that make
// a whole one add up to the row's bits, in any order. ids [tokens] i32 in [0, vocabulary); table
// [rows, hidden]; out [tokens, hidden], of the table's type or fp32.
struct EmbeddingForwardArgs {
  TensorView ids;
  TensorView table;
  TensorView out;
  TableRows rows = {};
};
void EmbeddingForward(Stream& stream, const EmbeddingForwardArgs& args);

// dtable[ids[t] - first] += dout[t] where the table has that row, in token order; kOverwrite
// zero-fills dtable first.
struct EmbeddingBackwardArgs {
  TensorView ids;
  TensorView dout;
  TensorView dtable;
  Output output = Output::kOverwrite;
  TableRows rows = {};
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
