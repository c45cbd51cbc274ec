#pragma once

#include "worker/model/module.h"

namespace ravel::model {

// Final norm, output projection and cross-entropy, fused so that no [tokens, vocabulary] matrix
// exists. The projection's weight is the unit's own, or, tied, the borrowed embedding table.
// `hidden` is read, never written, by either pass.
class HeadModule final : public Module {
 public:
  HeadModule(const plan::ModelInventory& inventory, int unit);

  void Forward(kernels::Stream& stream, const UnitMemory& memory) const override;
  void ForwardOnly(kernels::Stream& stream, const UnitMemory& memory) const override;
  void Backward(kernels::Stream& stream,
                const UnitMemory& memory,
                const std::vector<FreshGradient>& gradients) const override;
  void Backward(kernels::Stream& stream,
                const UnitMemory& memory,
                const std::vector<AccumulatingGradient>& gradients) const override;

 private:
  template <typename Gradient>
  void RunBackward(kernels::Stream& stream,
                   const UnitMemory& memory,
                   const std::vector<Gradient>& gradients) const;

  const plan::ModelConfig config_;
  // Positions in the lists of UnitMemory.
  size_t norm_ = 0;
  size_t projection_ = 0;
  size_t rstd_ = 0;
  size_t normed_ = 0;
  size_t logits_ = 0;
  size_t d_normed_ = 0;
  size_t targets_ = 0;
  size_t loss_ = 0;
  size_t hidden_ = 0;
  size_t dhidden_ = 0;
};

}  // namespace ravel::model
