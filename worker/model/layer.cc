#include "worker/model/layer.h"

#include "common/check.h"

namespace ravel::model {

using plan::SegmentKind;

LayerModule::LayerModule(const plan::ModelInventory& inventory,
                         plan::UnitId unit,
                         const plan::MicroBatchShape& micro_batch)
    : UnitModule(inventory, unit),
      attention_(UnitTensors(inventory, unit), micro_batch),
      mlp_(UnitTensors(inventory, unit)) {}

void LayerModule::ForwardSegment(kernels::Stream& stream,
                                 const UnitMemory& memory,
                                 SegmentKind kind) const {
  switch (kind) {
    case SegmentKind::kAttentionNorm:
      return attention_.ForwardNorm(stream, memory);
    case SegmentKind::kAttentionNormed:
      return attention_.GiveNormed(stream, memory);
    case SegmentKind::kMlpNormed:
      return mlp_.GiveNormed(stream, memory);
    case SegmentKind::kAttention:
      return attention_.Forward(stream, memory);
    case SegmentKind::kAttentionResidual:
      return attention_.ForwardSum(stream, memory);
    case SegmentKind::kMlpNorm:
      return mlp_.ForwardNorm(stream, memory);
    case SegmentKind::kMlp:
      return mlp_.Forward(stream, memory);
    case SegmentKind::kMlpResidual:
      return mlp_.ForwardSum(stream, memory);
    case SegmentKind::kAttentionOutput:
      return attention_.Output(stream, memory);
    case SegmentKind::kMlpOutput:
      return mlp_.Output(stream, memory);
    default:
      CheckFailed(__FILE__, __LINE__, "segment", "none of a layer");
  }
}

void LayerModule::RemakeSegment(kernels::Stream& stream,
                                const UnitMemory& memory,
                                SegmentKind kind) const {
  switch (kind) {
    case SegmentKind::kAttentionNorm:
      return attention_.RemakeNorm(stream, memory);
    case SegmentKind::kAttentionNormed:
      return attention_.GiveNormed(stream, memory);
    case SegmentKind::kMlpNormed:
      return mlp_.GiveNormed(stream, memory);
    case SegmentKind::kAttention:
      return attention_.Remake(stream, memory);
    case SegmentKind::kAttentionOutput:
      return attention_.Output(stream, memory);
    case SegmentKind::kAttentionResidual:
      return attention_.RemakeSum(stream, memory);
    case SegmentKind::kMlpNorm:
      return mlp_.RemakeNorm(stream, memory);
    case SegmentKind::kMlp:
      return mlp_.Remake(stream, memory);
    default:
      CheckFailed(__FILE__, __LINE__, "segment", "none of a layer");
  }
}

void LayerModule::BackwardSegment(kernels::Stream& stream,
                                  const UnitMemory& memory,
                                  SegmentKind kind,
                                  const WeightGradients& gradients) const {
  switch (kind) {
    case SegmentKind::kMlpNormed:
      return mlp_.GiveNormed(stream, memory);
    case SegmentKind::kMlpGradient:
      return mlp_.GiveGradient(stream, memory);
    case SegmentKind::kMlp:
      return mlp_.Backward(stream, memory, gradients);
    case SegmentKind::kMlpInputProduct:
      return mlp_.InputProduct(stream, memory);
    case SegmentKind::kMlpInput:
      return mlp_.BackwardSum(stream, memory);
    case SegmentKind::kMlpWeights:
      return mlp_.InputWeights(stream, memory, gradients);
    case SegmentKind::kMlpNorm:
      return mlp_.BackwardNorm(stream, memory, gradients);
    case SegmentKind::kAttentionNormed:
      return attention_.GiveNormed(stream, memory);
    case SegmentKind::kAttentionGradient:
      return attention_.GiveGradient(stream, memory);
    case SegmentKind::kAttention:
      return attention_.Backward(stream, memory, gradients);
    case SegmentKind::kAttentionInputProduct:
      return attention_.InputProduct(stream, memory);
    case SegmentKind::kAttentionInput:
      return attention_.BackwardSum(stream, memory);
    case SegmentKind::kAttentionWeights:
      return attention_.InputWeights(stream, memory, gradients);
    case SegmentKind::kAttentionNorm:
      return attention_.BackwardNorm(stream, memory, gradients);
    default:
      CheckFailed(__FILE__, __LINE__, "segment", "none of a layer");
  }
}

}  // namespace ravel::model
