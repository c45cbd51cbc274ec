#pragma once

// The table of ops over one vector type; digest and copy have no common form, so each path brings
// its own.

#include "kernels/cpu/attention_gradient.h"
#include "kernels/cpu/attention_tiles.h"
#include "kernels/cpu/flat_ops.h"
#include "kernels/cpu/gemm_blocks.h"
#include "kernels/cpu/norm_ops.h"
#include "kernels/cpu/row_ops.h"
#include "kernels/cpu/simd_ops.h"

namespace ravel::kernels::cpu {

template <typename V>
constexpr SimdOps MakeSimdOps(decltype(SimdOps::digest_words) digest_words,
                              decltype(SimdOps::copy_bytes) copy_bytes) {
  return {
      .rms_norm_forward = RmsNormForwardRows<V>,
      .rms_norm_backward = RmsNormBackwardRows<V>,
      .head_norm_forward = HeadNormForwardRows<V>,
      .head_norm_backward = HeadNormBackwardRows<V>,
      .layer_norm_forward = LayerNormForwardRows<V>,
      .layer_norm_backward = LayerNormBackwardRows<V>,
      .swi_glu_forward = SwiGluForwardRows<V>,
      .swi_glu_backward = SwiGluBackwardRows<V>,
      .gelu_forward = GeluForwardRows<V>,
      .gelu_backward = GeluBackwardRows<V>,
      .add_bias = AddBiasRows<V>,
      .bias_gradient = BiasGradientRows<V>,
      .add_positions = AddPositionsRows<V>,
      .position_gradient = PositionGradientRows<V>,
      .add_in_place = AddInPlaceRows<V>,
      .rope = RopeRows<V>,
      .embedding_backward = EmbeddingBackwardRows<V>,
      .cross_entropy_loss = CrossEntropyLossRows<V>,
      .cross_entropy_gradient = CrossEntropyGradientRows<V>,
      .gemm = GemmBlocks<V>,
      .gemm_workspace_elements = GemmWorkspaceElements,
      .attention_forward = AttentionForwardTiles<V>,
      .attention_backward = AttentionBackwardTiles<V>,
      .adamw = AdamWUpdateRange<V>,
      .tree_add = TreeAddRange<V>,
      .tree_sum = TreeSumPieces<V>,
      .row_sum_squares = RowSumSquaresRows<V>,
      .digest_words = digest_words,
      .copy_bytes = copy_bytes,
      .exp = ExpRows<V>,
  };
}

}  // namespace ravel::kernels::cpu
