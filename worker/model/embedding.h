#pragma once

#include "worker/model/module.h"

namespace ravel::model {

// hidden = table[ids]; backward adds dhidden's rows into the table's gradient.
class EmbeddingModule final : public Module {
 public:
  explicit EmbeddingModule(const plan::ModelInventory& inventory);

  void Forward(kernels::Stream& stream, const UnitMemory& memory) const override;
  void ForwardOnly(kernels::Stream& stream, const UnitMemory& memory) const override;
  void Backward(kernels::Stream& stream,
                const UnitMemory& memory,
                const std::vector<FreshGradient>& gradients) const override;
  void Backward(kernels::Stream& stream,
                const UnitMemory& memory,
                const std::vector<AccumulatingGradient>& gradients) const override;

 private:
  size_t ids_ = 0;
  size_t hidden_ = 0;
  size_t dhidden_ = 0;
};

}  // namespace ravel::model
