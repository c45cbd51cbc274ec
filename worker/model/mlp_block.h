#pragma once

// x + Down(activation(Up(Norm(x)))): the second half of a decoder layer.

#include "worker/model/residual_block.h"

namespace ravel::model {

// Activations (tokens = T): x1 [T, hidden], the input; statistics and result n1 of its norm; mlp_in
// [T, 2 * intermediate], gate and up, or [T, intermediate], up alone. What the activation function
// makes of them is recomputed in backward, in the pass that needs its factors anyway.
class MlpBlock final : public ResidualBlock {
 public:
  explicit MlpBlock(const UnitTensors& tensors);

  void Remake(kernels::Stream& stream, const UnitMemory& memory) const override;

 protected:
  void InnerForward(kernels::Stream& stream, const UnitMemory& memory) const override;
  TensorView InnerResult(const UnitMemory& memory) const override;
  void InnerBackward(kernels::Stream& stream,
                     const UnitMemory& memory,
                     const WeightGradients& gradients) const override;
  // In place of what the input projection has made.
  TensorView InnerGradient(const UnitMemory& memory) const override;

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
  Activation input_values_;
};

}  // namespace ravel::model
