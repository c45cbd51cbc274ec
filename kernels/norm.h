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
// dresidual.
struct RmsNormBackwardArgs {
  TensorView dy;
  TensorView sum;
  TensorView w;
  TensorView rstd;
  TensorView dresidual;  // optional: gradient that reaches `sum` on the residual path
  TensorView dx;
  TensorView dw;
  Output dw_output = Output::kOverwrite;
};
void RmsNormBackward(Stream& stream, const RmsNormBackwardArgs& args);

}  // namespace ravel::kernels
