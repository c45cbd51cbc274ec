// Names of passes and segments, as plans and traces print them.

#include "common/model/segments.h"

namespace ravel::plan {

const char* SegmentName(SegmentKind kind) {
  switch (kind) {
    case SegmentKind::kTable:
      return "table";
    case SegmentKind::kPositions:
      return "positions";
    case SegmentKind::kAttentionNorm:
      return "attention_norm";
    case SegmentKind::kAttention:
      return "attention";
    case SegmentKind::kMlpNorm:
      return "mlp_norm";
    case SegmentKind::kMlp:
      return "mlp";
    case SegmentKind::kFinalNorm:
      return "final_norm";
    case SegmentKind::kLoss:
      return "loss";
    case SegmentKind::kTableSum:
      return "table_sum";
    case SegmentKind::kAttentionResidual:
      return "attention_residual";
    case SegmentKind::kMlpResidual:
      return "mlp_residual";
    case SegmentKind::kAttentionInput:
      return "attention_input";
    case SegmentKind::kMlpInput:
      return "mlp_input";
    case SegmentKind::kLossStatistics:
      return "loss_statistics";
    case SegmentKind::kLossOfChunk:
      return "loss_of_chunk";
    case SegmentKind::kLossInput:
      return "loss_input";
    case SegmentKind::kAttentionNormed:
      return "attention_normed";
    case SegmentKind::kMlpNormed:
      return "mlp_normed";
    case SegmentKind::kLossNormed:
      return "loss_normed";
    case SegmentKind::kAttentionGradient:
      return "attention_gradient";
    case SegmentKind::kMlpGradient:
      return "mlp_gradient";
    case SegmentKind::kTableGradient:
      return "table_gradient";
    case SegmentKind::kAttentionOutput:
      return "attention_output";
    case SegmentKind::kMlpOutput:
      return "mlp_output";
    case SegmentKind::kAttentionInputProduct:
      return "attention_input_product";
    case SegmentKind::kMlpInputProduct:
      return "mlp_input_product";
    case SegmentKind::kAttentionWeights:
      return "attention_weights";
    case SegmentKind::kMlpWeights:
      return "mlp_weights";
  }
  return "?";
}

const char* UnitPassName(UnitPass pass) {
  switch (pass) {
    case UnitPass::kForward:
      return "forward";
    case UnitPass::kEvaluate:
      return "evaluate";
    case UnitPass::kRecompute:
      return "recompute";
    case UnitPass::kBackward:
      return "backward";
  }
  return "?";
}

}  // namespace ravel::plan
