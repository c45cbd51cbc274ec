#pragma once

#include <vector>

#include "common/tensor_view.h"
#include "kernels/stream.h"

namespace ravel::kernels {

// The end of a product whose contraction is cut into parts: out = round((residual + bias) + sum),
// sum = the pieces as a binary tree of adjacent pairs in fp32, as TreeSum; one rounding, to the
// type of out (fp32, bf16, fp16). pieces: fp32 [rows, columns], a power of two of them, at most
// kMostPieces; residual and bias are optional, of the type of out, [rows, columns] and [columns].
// Without them out = round(sum). out may be the memory of the residual, or, where it is fp32, of
// any piece. Rows may be strided, those of all pieces alike. Memory-bound: each operand is read
// once.
inline constexpr size_t kMostPieces = 16;

struct SumPartsArgs {
  std::vector<TensorView> pieces;
  TensorView residual = {};  // optional
  TensorView bias = {};      // optional
  TensorView out;
};
void SumParts(Stream& stream, const SumPartsArgs& args);

}  // namespace ravel::kernels
