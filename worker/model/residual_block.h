#pragma once

// x + Output(f(Input(Norm(x)))): what the two halves of a decoder layer have in common.

#include "worker/model/norm.h"
#include "worker/model/projection.h"

namespace ravel::model {

// The segments of each pass: the norm; what reads its result, which ends with a product; where
// ranks of a tensor axis have parts of that product each, the sum over them. `hidden` is the
// residual stream x, `dhidden` its gradient.
class ResidualBlock {
 public:
  virtual ~ResidualBlock() = default;
  ResidualBlock(const ResidualBlock&) = delete;
  ResidualBlock& operator=(const ResidualBlock&) = delete;

  // Reads `hidden`; keeps a copy of it where the inventory says so.
  void ForwardNorm(kernels::Stream& stream, const UnitMemory& memory) const;
  // Adds to `hidden`; with a part of the output product alone it leaves what Output reads.
  void Forward(kernels::Stream& stream, const UnitMemory& memory) const;
  // The addend of a chunk of tokens (UnitMemory::chunk), of a forward or of a recomputation.
  void Output(kernels::Stream& stream, const UnitMemory& memory) const;
  // UnitMemory::rows = those of (hidden + the output's bias) + the tree of pieces.
  void ForwardSum(kernels::Stream& stream, const UnitMemory& memory) const;
  // Recompute what the policy does not keep.
  void RemakeNorm(kernels::Stream& stream, const UnitMemory& memory) const;
  virtual void Remake(kernels::Stream& stream, const UnitMemory& memory) const = 0;
  // Reads `dhidden`; leaves the gradient of the norm's result in the workspace. Writes the
  // gradients of all weights but the norm's. With parts of the products alone it leaves out what
  // the two that follow do.
  void Backward(kernels::Stream& stream,
                const UnitMemory& memory,
                const WeightGradients& gradients) const;
  // The addend of a chunk of tokens of the gradient of the norm's result.
  void InputProduct(kernels::Stream& stream, const UnitMemory& memory) const;
  // Gradients of the weights that read the norm's result.
  void InputWeights(kernels::Stream& stream,
                    const UnitMemory& memory,
                    const WeightGradients& gradients) const;
  // Where ranks have their own tokens alone: UnitMemory::rows = this rank's of the norm's result,
  // or of `dhidden`, for all ranks to gather.
  void GiveNormed(kernels::Stream& stream, const UnitMemory& memory) const;
  void GiveGradient(kernels::Stream& stream, const UnitMemory& memory) const;
  // UnitMemory::rows = the tree of pieces.
  void BackwardSum(kernels::Stream& stream, const UnitMemory& memory) const;
  // `dhidden` in place.
  void BackwardNorm(kernels::Stream& stream,
                    const UnitMemory& memory,
                    const WeightGradients& gradients) const;

 protected:
  struct Parts {
    std::string_view norm;   // name of its tensors
    std::string_view index;  // of its activations
    std::string_view x;      // activation that keeps its input
    const plan::LinearNames& input;
    Projection::Members members;  // of the input projection
    const plan::LinearNames& output;
  };
  ResidualBlock(const UnitTensors& tensors, const Parts& parts);

  // Makes of the norm's result what the output projection reads, InnerResult.
  virtual void InnerForward(kernels::Stream& stream, const UnitMemory& memory) const = 0;
  virtual TensorView InnerResult(const UnitMemory& memory) const = 0;
  // Makes of `dhidden` the gradient of what the input projection has made, InnerGradient, and
  // gradients of weights between it and `hidden`.
  virtual void InnerBackward(kernels::Stream& stream,
                             const UnitMemory& memory,
                             const WeightGradients& gradients) const = 0;
  virtual TensorView InnerGradient(const UnitMemory& memory) const = 0;

  // y = x + the output product of `from`.
  void AddOutput(kernels::Stream& stream,
                 const UnitMemory& memory,
                 const TensorView& from,
                 const TensorView& y) const;
  // rows = those of (x + bias) + the tree of pieces.
  void Sum(kernels::Stream& stream, const UnitMemory& memory, const TensorView& x) const;

  bool over_ranks() const { return cut_.degree > 1; }
  // Runs of the chunk's tokens, whose addends lie one after another in that of the chunk.
  std::vector<Projection::PartArgs> RunsOf(const UnitMemory& memory, const TensorView& from) const;
  // The norm's result and `dhidden` of all tokens.
  TensorView Normed(const UnitMemory& memory) const;
  TensorView OutputGradient(const UnitMemory& memory) const;
  // Gradients of the output product's weight and bias; its bias is added to this rank's tokens.
  void OutputWeightGradient(kernels::Stream& stream,
                            const UnitMemory& memory,
                            const WeightGradients& gradients,
                            const TensorView& x) const;

  plan::TensorCut cut_;
  Norm norm_;
  NormActivations normed_;
  Projection input_;
  Projection output_;
  Activation x_;
  size_t d_a_, d_b_, d_c_;  // workspace
  // Workspaces of what is gathered, where ranks have their own tokens alone.
  size_t n_all_ = 0, dy_all_ = 0;
  size_t hidden_, dhidden_;  // shared
};

}  // namespace ravel::model
