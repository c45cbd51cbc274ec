#pragma once

// Work memory of attention in bf16 or fp16 beyond what kernels of one tile ask for: engines that
// keep whole matrices between their passes. A function of shapes, so that it is part of the plan.

#include <cstdint>

#include "common/model/model_inventory.h"

namespace ravel::plan {

// The sizes of one pass, or of a part of it: some sequences, and key heads with their query heads.
struct AttentionPass {
  int64_t sequences = 0;
  int64_t sequence_tokens = 0;
  int64_t query_heads = 0;
  int64_t kv_heads = 0;
  int64_t head_dim = 0;
  bool exact = false;  // equal calls give equal bits
};

// Bytes that the backward of that pass may ask for at once, the forward less. For every row (a
// query of a head) a sum and an accumulator of its gradient, in fp32; where queries share keys, the
// gradients of both per query head, in two bytes; where bits matter, gradients of all scores so in
// place of sums in any order. Tested against the engines of the installed library.
int64_t AttentionEngineBytes(const AttentionPass& pass);

// The workspace that a plan gives to attention engines: the need of the largest part that stays
// below kMostAttentionBytes, where parts have fewer sequences first, then fewer key heads, or of
// the smallest part.
inline constexpr int64_t kMostAttentionBytes = int64_t{1} << 30;
int64_t AttentionWorkspaceBytes(const AttentionPass& whole);
int64_t AttentionWorkspaceBytes(const ModelConfig& config,
                                const MicroBatchShape& micro_batch,
                                bool exact);

// Layers have at least so many bytes of "scratch".
void ReserveAttentionWorkspace(int64_t bytes, ModelInventory& inventory);

}  // namespace ravel::plan
