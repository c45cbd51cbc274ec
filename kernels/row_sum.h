#pragma once

#include <cstdint>

#include "common/tensor_view.h"
#include "kernels/stream.h"

namespace ravel::kernels {

// Sum of squares of each row, in a fixed order: 128 strands, strand j takes
// elements j, j+128, ... with acc = fma(x, x, acc); strands are added as a tree of adjacent pairs
// in fp32. x [rows, columns], rows may be strided; sums [rows] fp32. The same bits wherever the
// rows are computed. non_finite (optional) += count of NaN and inf in x.
struct RowSumSquaresArgs {
  TensorView x;
  TensorView sums;
  int64_t* non_finite = nullptr;
};
void RowSumSquares(Stream& stream, const RowSumSquaresArgs& args);

// Binary tree over the row index in fp64 (missing rows are +0): the sum of a tensor from its row
// sums.
double TreeSumDouble(const double* values, int64_t count);

}  // namespace ravel::kernels
