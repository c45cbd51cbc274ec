#pragma once

// The order of sums in parts (determinism.tensorParts): what a model must divide into, and the
// memory that it takes.

#include "common/model/model_inventory.h"
#include "common/status.h"

namespace ravel::plan {

// Refuses parts that do not divide what they cut, naming the tensor. The config is valid.
absl::Status CheckTensorParts(int64_t parts,
                              const ModelConfig& config,
                              const MicroBatchShape& micro_batch);

// Equal blocks of a matrix's columns whose sums of squares are apart: where a tensor axis would cut
// its columns, as many as parts, for each map that is fused in it; else 1.
int64_t ColumnBlocksOf(const ModelInventory& inventory, TensorId tensor);

// Adds what sums in parts need, by inventory.cut; after the frozen tensors and the logits' chunk
// are known. Nothing for one part.
//   "parts" of layers and head: (log2(local parts) + 1) [tokens, hidden] fp32, nodes of a tree
//   "vocabulary" of the head: numbers of each token and block of the vocabulary
//   UnitSpec::leaves: sums over token blocks of norms and row biases, over parts of norms of heads
//     and of keys and values that parts share
void ReserveTensorParts(ModelInventory& inventory);

}  // namespace ravel::plan
