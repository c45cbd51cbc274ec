#pragma once

#include <vector>

#include "common/tensor_view.h"
#include "kernels/stream.h"

namespace ravel::kernels {

// out[i] = a[i] + b[i]; out may alias either. Flat fp32.
struct TreeAddArgs {
  TensorView a;
  TensorView b;
  TensorView out;
};
void TreeAdd(Stream& stream, const TreeAddArgs& args);

// out[i] = the sum of pieces[0..n)[i] as a binary tree of adjacent pairs; n is a power of two, n =
// 1 copies. For n = 4: (p0 + p1) + (p2 + p3). One pass: each piece is read once. out may alias
// pieces[0].
struct TreeSumArgs {
  std::vector<const float*> pieces;
  TensorView out;
};
void TreeSum(Stream& stream, const TreeSumArgs& args);

// dst = src, flat bytes, with a copy that is fast for any alignment.
struct CopyArgs {
  void* to = nullptr;
  const void* from = nullptr;
  int64_t bytes = 0;
};
void CopyBytes(Stream& stream, const CopyArgs& args);

}  // namespace ravel::kernels
