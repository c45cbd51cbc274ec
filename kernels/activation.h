#pragma once

#include "common/tensor_view.h"
#include "kernels/stream.h"

namespace ravel::kernels {

// y = silu(gate) * up, silu(x) = x / (1 + exp(-x)) [Shazeer 2020]. All [tokens, intermediate];
// views may be strided.
struct SwiGluForwardArgs {
  TensorView gate;
  TensorView up;
  TensorView y;
};
void SwiGluForward(Stream& stream, const SwiGluForwardArgs& args);

// dgate = dy * up * silu'(gate), dup = dy * silu(gate). When y is present it is recomputed too (so
// that the forward result need not be saved). dgate may alias gate, dup may alias up.
struct SwiGluBackwardArgs {
  TensorView gate;
  TensorView up;
  TensorView dy;
  TensorView dgate;
  TensorView dup;
  TensorView y;  // optional
};
void SwiGluBackward(Stream& stream, const SwiGluBackwardArgs& args);

// The tanh form of GELU [Hendrycks and Gimpel 2016; "gelu_new" of Hugging Face]: y = x/2 * (1 +
// tanh(sqrt(2/pi) * (x + 0.044715 x^3))). All [tokens, intermediate]; views may be strided; y may
// alias x.
struct GeluForwardArgs {
  TensorView x;
  TensorView y;
};
void GeluForward(Stream& stream, const GeluForwardArgs& args);

// dx = dy * gelu'(x). When y is present it is recomputed too. dx may alias x or dy.
struct GeluBackwardArgs {
  TensorView x;
  TensorView dy;
  TensorView dx;
  TensorView y;  // optional
};
void GeluBackward(Stream& stream, const GeluBackwardArgs& args);

// y = x + y, elementwise.
struct AddArgs {
  TensorView x;
  TensorView y;
};
void AddInPlace(Stream& stream, const AddArgs& args);

}  // namespace ravel::kernels
