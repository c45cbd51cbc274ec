#pragma once

#include "common/tensor_view.h"
#include "kernels/gemm.h"
#include "kernels/stream.h"

namespace ravel::kernels {

// sum = x + residual (sum = x when residual is absent; sum may alias x or residual)
// y = sum * rstd * w, rstd = 1 / sqrt(mean(sum^2) + epsilon), per row. [Zhang and Sennrich 2019]
// x, residual, sum, y [tokens, hidden]; w [hidden]; rstd [tokens] fp32.
struct RmsNormForwardArgs {
  TensorView x;
  TensorView residual;  // optional
  TensorView w;
  float epsilon = 1e-6f;
  TensorView sum;  // optional when residual is absent
  TensorView y;
  TensorView rstd;
};
void RmsNormForward(Stream& stream, const RmsNormForwardArgs& args);

// Gradient of the above with respect to sum: dx = (w*dy - sum * rstd^2 * mean(sum*w*dy)) * rstd [+
// dresidual], dw (=|+=) sum over rows, in row order, of dy * sum * rstd. dx may alias dy or
// dresidual. An absent dw is not computed.
struct RmsNormBackwardArgs {
  TensorView dy;
  TensorView sum;
  TensorView w;
  TensorView rstd;
  TensorView dresidual;  // optional: gradient that reaches `sum` on the residual path
  TensorView dx;
  TensorView dw;  // optional
  Output dw_output = Output::kOverwrite;
};
void RmsNormBackward(Stream& stream, const RmsNormBackwardArgs& args);

// RMSNorm of every head by itself, all with one weight: x, y [tokens, heads * head_size], possibly
// ranges of columns; w [head_size]. y may alias x.
struct HeadNormForwardArgs {
  TensorView x;
  TensorView w;
  float epsilon = 1e-6f;
  TensorView y;
};
void HeadNormForward(Stream& stream, const HeadNormForwardArgs& args);

// The roots are made again from x. dw (=|+=) sums run over tokens, then heads. dx may alias dy; an
// absent dw is not computed.
struct HeadNormBackwardArgs {
  TensorView dy;
  TensorView x;
  TensorView w;
  float epsilon = 1e-6f;
  TensorView dx;
  TensorView dw;  // optional
  Output dw_output = Output::kOverwrite;
};
void HeadNormBackward(Stream& stream, const HeadNormBackwardArgs& args);

// y = (x - mean) * rstd * w + b, rstd = 1 / sqrt(mean((x - mean)^2) + epsilon), per row. [Ba et al.
// 2016] x, copy, y [tokens, hidden]; w, b [hidden]; mean, rstd [tokens] fp32. copy = x.
struct LayerNormForwardArgs {
  TensorView x;
  TensorView w;
  TensorView b;
  float epsilon = 1e-5f;
  TensorView copy;  // optional
  TensorView y;
  TensorView mean;
  TensorView rstd;
};
void LayerNormForward(Stream& stream, const LayerNormForwardArgs& args);

// With n = (x - mean) * rstd: dx = (w*dy - mean(w*dy) - n * mean(w*dy*n)) * rstd [+ dresidual], dw
// (=|+=) sum of dy * n, db (=|+=) sum of dy, over rows in row order. dx may alias dy or dresidual;
// an absent dw or db is not computed.
struct LayerNormBackwardArgs {
  TensorView dy;
  TensorView x;
  TensorView w;
  TensorView mean;
  TensorView rstd;
  TensorView dresidual;  // optional: gradient that reaches x on the residual path
  TensorView dx;
  TensorView dw;  // optional
  TensorView db;  // optional
  Output output = Output::kOverwrite;
};
void LayerNormBackward(Stream& stream, const LayerNormBackwardArgs& args);

}  // namespace ravel::kernels
