#pragma once

// One decoder layer: x1 = x0 + Attention(Norm(x0)); out = x1 + Mlp(Norm(x1)).

#include "worker/model/attention_block.h"
#include "worker/model/mlp_block.h"

namespace ravel::model {

// The residual stream lives in `hidden` and is updated in place: the output projections accumulate
// into it, so that no pass is spent on adding.
class LayerModule final : public UnitModule {
 public:
  LayerModule(const plan::ModelInventory& inventory,
              plan::UnitId unit,
              const plan::MicroBatchShape& micro_batch);

  void Prepare(kernels::Stream& stream, const UnitMemory& memory) const override {
    attention_.Prepare(stream, memory);
  }

 protected:
  void ForwardSegment(kernels::Stream& stream,
                      const UnitMemory& memory,
                      plan::SegmentKind kind) const override;
  void RemakeSegment(kernels::Stream& stream,
                     const UnitMemory& memory,
                     plan::SegmentKind kind) const override;
  void BackwardSegment(kernels::Stream& stream,
                       const UnitMemory& memory,
                       plan::SegmentKind kind,
                       const WeightGradients& gradients) const override;

 private:
  AttentionBlock attention_;
  MlpBlock mlp_;
};

}  // namespace ravel::model
