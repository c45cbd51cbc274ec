#pragma once

// One decoder layer: x1 = x0 + Attention(RMSNorm(x0)); out = x1 + SwiGLU(RMSNorm(x1)).

#include "worker/model/module.h"
#include "worker/model/projection.h"

namespace ravel::model {

// The residual stream lives in `hidden` and is updated in place: the output projections accumulate
// into it, so that no pass is spent on adding. Activations (tokens = T): x0, x1, n0, n1 [T, hidden]
// inputs and results of the two norms; rstd0, rstd1 [T]; qkv [T, (heads + 2 kv_heads) * head_dim]
// after RoPE; att [T, heads * head_dim]; lse [heads, T]; gate_up [T, 2 * intermediate]. The product
// silu(gate) * up is made again in backward, in the pass that needs its factors anyway, instead of
// being kept.
class LayerModule final : public Module {
 public:
  LayerModule(const plan::ModelInventory& inventory,
              int unit,
              const plan::MicroBatchShape& micro_batch);

  void Forward(kernels::Stream& stream, const UnitMemory& memory) const override;
  void ForwardOnly(kernels::Stream& stream, const UnitMemory& memory) const override;
  void Backward(kernels::Stream& stream,
                const UnitMemory& memory,
                const std::vector<FreshGradient>& gradients) const override;
  void Backward(kernels::Stream& stream,
                const UnitMemory& memory,
                const std::vector<AccumulatingGradient>& gradients) const override;

 private:
  struct Views;
  Views Bind(const UnitMemory& memory) const;
  void ForwardAttention(kernels::Stream& stream, const UnitMemory& memory, const Views& v) const;
  void ForwardMlp(kernels::Stream& stream, const UnitMemory& memory, const Views& v) const;
  template <typename Gradient>
  void BackwardAttention(kernels::Stream& stream,
                         const UnitMemory& memory,
                         const Views& v,
                         const std::vector<Gradient>& gradients) const;
  template <typename Gradient>
  void BackwardMlp(kernels::Stream& stream,
                   const UnitMemory& memory,
                   const Views& v,
                   const std::vector<Gradient>& gradients) const;
  void RotateQueriesAndKeys(kernels::Stream& stream,
                            const Views& v,
                            const TensorView& qkv,
                            bool forward) const;

  const plan::ModelConfig config_;
  const plan::MicroBatchShape micro_batch_;
  // Positions in the lists of UnitMemory.
  struct Slots {
    size_t norm0, norm1;                                          // weights
    size_t x0, rstd0, n0, qkv, att, lse, x1, rstd1, n1, gate_up;  // saved
    size_t inner, inner_gradient, hidden_gradient, scratch;       // workspace
    size_t hidden, dhidden, rope_cos, rope_sin;                   // shared
  };
  Slots slots_;
  Projection qkv_;
  Projection output_;
  Projection gate_up_;
  Projection down_;
};

}  // namespace ravel::model
