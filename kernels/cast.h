#pragma once

#include "common/tensor_view.h"
#include "kernels/stream.h"

namespace ravel::kernels {

// Which bf16 an fp32 becomes (an fp16 is always the nearest, ties to even): kNearest for
// activations and gradients, kHalfAway for model weights from main weights (ties away from zero).
enum class Bf16Rounding { kNearest, kHalfAway };

// to = from, flat; fp32 -> bf16 or bf16 -> fp32 (exact); fp16, too.
struct CastArgs {
  TensorView from;
  TensorView to;
  Bf16Rounding rounding = Bf16Rounding::kNearest;
};
void Cast(Stream& stream, const CastArgs& args);

// to [columns, rows] = the transpose of from [rows, columns]; one type of 2 or 4 bytes; no
// aliasing.
struct TransposeArgs {
  TensorView from;
  TensorView to;
};
void TransposeMatrix(Stream& stream, const TransposeArgs& args);

}  // namespace ravel::kernels
