#pragma once

// The vectorised CPU ops as one table per instruction set. Shapes are already checked
// (kernels/dispatch.cc). Both tables hold the same templates over two vector types, so they give
// the same bits.

#include <cstdint>

#include "kernels/activation.h"
#include "kernels/adamw.h"
#include "kernels/attention.h"
#include "kernels/bias.h"
#include "kernels/cpu/quantize_strip.h"
#include "kernels/cpu/update_block.h"
#include "kernels/embedding.h"
#include "kernels/gemm.h"
#include "kernels/norm.h"
#include "kernels/part_sum.h"
#include "kernels/rope.h"
#include "kernels/row_sum.h"
#include "kernels/tree_reduce.h"
#include "kernels/vocabulary_loss.h"

namespace ravel::kernels::cpu {

// Rows of logits [tokens, vocabulary] and their targets -> losses; cross_entropy_gradient makes of
// a row (softmax - one-hot) * loss_scale, which is 1 where logits are fp32.
struct CrossEntropyRowsArgs {
  TensorView logits;
  const int32_t* targets = nullptr;
  float* loss = nullptr;
  float loss_scale = 1.0f;
};

struct SimdOps {
  void (*rms_norm_forward)(const RmsNormForwardArgs&);
  void (*rms_norm_backward)(const RmsNormBackwardArgs&);
  void (*head_norm_forward)(const HeadNormForwardArgs&);
  void (*head_norm_backward)(const HeadNormBackwardArgs&);
  void (*layer_norm_forward)(const LayerNormForwardArgs&);
  void (*layer_norm_backward)(const LayerNormBackwardArgs&);
  void (*swi_glu_forward)(const SwiGluForwardArgs&);
  void (*swi_glu_backward)(const SwiGluBackwardArgs&);
  void (*gelu_forward)(const GeluForwardArgs&);
  void (*gelu_backward)(const GeluBackwardArgs&);
  void (*add_bias)(const AddBiasArgs&);
  void (*bias_gradient)(const BiasGradientArgs&);
  void (*add_positions)(const AddPositionsArgs&);
  void (*position_gradient)(const PositionGradientArgs&);
  void (*add_in_place)(const AddArgs&);
  void (*rope)(const RopeArgs&);
  void (*embedding_backward)(const EmbeddingBackwardArgs&);
  void (*cross_entropy_loss)(const CrossEntropyRowsArgs&);
  void (*cross_entropy_gradient)(const CrossEntropyRowsArgs&);
  void (*sum_parts)(const SumPartsArgs&);
  void (*vocabulary_statistics)(const VocabularyStatisticsArgs&);
  void (*vocabulary_loss)(const VocabularyLossArgs&);
  void (*vocabulary_gradient)(const VocabularyGradientArgs&);
  // No operand is empty. The workspace holds gemm_workspace_elements.
  void (*gemm)(const GemmArgs&, float* workspace);
  int64_t (*gemm_workspace_elements)(const GemmArgs&);
  void (*attention_forward)(const AttentionForwardArgs&);
  void (*attention_backward)(const AttentionBackwardArgs&);
  void (*adamw)(const AdamWArgs&);
  void (*update_block)(const UpdateBlock&);
  const QuantizeLoops* quantize;
  void (*tree_add)(const TreeAddArgs&);
  void (*tree_sum)(const TreeSumArgs&);
  void (*row_sum_squares)(const RowSumSquaresArgs&);
  // Digest of `count` 4-byte elements whose first has the global index `first_index`.
  uint64_t (*digest_words)(const uint32_t* words, int64_t count, uint64_t first_index);
  void (*copy_bytes)(void* to, const void* from, int64_t bytes);
  // y = e^x, elementwise: for the tests of the polynomial.
  void (*exp)(const float* x, float* y, int64_t count);
};

enum class SimdPath { kPortable, kAvx2, kAvx512 };

// RunsHere returns true if this machine can run the path. OpsOf returns the path's table; that of
// AVX2 may be asked for anywhere, and called where it runs.
bool RunsHere(SimdPath path);
const SimdOps& OpsOf(SimdPath path);
// The table that ops use: of the best path that runs here, unless UseSimdPath chose another.
const SimdOps& ActiveOps();

// For tests and benchmarks, between ops.
void UseSimdPath(SimdPath path);
void UseBestSimdPath();

// How a pass over long arrays goes through their pages. Speed depends on it, results do not.
enum class PageOrder {
  kOneByOne,       // where the processor's own prefetches go on beyond the end of a page
  kSeveralAtOnce,  // where they stop there: a core waits unless several pages are under way
};
// kOneByOne on AMD, unless UsePageOrder chose another.
PageOrder ActivePageOrder();
// For tests and benchmarks, between ops.
void UsePageOrder(PageOrder order);
void UseBestPageOrder();

// AttentionWorkspaceElements of kernels/attention.h; the same for every path.
int64_t AttentionWorkspaceElements(const AttentionShape& shape);

const SimdOps& PortableOps();
const SimdOps& Avx2Ops();
const SimdOps& Avx512Ops();

}  // namespace ravel::kernels::cpu
