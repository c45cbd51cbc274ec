#pragma once

#include "common/tensor_view.h"
#include "kernels/gemm.h"
#include "kernels/stream.h"

namespace ravel::kernels {

// y[t] = bias (kOverwrite, so that a GEMM that accumulates adds the product in its own pass) or
// y[t] += bias. y [tokens, columns]; bias [columns].
struct AddBiasArgs {
  TensorView bias;
  TensorView y;
  Output output = Output::kOverwrite;
};
void AddBias(Stream& stream, const AddBiasArgs& args);

// db (=|+=) sum over rows, in row order, of dy. dy [tokens, columns]; db [columns].
struct BiasGradientArgs {
  TensorView dy;
  TensorView db;
  Output output = Output::kOverwrite;
};
void BiasGradient(Stream& stream, const BiasGradientArgs& args);

}  // namespace ravel::kernels
