#pragma once

// x + Output(Attention(Norm(x))): the first half of a decoder layer.

#include "kernels/attention.h"
#include "worker/model/residual_block.h"

namespace ravel::model {

// Activations (tokens = T): x0 [T, hidden], the input; statistics and result n0 of its norm; qkv
// [T, (heads + 2 kv_heads) * head_dim]; att [T, heads * head_dim]; lse [heads, T]; x1 [T, hidden],
// the result. Queries and keys are rotated in place in qkv; where every head has a norm of its own,
// they are normed and rotated into qk instead, because the norm's gradient needs what it read.
class AttentionBlock final : public ResidualBlock {
 public:
  AttentionBlock(const UnitTensors& tensors, const plan::MicroBatchShape& micro_batch);

  // Module::Prepare.
  void Prepare(kernels::Stream& stream, const UnitMemory& memory) const;
  // If att is remade, x1 is, too, unless ranks sum it.
  void Remake(kernels::Stream& stream, const UnitMemory& memory) const override;
  // x1's rows, from x0's.
  void RemakeSum(kernels::Stream& stream, const UnitMemory& memory) const;

 protected:
  void InnerForward(kernels::Stream& stream, const UnitMemory& memory) const override;
  TensorView InnerResult(const UnitMemory& memory) const override;
  void InnerBackward(kernels::Stream& stream,
                     const UnitMemory& memory,
                     const WeightGradients& gradients) const override;
  TensorView InnerGradient(const UnitMemory& memory) const override;

 private:
  struct Heads {
    TensorView q;
    TensorView k;
    TensorView v;
  };
  Heads SplitHeads(const TensorView& qkv) const;
  // The same of gradients, where keys and values have a slot for each part that shares them.
  Heads SplitGradients(const TensorView& d_qkv) const;
  // Attention runs once for each part of the heads that this rank has (plan::TensorCut), so that
  // its engine is chosen for the shape of one part, whatever the number of ranks. A part has a
  // block of log_sum_exp of its own, and a slot of key gradients where parts share a key head.
  kernels::AttentionShape PartShape() const;
  TensorView QueriesOf(const TensorView& queries, int64_t part) const;
  TensorView KeysOf(const TensorView& keys, int64_t part) const;
  TensorView SlotsOf(const TensorView& gradients, int64_t part) const;
  TensorView StatisticsOf(const UnitMemory& memory, int64_t part) const;
  // Arguments of a part's backward pass, from d_attended to d_qkv.
  kernels::AttentionBackwardArgs BackwardArgs(const UnitMemory& memory, int64_t part) const;
  void AttendBackward(kernels::Stream& stream, const UnitMemory& memory) const;
  // In the workspace, during Backward: gradients of `attended` and `qkv`.
  TensorView DAttended(const UnitMemory& memory) const;
  TensorView DQkv(const UnitMemory& memory) const;
  // The block of queries and keys that attention reads, and the views in it.
  TensorView QueriesAndKeys(const UnitMemory& memory) const;
  Heads HeadsIn(const UnitMemory& memory) const;
  void PrepareHeads(kernels::Stream& stream, const UnitMemory& memory) const;
  void Rotate(kernels::Stream& stream,
              const UnitMemory& memory,
              const TensorView& heads,
              bool forward) const;
  void Attend(kernels::Stream& stream, const UnitMemory& memory) const;
  void UndoHeads(kernels::Stream& stream,
                 const UnitMemory& memory,
                 const WeightGradients& gradients,
                 const TensorView& d_qkv) const;
  TensorView QueryKeyColumns(const TensorView& qkv) const;

  plan::LocalSizes sizes_;
  kernels::AttentionShape shape_;
  Activation qkv_values_, qk_values_, attended_, log_sum_exp_, x1_;
  bool rotary_ = false;
  bool head_norm_ = false;
  float head_epsilon_ = 0;
  size_t query_norm_ = 0, key_norm_ = 0;  // weights
  GradientLeaves query_leaves_, key_leaves_;
  size_t scratch_ = 0;                  // workspace
  size_t rope_cos_ = 0, rope_sin_ = 0;  // shared
};

}  // namespace ravel::model
