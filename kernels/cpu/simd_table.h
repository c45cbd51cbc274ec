#pragma once

// The table of ops over one vector type; digest, copy and the loops that the compiler vectorises
// (updates, quantization) have no common form, so each path brings its own.

#include "kernels/cpu/attention_gradient.h"
#include "kernels/cpu/attention_tiles.h"
#include "kernels/cpu/flat_ops.h"
#include "kernels/cpu/gemm_blocks.h"
#include "kernels/cpu/norm_ops.h"
#include "kernels/cpu/part_ops.h"
#include "kernels/cpu/row_ops.h"
#include "kernels/cpu/simd_ops.h"

namespace ravel::kernels::cpu {

using Bf16 = uint16_t;

// The instance of an op for the element type of an operand, which its other activations share.
template <auto kOperand, auto kF32, auto kBf16, auto kFp16, typename Args>
void ByElement(const Args& args) {
  const DType dtype = (args.*kOperand).dtype;
  if (dtype == DType::kBF16) {
    kBf16(args);
  } else if (dtype == DType::kF16) {
    kFp16(args);
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
constexpr void AddNorms(SimdOps& ops) {
  ops.rms_norm_forward = ByElement<&RmsNormForwardArgs::x,
                                   RmsNormForwardRows<V, float>,
                                   RmsNormForwardRows<V, Bf16>,
                                   RmsNormForwardRows<V, Fp16>>;
  ops.rms_norm_backward = ByElement<&RmsNormBackwardArgs::dy,
                                    RmsNormBackwardRows<V, float>,
                                    RmsNormBackwardRows<V, Bf16>,
                                    RmsNormBackwardRows<V, Fp16>>;
  ops.head_norm_forward = ByElement<&HeadNormForwardArgs::x,
                                    HeadNormForwardRows<V, float>,
                                    HeadNormForwardRows<V, Bf16>,
                                    HeadNormForwardRows<V, Fp16>>;
  ops.head_norm_backward = ByElement<&HeadNormBackwardArgs::x,
                                     HeadNormBackwardRows<V, float>,
                                     HeadNormBackwardRows<V, Bf16>,
                                     HeadNormBackwardRows<V, Fp16>>;
  ops.layer_norm_forward = ByElement<&LayerNormForwardArgs::x,
                                     LayerNormForwardRows<V, float>,
                                     LayerNormForwardRows<V, Bf16>,
                                     LayerNormForwardRows<V, Fp16>>;
  ops.layer_norm_backward = ByElement<&LayerNormBackwardArgs::dy,
                                      LayerNormBackwardRows<V, float>,
                                      LayerNormBackwardRows<V, Bf16>,
                                      LayerNormBackwardRows<V, Fp16>>;
}

template <typename V>
constexpr void AddRowOps(SimdOps& ops) {
  ops.swi_glu_forward = ByElement<&SwiGluForwardArgs::gate,
                                  SwiGluForwardRows<V, float>,
                                  SwiGluForwardRows<V, Bf16>,
                                  SwiGluForwardRows<V, Fp16>>;
  ops.swi_glu_backward = ByElement<&SwiGluBackwardArgs::gate,
                                   SwiGluBackwardRows<V, float>,
                                   SwiGluBackwardRows<V, Bf16>,
                                   SwiGluBackwardRows<V, Fp16>>;
  ops.gelu_forward = ByElement<&GeluForwardArgs::x,
                               GeluForwardRows<V, float>,
                               GeluForwardRows<V, Bf16>,
                               GeluForwardRows<V, Fp16>>;
  ops.gelu_backward = ByElement<&GeluBackwardArgs::x,
                                GeluBackwardRows<V, float>,
                                GeluBackwardRows<V, Bf16>,
                                GeluBackwardRows<V, Fp16>>;
  ops.add_bias =
      ByElement<&AddBiasArgs::y, AddBiasRows<V, float>, AddBiasRows<V, Bf16>, AddBiasRows<V, Fp16>>;
  ops.bias_gradient = ByElement<&BiasGradientArgs::dy,
                                BiasGradientRows<V, float>,
                                BiasGradientRows<V, Bf16>,
                                BiasGradientRows<V, Fp16>>;
  ops.add_in_place = ByElement<&AddArgs::x,
                               AddInPlaceRows<V, float>,
                               AddInPlaceRows<V, Bf16>,
                               AddInPlaceRows<V, Fp16>>;
  ops.rope = ByElement<&RopeArgs::x, RopeRows<V, float>, RopeRows<V, Bf16>, RopeRows<V, Fp16>>;
}

template <typename V>
constexpr void AddTablesAndAttention(SimdOps& ops) {
  ops.add_positions = ByElement<&AddPositionsArgs::x,
                                AddPositionsRows<V, float>,
                                AddPositionsRows<V, Bf16>,
                                AddPositionsRows<V, Fp16>>;
  ops.position_gradient = ByElement<&PositionGradientArgs::dx,
                                    PositionGradientRows<V, float>,
                                    PositionGradientRows<V, Bf16>,
                                    PositionGradientRows<V, Fp16>>;
  ops.embedding_backward = ByElement<&EmbeddingBackwardArgs::dout,
                                     EmbeddingBackwardRows<V, float>,
                                     EmbeddingBackwardRows<V, Bf16>,
                                     EmbeddingBackwardRows<V, Fp16>>;
  ops.cross_entropy_loss = ByElement<&CrossEntropyRowsArgs::logits,
                                     CrossEntropyLossRows<V, float>,
                                     CrossEntropyLossRows<V, Bf16>,
                                     CrossEntropyLossRows<V, Fp16>>;
  ops.cross_entropy_gradient = ByElement<&CrossEntropyRowsArgs::logits,
                                         CrossEntropyGradientRows<V, float>,
                                         CrossEntropyGradientRows<V, Bf16>,
                                         CrossEntropyGradientRows<V, Fp16>>;
  ops.attention_forward = ByElement<&AttentionForwardArgs::q,
                                    AttentionForwardTiles<V, float>,
                                    AttentionForwardTiles<V, Bf16>,
                                    AttentionForwardTiles<V, Fp16>>;
  ops.attention_backward = ByElement<&AttentionBackwardArgs::q,
                                     AttentionBackwardTiles<V, float>,
                                     AttentionBackwardTiles<V, Bf16>,
                                     AttentionBackwardTiles<V, Fp16>>;
}

template <typename V>
constexpr void AddParts(SimdOps& ops) {
  ops.sum_parts = ByElement<&SumPartsArgs::out,
                            SumPartsRows<V, float>,
                            SumPartsRows<V, Bf16>,
                            SumPartsRows<V, Fp16>>;
  ops.vocabulary_statistics = ByElement<&VocabularyStatisticsArgs::logits,
                                        VocabularyStatisticsRows<V, float>,
                                        VocabularyStatisticsRows<V, Bf16>,
                                        VocabularyStatisticsRows<V, Fp16>>;
  ops.vocabulary_loss = VocabularyLossRows<V>;
  ops.vocabulary_gradient = ByElement<&VocabularyGradientArgs::logits,
                                      VocabularyGradientRows<V, float>,
                                      VocabularyGradientRows<V, Bf16>,
                                      VocabularyGradientRows<V, Fp16>>;
}

template <typename V>
constexpr SimdOps MakeSimdOps(const OwnOps& own) {
  SimdOps ops = {};
  AddNorms<V>(ops);
  AddRowOps<V>(ops);
  AddTablesAndAttention<V>(ops);
  AddParts<V>(ops);
  ops.gemm = GemmBlocks<V>;
  ops.gemm_workspace_elements = GemmWorkspaceElements;
  ops.adamw = AdamWUpdateRange<V>;
  ops.update_block = own.update_block;
  ops.quantize = own.quantize;
  ops.tree_add = TreeAddRange<V>;
  ops.tree_sum = TreeSumPieces<V>;
  ops.row_sum_squares = RowSumSquaresRows<V>;
  ops.digest_words = own.digest_words;
  ops.copy_bytes = own.copy_bytes;
  ops.exp = ExpRows<V>;
  return ops;
}

}  // namespace ravel::kernels::cpu
