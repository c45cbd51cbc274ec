#pragma once

#include <cstdint>

#include "common/tensor_view.h"
#include "kernels/stream.h"

namespace ravel::kernels {

// Cross-entropy over a vocabulary in blocks of rows. Of block b and a token with logits x:
//   m_b = max x,  s_b = sum of e^(x - m_b)
//   M = max of all m_b,  S = the tree over b of s_b e^(m_b - M)
//   loss = log S + M - x[target],  dx = e^(x - m_b) (e^(m_b - M) / S) - onehot(target)
// A block without rows is (-inf, 0) and is left out of S. A target of -1 is ignored: loss 0, no
// gradient. Blocks may be computed apart; only `statistics` need meet.
//
// statistics: fp32 [3 blocks, tokens], contiguous, rows 3b, 3b + 1, 3b + 2 for block b: m_b; s_b,
// then e^(m_b - M) / S; the target's logit, or -0 where it is another block's.

// Fills the three rows of one block. It leaves in `logits` what VocabularyGradient alone reads.
struct VocabularyStatisticsArgs {
  TensorView logits;      // [tokens, rows of the block], fp32, bf16 or fp16
  TensorView targets;     // [tokens] i32
  int64_t first_id = 0;   // of the block
  TensorView statistics;  // [3, tokens]
};
void VocabularyStatistics(Stream& stream, const VocabularyStatisticsArgs& args);

// Losses, and each block's factor, from all blocks: a power of two of them, at most 16.
struct VocabularyLossArgs {
  TensorView statistics;
  TensorView targets;
  int64_t vocabulary = 0;  // targets are below it
  TensorView loss;         // [tokens] fp32
};
void VocabularyLoss(Stream& stream, const VocabularyLossArgs& args);

// Turns what VocabularyStatistics left in `logits` of one block, after VocabularyLoss, into the
// gradient of the sum of losses times loss_scale (a power of two; 1 but for fp16).
struct VocabularyGradientArgs {
  TensorView logits;
  TensorView targets;
  int64_t first_id = 0;
  TensorView statistics;  // the block's [3, tokens]
  float loss_scale = 1.0f;
  const float* device_loss_scale = nullptr;  // of a device's memory, read in its place
};
void VocabularyGradient(Stream& stream, const VocabularyGradientArgs& args);

}  // namespace ravel::kernels
