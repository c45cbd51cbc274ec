#pragma once

// The table of ops over one vector type; digest, copy and the loops that the compiler vectorises
// (updates, quantization) have no common form, so each path brings its own.

#include "kernels/cpu/attention_gradient.h"
#include "kernels/cpu/attention_tiles.h"
#include "kernels/cpu/flat_ops.h"
#include "kernels/cpu/gemm_blocks.h"
#include "kernels/cpu/norm_ops.h"
#include "kernels/cpu/row_ops.h"
#include "kernels/cpu/simd_ops.h"

namespace ravel::kernels::cpu {

using Bf16 = uint16_t;

// The instance of an op for the element type of an operand, which its other activations share.
template <auto kOperand, auto kF32, auto kBf16, typename Args>
void ByElement(const Args& args) {
  if ((args.*kOperand).dtype == DType::kBF16) {
    kBf16(args);
  } else {
    kF32(args);
  }
}

// What each path brings of its own.
struct OwnOps {
  decltype(SimdOps::digest_words) digest_words;
  decltype(SimdOps::copy_bytes) copy_bytes;
  decltype(SimdOps::update_block) update_block;
  decltype(SimdOps::quantize) quantize;
};

template <typename V>
constexpr SimdOps MakeSimdOps(const OwnOps& own) {
  return {
      .rms_norm_forward = ByElement<&RmsNormForwardArgs::x,
                                    RmsNormForwardRows<V, float>,
                                    RmsNormForwardRows<V, Bf16>>,
      .rms_norm_backward = ByElement<&RmsNormBackwardArgs::dy,
                                     RmsNormBackwardRows<V, float>,
                                     RmsNormBackwardRows<V, Bf16>>,
      .head_norm_forward = ByElement<&HeadNormForwardArgs::x,
                                     HeadNormForwardRows<V, float>,
                                     HeadNormForwardRows<V, Bf16>>,
      .head_norm_backward = ByElement<&HeadNormBackwardArgs::x,
                                      HeadNormBackwardRows<V, float>,
                                      HeadNormBackwardRows<V, Bf16>>,
      .layer_norm_forward = ByElement<&LayerNormForwardArgs::x,
                                      LayerNormForwardRows<V, float>,
                                      LayerNormForwardRows<V, Bf16>>,
      .layer_norm_backward = ByElement<&LayerNormBackwardArgs::dy,
                                       LayerNormBackwardRows<V, float>,
                                       LayerNormBackwardRows<V, Bf16>>,
      .swi_glu_forward = ByElement<&SwiGluForwardArgs::gate,
                                   SwiGluForwardRows<V, float>,
                                   SwiGluForwardRows<V, Bf16>>,
      .swi_glu_backward = ByElement<&SwiGluBackwardArgs::gate,
                                    SwiGluBackwardRows<V, float>,
                                    SwiGluBackwardRows<V, Bf16>>,
      .gelu_forward =
          ByElement<&GeluForwardArgs::x, GeluForwardRows<V, float>, GeluForwardRows<V, Bf16>>,
      .gelu_backward =
          ByElement<&GeluBackwardArgs::x, GeluBackwardRows<V, float>, GeluBackwardRows<V, Bf16>>,
      .add_bias = ByElement<&AddBiasArgs::y, AddBiasRows<V, float>, AddBiasRows<V, Bf16>>,
      .bias_gradient =
          ByElement<&BiasGradientArgs::dy, BiasGradientRows<V, float>, BiasGradientRows<V, Bf16>>,
      .add_positions =
          ByElement<&AddPositionsArgs::x, AddPositionsRows<V, float>, AddPositionsRows<V, Bf16>>,
      .position_gradient = ByElement<&PositionGradientArgs::dx,
                                     PositionGradientRows<V, float>,
                                     PositionGradientRows<V, Bf16>>,
      .add_in_place = ByElement<&AddArgs::x, AddInPlaceRows<V, float>, AddInPlaceRows<V, Bf16>>,
      .rope = ByElement<&RopeArgs::x, RopeRows<V, float>, RopeRows<V, Bf16>>,
      .embedding_backward = ByElement<&EmbeddingBackwardArgs::dout,
                                      EmbeddingBackwardRows<V, float>,
                                      EmbeddingBackwardRows<V, Bf16>>,
      .cross_entropy_loss = ByElement<&CrossEntropyRowsArgs::logits,
                                      CrossEntropyLossRows<V, float>,
                                      CrossEntropyLossRows<V, Bf16>>,
      .cross_entropy_gradient = ByElement<&CrossEntropyRowsArgs::logits,
                                          CrossEntropyGradientRows<V, float>,
                                          CrossEntropyGradientRows<V, Bf16>>,
      .gemm = GemmBlocks<V>,
      .gemm_workspace_elements = GemmWorkspaceElements,
      .attention_forward = ByElement<&AttentionForwardArgs::q,
                                     AttentionForwardTiles<V, float>,
                                     AttentionForwardTiles<V, Bf16>>,
      .attention_backward = ByElement<&AttentionBackwardArgs::q,
                                      AttentionBackwardTiles<V, float>,
                                      AttentionBackwardTiles<V, Bf16>>,
      .adamw = AdamWUpdateRange<V>,
      .update_block = own.update_block,
      .quantize = own.quantize,
      .tree_add = TreeAddRange<V>,
      .tree_sum = TreeSumPieces<V>,
      .row_sum_squares = RowSumSquaresRows<V>,
      .digest_words = own.digest_words,
      .copy_bytes = own.copy_bytes,
      .exp = ExpRows<V>,
  };
}

}  // namespace ravel::kernels::cpu
