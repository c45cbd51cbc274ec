#pragma once

// x + Down(activation(Up(Norm(x)))): the second half of a decoder layer.

#include "worker/model/norm.h"
#include "worker/model/projection.h"

namespace ravel::model {

// Activations (tokens = T): x1 [T, hidden], the input; statistics and result n1 of its norm; mlp_in
// [T, 2 * intermediate], gate and up, or [T, intermediate], up alone. What the activation function
// makes of them is recomputed in backward, in the pass that needs its factors anyway.
class MlpBlock {
 public:
  explicit MlpBlock(const UnitTensors& tensors);

  // The two segments of each pass: the norm, and what reads its result. Forward:
  // reads `hidden`, keeps x1.
  void ForwardNorm(kernels::Stream& stream, const UnitMemory& memory) const;
  // Adds to `hidden`.
  void Forward(kernels::Stream& stream, const UnitMemory& memory) const;
  // Recompute what the policy does not keep.
  void RemakeNorm(kernels::Stream& stream, const UnitMemory& memory) const;
  void Remake(kernels::Stream& stream, const UnitMemory& memory) const;
  // Reads `dhidden`; leaves the gradient of the norm's result in the workspace.
  void Backward(kernels::Stream& stream,
                const UnitMemory& memory,
                const WeightGradients& gradients) const;
  // `dhidden` in place.
  void BackwardNorm(kernels::Stream& stream,
                    const UnitMemory& memory,
                    const WeightGradients& gradients) const;

 private:
  // y = activation(x).
  void Activate(kernels::Stream& stream, const TensorView& x, const TensorView& y) const;
  // x becomes its gradient, y the activation again.
  void Deactivate(kernels::Stream& stream,
                  const TensorView& x,
                  const TensorView& dy,
                  const TensorView& y) const;

  plan::MlpKind kind_;
  int64_t inner_;
  Norm norm_;
  NormActivations normed_;
  Projection input_;
  Projection output_;
  Activation x1_, input_values_;
  size_t d_a_ = 0, d_b_ = 0, d_c_ = 0;  // workspace
  size_t hidden_ = 0, dhidden_ = 0;     // shared
};

}  // namespace ravel::model
