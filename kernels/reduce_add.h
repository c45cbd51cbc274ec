#pragma once

#include <cstdint>
#include <vector>

#include "common/tensor_view.h"
#include "kernels/gemm.h"
#include "kernels/stream.h"

namespace ravel::kernels {

// Reduces gradient pieces: out (=|+=) the tree sum of `pieces`, or of `rounded_pieces` as fp32
// (kernels/tree_reduce.h; a power of two; one pass for up to 64), and the statistics of the new
// out. squared_norm (optional) = sum of its squares, in fp64, in an order that the length alone
// decides on a backend, but that differs between backends: exact statistics use RowSumSquares. It
// takes at most kMaxNormPieces pieces. non_finite (optional) += its NaN and inf. Both are memory of
// the stream's device. Flat fp32; out may alias pieces[0].
inline constexpr size_t kMaxNormPieces = 64;

struct ReduceAddArgs {
  std::vector<const float*> pieces = {};
  std::vector<const uint16_t*> rounded_pieces = {};  // bf16; one of the two lists is empty
  TensorView out;
  Output output = Output::kOverwrite;
  double* squared_norm = nullptr;
  int64_t* non_finite = nullptr;
};
void ReduceAdd(Stream& stream, const ReduceAddArgs& args);

}  // namespace ravel::kernels
