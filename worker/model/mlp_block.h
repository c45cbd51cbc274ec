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

  // Forward and Backward, without the norm, where sums are in parts, up to the tree over this
  // rank's parts and from the sum over all ranks on: `pieces` are the trees of the ranks, in their
  // order, or what the one rank returned. Between them nothing else may use the unit's workspace.
  std::vector<TensorView> ForwardParts(kernels::Stream& stream, const UnitMemory& memory) const;
  void FinishForward(kernels::Stream& stream,
                     const UnitMemory& memory,
                     const std::vector<TensorView>& pieces) const;
  std::vector<TensorView> BackwardParts(kernels::Stream& stream,
                                        const UnitMemory& memory,
                                        const WeightGradients& gradients) const;
  void FinishBackward(kernels::Stream& stream,
                      const UnitMemory& memory,
                      const WeightGradients& gradients,
                      const std::vector<TensorView>& pieces) const;

 private:
  // The input of the output projection.
  TensorView InnerForward(kernels::Stream& stream, const UnitMemory& memory) const;
  TensorView InnerBackward(kernels::Stream& stream,
                           const UnitMemory& memory,
                           const WeightGradients& gradients) const;
  // Gradient of the input projection's weight, from the one that InnerBackward left in place of its
  // output.
  void InputWeightGradient(kernels::Stream& stream,
                           const UnitMemory& memory,
                           const WeightGradients& gradients) const;
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
  bool cuts_;
  Activation x1_, input_values_;
  size_t d_a_ = 0, d_b_ = 0, d_c_ = 0;  // workspace
  size_t hidden_ = 0, dhidden_ = 0;     // shared
};

}  // namespace ravel::model
